"""The fused path behind `DepthHistory`: one autograd function per site over buffers that all sites of a pass share.

Each site's function takes the newest source and returns what the next sublayer reads. The gradients of all routing
parameters leave at the first site's function, when they are complete. A zero-size token runs from site to site, so that
the backward calls come in reverse order even where a sublayer is frozen or detached.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mhar.errors import OrderError
from mhar.ops.schedule import sublayer_schedule
from mhar.ops.triton.block import BlockPass
from mhar.ops.triton.parameters import SiteParameters
from mhar.ops.triton.passes import RoutedPass, Saved
from mhar.ops.triton.sublayer import SublayerPass
from mhar.ops.triton.tuning import Tuning, tuning_for

if TYPE_CHECKING:
    from mhar.routing.router import DepthRouter

Norm = Callable[[Tensor], Tensor]
PARAMETERS = ("query", "norm_weight", "gate", "null_source")
# Norms that the read can apply: what each adds to its weight.
RMS_NORMS = {
    "RMSNorm": 0.0,
    **{
        f"{family}RMSNorm": 0.0
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3", "Phi3", "Granite", "Olmo2")
    },
    "Gemma3RMSNorm": 1.0,
}


class FusedPass:
    """One forward pass of a router on the fused path, and the one backward pass it allows."""

    def __init__(self, router: "DepthRouter", embedding: Tensor, row_dtype: torch.dtype) -> None:
        self.router = router
        self.shape = embedding.shape
        self.next_backward: int | None = None
        self.first_saved: int | None = None  # the site where the backward pass ends
        self.no_gradient = torch.empty(0, device=embedding.device)  # of every token
        self.device_index = embedding.device.index
        parameters = {name: p for name in PARAMETERS if (p := getattr(router, name)) is not None}
        self.dtypes = {name: p.dtype for name, p in parameters.items()}  # sharding may change them by the backward
        self.with_grad = torch.is_grad_enabled()
        self.trainable = any(p.requires_grad for p in parameters.values())
        self.trained = self.with_grad and self.trainable
        self.passes = self._buffers(embedding, row_dtype)

    @torch.no_grad()
    def _buffers(self, embedding: Tensor, row_dtype: torch.dtype) -> RoutedPass:
        router = self.router
        first = next(index for index, row in enumerate(router.site_rows) if row is not None)
        assert router.query is not None
        assert router.norm_weight is not None
        parameters = SiteParameters(
            router.query, router.norm_weight, router.gate, router.null_source,
            first=first, num_sites=router.num_sites, num_heads=router.num_heads, eps=router.eps, dtype=row_dtype,
            trained=self.trained,
        )  # fmt: skip
        tuning = router.tuning or self._tuning(embedding, row_dtype)
        add = router.config.read == "add"
        if router.config.sources == "block":
            num_rows = tuple(site.num_rows for site in router.plan)
            stream_dtype = embedding.dtype if add else row_dtype
            return BlockPass(
                num_rows, 2 * router.config.block_size, add, parameters, embedding.shape, row_dtype, stream_dtype,
                tuning, router.kernels,
            )  # fmt: skip
        schedule = sublayer_schedule(first, first + parameters.count, router.schedule, (tuning.block, tuning.inner))
        stream_dtype = embedding.dtype if add else None
        return SublayerPass(schedule, parameters, embedding.shape, row_dtype, stream_dtype, tuning, router.kernels)

    def _tuning(self, embedding: Tensor, row_dtype: torch.dtype) -> Tuning:
        capability = torch.cuda.get_device_capability(embedding.device) if embedding.is_cuda else (0, 0)
        router = self.router
        return tuning_for(router.width, router.num_heads, router.num_sites, row_dtype, capability)

    def token(self) -> Tensor:
        """The token that site 0 takes."""
        return torch.empty(0, device=self.passes.r.device)

    def read(self, s: int, x: Tensor, token: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """What the sublayer after site s reads, its newest source being x; normed with `norm`. Also the next token.

        The token must not be kept here: its graph refers to this object, and neither would ever be freed.
        """
        fused = None if norm is None else fusible_norm(norm, self.router.width)
        given: tuple[Tensor | None, ...] = (None,) * len(PARAMETERS)
        if s == 0:
            given = tuple(getattr(self.router, name) for name in PARAMETERS)
        weight, eps, offset = (None, 0.0, 0.0) if fused is None else fused
        # A read under no_grad is a constant, but its newest source still takes gradients from later reads.
        constant = self.with_grad and not torch.is_grad_enabled()
        self._check_grad_mode(s)
        with torch.enable_grad() if constant else nullcontext():
            weight = weight.detach() if constant and weight is not None else weight
            inputs = (x, token, weight, *given)
            save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
            hidden, token = SiteRead.apply(self, s, save, x, token, (eps, offset), weight, *given)
        hidden = hidden.detach() if constant else hidden
        return hidden if norm is None or fused is not None else norm(hidden), token

    def _check_grad_mode(self, s: int) -> None:
        if torch.is_grad_enabled() and not self.with_grad and self.trainable:
            raise OrderError(
                "a history that starts without gradients cannot train: router.start() ran under no_grad, and the read"
                f" at site {self.router.plan[s].name} needs the router's gradients; call start() with gradients enabled"
            )

    def rows(self, count: int) -> list[Tensor]:
        """The first `count` source rows [..., D], as views; OrderError once a backward pass has reused their memory."""
        if self.next_backward is not None:
            raise OrderError("the backward pass has released the sources: ask for weights before backward()")
        return [self.passes.rows[n].view(self.shape) for n in range(count)]

    def partials(self) -> dict[int, Tensor]:
        """The partial sums [..., D] that sites of block forms read, as far as they are kept."""
        found = self.passes.locals if isinstance(self.passes, BlockPass) else {}
        return {site: partial.view(self.shape) for site, partial in found.items()}

    def begin_backward(self, s: int) -> None:
        """Raises RuntimeError unless site s is the next of the one backward pass."""
        if self.next_backward is not None and s != self.next_backward:
            raise RuntimeError(
                "depth routing supports one backward pass per forward pass: sum the losses first; retain_graph=True,"
                f" a second backward() or grad() through the same reads does not work (site {s} came when site"
                f" {self.next_backward} was expected)"
            )
        self.next_backward = s - 1


class SiteRead(torch.autograd.Function):
    """x, token -> hidden, token; at site 0 also the routing parameters, for their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        fused: FusedPass,
        s: int,
        save: bool,
        x: Tensor,
        token: Tensor,
        norm: tuple[float, float],
        norm_weight: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        x = x if x.is_contiguous() else x.contiguous()
        with on_device(fused.device_index):
            hidden, saved = fused.passes.forward(s, x, None if norm_weight is None else (norm_weight, *norm), save)
        if save:
            if fused.first_saved is None:
                fused.first_saved = s
            ctx.fused, ctx.site, ctx.saved = fused, s, saved
            ctx.save_for_backward(*saved.take())
        return hidden, token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_hidden = grad_outputs[0]
        fused: FusedPass = ctx.fused
        s: int = ctx.site
        fused.begin_backward(s)
        saved = _restore(ctx, fused)
        passes = fused.passes
        if d_hidden is None:
            dtype = passes.dtype if passes.stream_dtype is None else passes.stream_dtype
            d_hidden = torch.zeros(fused.shape, dtype=dtype, device=passes.device)
        with on_device(fused.device_index):
            d = d_hidden if d_hidden.is_contiguous() else d_hidden.contiguous()
            dx, d_norm = passes.backward(s, d, saved)
            gradients = passes.parameter_gradients() if s == 0 and fused.trained else {}
        if s == fused.first_saved:
            passes.release()
        weight = saved.norm_weight
        return (
            None, None, None, dx, fused.no_gradient, None,
            None if d_norm is None or weight is None else d_norm.to(weight.dtype),
            *(gradients[name].to(fused.dtypes[name]) if name in gradients else None for name in PARAMETERS),
        )  # fmt: skip


