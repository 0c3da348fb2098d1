"""`DepthHistory`: the sources of one forward pass, and what each sublayer reads of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mhar.errors import InputError, OrderError
from mhar.ops.backend import resolve_backend
from mhar.ops.functional import depth_read
from mhar.ops.reference import compute_dtype, mix
from mhar.routing.hooks import SiteRead
from mhar.routing.plan import SitePlan

if TYPE_CHECKING:
    from mhar.routing.engine import FusedPass
    from mhar.routing.router import DepthRouter


class DepthHistory:
    """The sources of one forward pass. Made by `DepthRouter.start`; `read()` and `append()` alternate.

    Routing is local to a token position, so a history lives for one forward pass: decoding with a KV cache keeps none.
    """

    def __init__(self, router: "DepthRouter", embedding: Tensor) -> None:
        self._router = router
        self._config = router.config
        self._hooks = router.hooks.active()
        self._shape = embedding.shape
        self._row_dtype = _history_dtype(embedding)
        self._autocast = _autocasting(embedding)
        self._with_grad = torch.is_grad_enabled()
        self._embedding_dtype = embedding.dtype
        self._index = 0  # sublayer outputs appended so far
        self._read_done = False
        self._rows: list[Tensor] = [embedding.to(self._row_dtype)]
        self._versions: list[int | None] = [_version(self._rows[0])]
        self._stream: Tensor | None = None if self._config.read == "replace" else embedding
        self._block_start = embedding  # the stream at the start of the current block (add reads of blocks)
        self._partial: Tensor | None = None  # sum over the current block (replace reads of blocks)
        self._newest = embedding
        self._fused = None if self._hooks else _start_fused(router, embedding, self._row_dtype)
        self._token = self._fused.token() if self._fused is not None else None
        self._partials: dict[int, Tensor] = {}  # per site, for `weights`; kept only where autograd keeps them anyway

    def read(self, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """What the next sublayer reads: [..., D].

        Args:
            norm: the norm that follows the read, applied to its result: `read(norm)` is `norm(read())`, and a fused
                backend may compute both at once.

        Raises:
            OrderError: past the last site, or a second read before `append`.
            InputError: a source was modified in place since it was appended (checked in eager training).
        """
        self._check_read_order()
        self._read_done = True
        if self._fused is not None and self._token is not None:
            self._check_versions(1)
            hidden, self._token = self._fused.read(self._index, self._newest, self._token, norm)
            return hidden
        hidden = self._read(self._router.plan[self._index])
        return hidden if norm is None else norm(hidden)

    def append(self, output: Tensor) -> None:
        """Add the raw output [..., D] of the sublayer that used the last read.

        Raises:
            OrderError: before the site was read, or past the last sublayer.
            InputError: a shape, dtype or device that differs from the embedding's.
        """
        self._check_append_order()
        self._check_output(output)
        self._index += 1
        self._read_done = False
        if self._fused is not None:
            self._newest = self._rows[0] = output
            self._versions[0] = _version(output)
            return
        # An output computed under no_grad is a constant; the sums it joins still carry the gradients of the others.
        with torch.set_grad_enabled(self._with_grad or torch.is_grad_enabled()):
            self._add_source(output)

    def weights(self, site: int | str) -> Tensor | None:
        """Routing weights [N, ..., H] of a site that was read, detached; None where the site has no sources.

        Args:
            site: an index, or a name such as "layers.0.mlp" or "final".
        """
        plan = self._router.plan[self._router.site_index(site)]
        if plan.index > self._index or (plan.index == self._index and not self._read_done):
            raise OrderError(f"site {plan.name} has not been read yet, so it has no weights")
        if not plan.source_names:
            return None
        with torch.no_grad():
            _, weights = self._weighted_read(plan, self._sources(plan))
            weights = self._changed(plan, weights)
        return weights.detach()

    # What each read mixes.

    def _read(self, plan: SitePlan) -> Tensor:
        if not plan.source_names:
            assert self._stream is not None
            return self._stream
        sources = self._sources(plan)
        mixture = self._mixture(plan, sources)
        if self._stream is None:
            return mixture
        gate = self._router.gate
        return self._stream + (mixture if gate is None else gate[plan.row] * mixture)

    def _mixture(self, plan: SitePlan, sources: list[Tensor]) -> Tensor:
        if self._hooks:
            return self._observed_mixture(plan, sources)
        if len(sources) == 1:
            return sources[0]
        query, norm_weight = self._parameters(plan)
        router = self._router
        return depth_read(
            sources, query, norm_weight, num_heads=router.num_heads, eps=router.eps, backend=router.backend
        )

    def _observed_mixture(self, plan: SitePlan, sources: list[Tensor]) -> Tensor:
        mixture, weights = self._weighted_read(plan, sources)
        changed = self._changed(plan, weights)
        for observer in self._hooks.observers:
            observer(
                SiteRead(plan.index, plan.name, plan.source_names, changed.detach(), [s.detach() for s in sources])
            )
        if not self._hooks.interventions:
            return mixture  # the read itself: observing costs no second mixture and changes no bit
        return mix(torch.stack([s.to(changed.dtype) for s in sources]), changed).to(self._row_dtype)

    def _weighted_read(self, plan: SitePlan, sources: list[Tensor]) -> tuple[Tensor, Tensor]:
        query, norm_weight = self._parameters(plan)
        router = self._router
        return depth_read(
            sources,
            query,
            norm_weight,
            num_heads=router.num_heads,
            eps=router.eps,
            return_weights=True,
            backend=router.backend,
        )

    def _changed(self, plan: SitePlan, weights: Tensor) -> Tensor:
        """The weights after all interventions."""
        for intervention in self._hooks.interventions:
            changed = intervention(plan, weights)
            if changed.shape != weights.shape:
                raise InputError(
                    f"an intervention must keep the weights' shape {list(weights.shape)}, got {list(changed.shape)}"
                )
            weights = changed
        return weights

    def _parameters(self, plan: SitePlan) -> tuple[Tensor, Tensor]:
        query, norm_weight = self._router.query, self._router.norm_weight
        assert query is not None
        assert norm_weight is not None
        assert plan.row is not None
        return query[plan.row], norm_weight[plan.row]

    def _sources(self, plan: SitePlan) -> list[Tensor]:
        if self._fused is not None:
            sources = self._fused.rows(plan.num_rows)
        else:
            self._check_versions(plan.num_rows)
            sources = self._rows[: plan.num_rows]
        if plan.has_null:
            null = self._router.null_source
            assert null is not None
            assert plan.row is not None
            sources = [null[plan.row].to(self._row_dtype).expand(self._shape), *sources]
        if plan.has_partial:
            sources = [*sources, self._partial_of(plan)]
        return sources

    def _partial_of(self, plan: SitePlan) -> Tensor:
        if plan.index == self._index and self._partial is not None:
            return self._partial
        if self._fused is not None:
            self._partials |= self._fused.partials()
        if plan.index not in self._partials:
            raise OrderError(
                f"the partial sum of site {plan.name} is not kept without gradients:"
                " observe its weights with router.observe(...)"
            )
        return self._partials[plan.index]

    # How sources come to be.

    def _add_source(self, output: Tensor) -> None:
        if self._stream is not None:
            self._stream = self._stream + output
        if self._config.read == "none":
            return
        if self._config.sources == "sublayer":
            self._add_row(output)
        elif self._config.read == "replace":
            self._grow_block(output)
        elif self._at_block_end():
            self._add_delta()

    def _add_row(self, row: Tensor) -> None:
        row = row.to(self._row_dtype)
        self._rows.append(row)
        self._versions.append(_version(row))

    def _grow_block(self, output: Tensor) -> None:
        output = output.to(self._row_dtype)
        self._partial = output if self._partial is None else self._partial + output
        if self._at_block_end():
            self._add_row(self._partial)
            self._partial = None
        elif torch.is_grad_enabled():
            self._partials[self._index] = self._partial

    def _add_delta(self) -> None:
        assert self._stream is not None
        if self._index < self._router.num_sites - 1:
            before = self._rows[-1] if self._config.legacy_delta_recursion else self._block_start
            self._add_row(self._stream - before)
            self._block_start = self._stream

    def _at_block_end(self) -> bool:
        return self._index % (2 * self._config.block_size) == 0

    # Checks.

    def _check_read_order(self) -> None:
        last = self._router.num_sites - 1
        if self._read_done:
            site = self._router.plan[self._index].name
            rule = "it was the last site" if self._index == last else "append its sublayer's output first"
            raise OrderError(f"read() at site {site} was already done: {rule} (num_sites is {last + 1})")

    def _check_append_order(self) -> None:
        last = self._router.num_sites - 1
        if self._index == last:
            raise OrderError(f"append() after the last of {last} sublayers (num_sites is {last + 1})")
        if not self._read_done:
            raise OrderError(f"append() needs a read() first: site {self._router.plan[self._index].name} was not read")

    def _check_output(self, output: Tensor) -> None:
        if not isinstance(output, Tensor):
            raise InputError(f"a sublayer's output must be a tensor, got {type(output).__name__}")
        if output.shape != self._shape:
            raise InputError(
                f"a sublayer's output must have the embedding's shape {list(self._shape)}, got {list(output.shape)}"
            )
        if output.device != self._rows[0].device:
            raise InputError(f"a sublayer's output must be on {self._rows[0].device}, got {output.device}")
        if output.dtype != self._embedding_dtype and not self._autocast:
            raise InputError(
                f"a sublayer's output must have the embedding's dtype {self._embedding_dtype} (outside autocast),"
                f" got {output.dtype}"
            )

    def _check_versions(self, num_rows: int) -> None:
        if torch.compiler.is_compiling():
            return
        for index in range(num_rows):
            if self._versions[index] != _version(self._rows[index]):
                raise InputError(f"source {index} was modified in place after it was appended; sources must not change")


def _start_fused(router: "DepthRouter", embedding: Tensor, row_dtype: torch.dtype) -> "FusedPass | None":
    """The fused path where the backend is Triton; None for the reads one by one.

    Inside torch.compile reads also run one by one, as opaque operators: the fused path keeps state between calls.
    """
    if torch.compiler.is_compiling() or router.config.read == "none":
        return None
    sample = embedding if embedding.dtype == row_dtype else embedding.new_empty((0, router.width), dtype=row_dtype)
    if resolve_backend(router.backend, sample) != "triton":
        return None
    from mhar.routing.engine import start_fused

    return start_fused(router, embedding, row_dtype)


def _history_dtype(embedding: Tensor) -> torch.dtype:
    """Sources are stored in the embedding's dtype, under autocast in autocast's."""
    if compute_dtype(embedding.dtype) == torch.float64 or not _autocasting(embedding):
        return embedding.dtype
    return torch.get_autocast_dtype(embedding.device.type)


def _autocasting(tensor: Tensor) -> bool:
    """Whether autocast is on for the tensor's device; false where there is no autocast (meta)."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _version(tensor: Tensor) -> int | None:
    """The in-place version counter; None where PyTorch keeps none (inference tensors, compiled code)."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return tensor._version
