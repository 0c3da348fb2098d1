"""`mhar bench step`: whole training steps, MHAR against the additive baseline, optimiser included.

Both sides run the same arithmetic: bfloat16 parameters with float32 masters, SDPA attention, a compiled loss over the
tied head, gradient clipping, fused AdamW. The baseline is transformers' own model, compiled layer by layer, so that its
residual additions and norms are fused. MHAR is compiled sublayer by sublayer; the read applies the norm that follows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

from mhar.bench import timing
from mhar.bench.gate import relative
from mhar.bench.machine import provenance
from mhar.bench.shapes import StepShape
from mhar.models import MharConfig, MharForCausalLM
from mhar.routing import RoutingConfig

Say = Callable[[str], None]
VARIANTS = ("baseline", "mhar")
# The gate's model is deep enough for passes that sites share. In bfloat16 the kernels' error may exceed the reference's
# by this much; another function misses by tens of percent.
GATE_LAYERS = 12
GATE_RATIO, GATE_FLOOR = 1.5, 1e-3


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How to measure: device, steps timed, and a smaller depth for rehearsals (None: the shape's own)."""

    device: str
    repeats: int = 10
    num_layers: int | None = None


def bench_step(
    shapes: tuple[StepShape, ...],
    options: StepOptions,
    say: Say = print,
    save: Callable[[dict[str, Any]], object] = lambda _result: None,
) -> dict[str, Any]:
    """The content of `step-*.json`: rows, and throughput and memory of MHAR relative to the baseline.

    A red gate leaves the rows of its shape out and says why in `not_run`. `save` gets the result after every shape.
    """
    result: dict[str, Any] = {**provenance(options.device), "rows": [], "relative": [], "not_run": []}
    for shape in shapes:
        reason = gate(shape, options.device)
        if reason is None:
            _measure_pair(replace(shape, num_layers=options.num_layers or shape.num_layers), options, result, say)
        else:
            result["not_run"].append({"shape": shape.name, "tokens": shape.tokens, "reason": reason})
            say(f"{shape.key:>12}  not run: {reason}")
        save(result)
    return result


def _measure_pair(shape: StepShape, options: StepOptions, result: dict[str, Any], say: Say) -> None:
    with timing.side_stream(options.device):
        rows = [measure(shape, variant, options, fast=not shape.eager) for variant in VARIANTS]
    result["rows"] += rows
    result["relative"].append(comparison(*rows))
    for row in rows:
        say(
            f"{shape.key:>12}  {row['variant']:<9} {'eager' if shape.eager else 'compiled':<9}"
            f" {row['ms']:9.2f} ms  {row['tokens_per_s']:>10,.0f} tokens/s  {row['peak_gib']:6.2f} GiB"
        )


def measure(shape: StepShape, variant: str, options: StepOptions, *, fast: bool) -> dict[str, Any]:
    """One row. `fast`: compiled, and on a GPU replayed as a CUDA graph; else plain eager calls."""
    device = options.device
    model = build(shape, variant, torch.bfloat16, device)
    if fast:
        compile_parts(model, variant)
    step = TrainingStep(model, shape, device, compiled=fast)
    step()
    peak = timing.peak_gib(step, device)
    graph = fast and device == "cuda"
    measured = timing.replayed(step, options.repeats) if graph else timing.eager(step, device, options.repeats)[0]
    timing.release()
    return {
        "shape": shape.name,
        "variant": variant,
        "backend": "triton" if variant == "mhar" else "transformers",
        "tokens": shape.tokens,
        "num_layers": shape.num_layers,
        "ms": round(measured.ms, 3),
        "spread_ms": round(measured.spread_ms, 3),
        "tokens_per_s": round(shape.tokens / (measured.ms / 1e3), 1),
        "peak_gib": round(peak, 3),
        "compiled": fast,
        "cuda_graph": graph,
    }


def comparison(baseline: dict[str, Any], mhar: dict[str, Any]) -> dict[str, Any]:
    """MHAR relative to the baseline."""
    return {
        **{key: mhar[key] for key in ("shape", "tokens", "compiled", "cuda_graph")},
        "throughput": round(mhar["tokens_per_s"] / baseline["tokens_per_s"], 4),
        "added_ms": round(mhar["ms"] - baseline["ms"], 3),
        "peak_memory": round(mhar["peak_gib"] / baseline["peak_gib"], 4) if baseline["peak_gib"] else None,
    }