def _restore(ctx: Any, fused: FusedPass) -> Saved:
    try:
        tensors = ctx.saved_tensors
    except RuntimeError as error:
        name = fused.router.plan[ctx.site].name
        raise RuntimeError(
            f"the result of read() at site {name} was modified in place, or its graph was already used by a backward"
            f" pass (one backward per forward pass, no retain_graph): {error}"
        ) from error
    saved: Saved = ctx.saved
    ctx.saved = None  # the result among the tensors refers to this node: kept here, neither would ever be freed
    saved.put(tensors)
    return saved


def start_fused(router: "DepthRouter", embedding: Tensor, row_dtype: torch.dtype) -> FusedPass | None:
    """A fused pass for a router whose backend is Triton; None where this form's reads run one by one."""
    if router.query is None or router.query.numel() == 0 or embedding.numel() == 0:
        return None
    if router.config.keep_empty_sites or router.config.legacy_delta_recursion:
        return None
    return FusedPass(router, embedding, row_dtype)


def on_device(index: int | None) -> Any:
    """Makes a GPU the current one for the launches inside; costs next to nothing where it already is."""
    if index is None or torch.cuda.current_device() == index:
        return nullcontext()
    return torch.cuda.device(index)


def fusible_norm(norm: Norm, width: int) -> tuple[Tensor, float, float] | None:
    """(weight, eps, offset added to the weight) of an RMSNorm module that the read can apply itself, else None."""
    if not isinstance(norm, nn.Module) or _has_hooks(norm):
        return None
    weight = getattr(norm, "weight", None)
    if type(weight) is not nn.Parameter or weight.shape != (width,) or getattr(norm, "bias", None) is not None:
        return None
    offset = RMS_NORMS.get(_kind(norm))
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if offset is None or "forward" in norm.__dict__ or not isinstance(eps, float):
        return None
    return weight, eps, offset


def _kind(norm: nn.Module) -> str:
    """A norm's class name where PyTorch or transformers defines the class: others may compute what they like."""
    known = type(norm).__module__.startswith(("torch.nn.", "transformers.models."))
    return type(norm).__name__ if known else ""


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
