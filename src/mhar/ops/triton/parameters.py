"""The routing parameters as the kernels read them, and their gradients from what the kernels sum up."""

import torch
from torch import Tensor


class SiteParameters:
    """query * norm_weight and its companions, indexed by site (zeros where a site owns no parameters).

    Args:
        query, norm_weight: [P, D]; gate: [P] or None; null_source: [P, D] or None.
        first: the site of row 0; sites first .. first + P - 1 own the rows in order.
        num_sites, num_heads, eps: of the router. dtype: of the source rows.
    """

    def __init__(
        self,
        query: Tensor,
        norm_weight: Tensor,
        gate: Tensor | None,
        null_source: Tensor | None,
        *,
        first: int,
        num_sites: int,
        num_heads: int,
        eps: float,
        dtype: torch.dtype,
        trained: bool,
    ) -> None:
        self.query, self.norm_weight = query.detach().float(), norm_weight.detach().float()
        self.first, self.num_sites, self.num_heads, self.eps = first, num_sites, num_heads, eps
        self.count, self.width = query.shape
        self.trained = trained
        self.has_gate, self.has_null = gate is not None, null_source is not None
        self.a = self._by_site(self.query * self.norm_weight)
        self.a_high = self.a_low = self.a
        if dtype == torch.bfloat16:
            self.a_high = self.a.to(dtype)
            self.a_low = (self.a - self.a_high.float()).to(dtype)
        self.gate = self.a if gate is None else self._by_site(gate.detach().float())
        self.null = self.null_logit = self.a
        if null_source is not None:
            self.null = self._by_site(null_source.detach().to(dtype).float())
            self.null_r = torch.rsqrt(self.null.square().mean(-1, keepdim=True) + eps)
            self.null_logit = self._heads(self.a * self.null * self.null_r).contiguous()

    def _by_site(self, rows: Tensor) -> Tensor:
        if self.count == self.num_sites:
            return rows.contiguous()
        out = rows.new_zeros(self.num_sites, *rows.shape[1:])
        out[self.first : self.first + self.count] = rows
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).sum(-1)

    def gradients(
        self, d_a: Tensor, d_gate: Tensor | None, null_c: Tensor | None, d_null: Tensor, last: int
    ) -> dict[str, Tensor]:
        """Gradients by parameter name from sums over tokens.

        Args:
            d_a: [M, D], the source rows' part of the gradient of query * norm_weight.
            d_gate: [M], sums of <dout, out>. Sites from `last` on took no part in the backward pass.
            null_c: [H, M...], sums of the null source's logit gradients; d_null: [M, D], its gradient as a value.
        """
        if null_c is not None:
            d_logit = null_c[:, : self.num_sites].T.contiguous()  # [M, H]
            d_logit[last:] = 0.0
            spread = d_logit.repeat_interleave(self.width // self.num_heads, dim=-1) * self.null_r
            through_norm = (d_logit * self.null_logit).sum(-1, keepdim=True) * self.null_r.square() / self.width
            d_null = d_null + spread * self.a - through_norm * self.null
            d_a = d_a + spread * self.null
        own = slice(self.first, self.first + self.count)
        result: dict[str, Tensor] = {}
        if self.trained:
            result["query"] = d_a[own] * self.norm_weight
            result["norm_weight"] = d_a[own] * self.query
        if d_gate is not None:
            d_gate = d_gate[: self.num_sites].clone()
            d_gate[last:] = 0.0
            result["gate"] = d_gate[own]
        if null_c is not None:
            result["null_source"] = d_null[own]
        return result