def build(shape: StepShape, variant: str, dtype: torch.dtype, device: str, backend: str = "triton") -> nn.Module:
    """A model with random routing: zero queries would make the softmax uniform, and its gradients special."""
    base = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.length,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        if variant == "baseline":
            model = AutoModelForCausalLM.from_config(base)
        else:
            config = MharConfig.from_base(base, RoutingConfig.named(variant), routing_backend=backend)
            model = MharForCausalLM(config)
            query = model.model.router.query
            assert query is not None
            nn.init.normal_(query, std=(shape.num_kv_heads / shape.width) ** 0.5)
    return nn.Module.to(model, dtype).train()


def compile_parts(model: Any, variant: str) -> None:
    """torch.compile the parts that repeat, in place: layers of the baseline, sublayers of MHAR."""
    for layer in model.model.layers:
        for part in (layer,) if variant == "baseline" else (layer.self_attn, layer.mlp):
            part.compile()


class TrainingStep:
    """Forward, backward, clipping and fused AdamW on float32 masters, over one fixed micro-batch."""

    def __init__(self, model: Any, shape: StepShape, device: str, *, compiled: bool) -> None:
        self.model = model
        self.loss = torch.compile(head_loss) if compiled else head_loss
        self.tokens = torch.randint(shape.vocab_size, (shape.batch, shape.length), device=device)
        self.targets = self.tokens.roll(-1, dims=1)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=device == "cuda"
        )

    def __call__(self) -> Tensor:
        loss = self.forward()
        loss.backward()
        self.update()
        return loss.detach()

    def forward(self) -> Tensor:
        """Mean cross-entropy. The mask says "causal, no padding", which spares a look at the data."""
        hidden = self.model.model(
            input_ids=self.tokens, attention_mask={"full_attention": None}, use_cache=False
        ).last_hidden_state
        return self.loss(hidden, self.model.lm_head.weight, self.targets)

    @torch.no_grad()
    def update(self) -> None:
        """Gradients to float32, clip, AdamW, parameters back to their dtype."""
        gradients = [p.grad for p in self.parameters]
        foreach_copy([m.grad for m in self.masters], gradients)
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        foreach_copy(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None


def foreach_copy(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> None:
    """Copy and convert many tensors in few launches."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the tied head; hidden [B, T, D], targets [B, T]."""
    logits = (hidden.flatten(0, 1) @ weight.T).float()
    return F.cross_entropy(logits, targets.flatten())


def gate(shape: StepShape, device: str) -> str | None:
    """None where the kernels' loss and gradients are as close to float32 as the reference backend's, else why not."""
    small = replace(
        shape,
        num_layers=min(shape.num_layers, GATE_LAYERS),
        batch=2,
        length=min(shape.length, 32),
        vocab_size=min(shape.vocab_size, 1024),
    )
    exact = gradients(small, torch.float32, device, "reference")
    reference = gradients(small, torch.bfloat16, device, "reference")
    for name, found in gradients(small, torch.bfloat16, device, "triton").items():
        error, bound = relative(found, exact[name]), GATE_RATIO * relative(reference[name], exact[name]) + GATE_FLOOR
        if not error <= bound:
            return f"correctness gate red: {name} is {error:.1e} from float32, the bound is {bound:.1e}"
    return None


def gradients(shape: StepShape, dtype: torch.dtype, device: str, backend: str) -> dict[str, Tensor]:
    """Loss, and the gradients of routing and of all other parameters as one vector each, in float64.

    The parameters' values are bfloat16's in either dtype.
    """
    model = build(shape, "mhar", torch.bfloat16, device, backend).to(dtype)
    torch.manual_seed(1)
    step = TrainingStep(model, shape, device, compiled=False)
    loss = step.forward()
    loss.backward()
    parts: dict[str, list[Tensor]] = {"routing gradients": [], "other gradients": []}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        parts["routing gradients" if ".router." in name else "other gradients"].append(
            parameter.grad.double().flatten()
        )
    return {"loss": loss.detach().double(), **{name: torch.cat(tensors) for name, tensors in parts.items()}}
