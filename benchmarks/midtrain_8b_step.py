"""One mid-training step at the 8B Llama 3.1 shape, converted (delta-block, H = 8) against plain, on one GPU.

    python benchmarks/midtrain_8b_step.py --output midtrain_8b.json
    python benchmarks/midtrain_8b_step.py --shape tiny --device cpu     # rehearsal

Weights are random and made on the device; the converted model is `mhar.convert` of the plain one. Each model runs in
a process of its own, so that neither inherits the other's memory.

How it fits 139 GiB: float32 weights, gradients and two moments take 16 bytes a parameter, 119.7 GiB for 8.03e9. So
there is no EMA (29.9 GiB more); gradients are freed after the step; AdamW is fused (no temporaries); sublayers are
recomputed in the backward pass, and logits exist for `LOSS_CHUNK` tokens at a time. Computation is bfloat16 by
autocast without its weight cache: a layer's bfloat16 copies live while the layer runs (the cache would hold 15 GiB).
The embedding's output is cast, so that the residual stream is bfloat16 as under FSDP's mixed precision.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import mhar
from mhar.models.loss import chunked_loss, shifted_targets

LOSS_CHUNK = 2048
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIP, Z_LOSS = 4e-5, (0.9, 0.95), 1e-8, 0.05, 1.0, 1e-4
LOSS_TOLERANCE = 2e-3  # first losses of equal functions; bfloat16 rounds the two in different places
GIB = 2**30
KINDS = ("plain", "converted")


@dataclass(frozen=True)
class Shape:
    """A Llama model and its micro-batch."""

    width: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    mlp_width: int
    vocab_size: int
    batch: int
    num_tokens: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            intermediate_size=self.mlp_width,
            vocab_size=self.vocab_size,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=False,
        )


SHAPES = {
    "8b": Shape(4096, 32, 32, 8, 14336, 128_256, batch=2, num_tokens=4096),
    "1b": Shape(2048, 16, 32, 8, 8192, 128_256, batch=2, num_tokens=4096),
    "tiny": Shape(64, 8, 8, 8, 128, 512, batch=2, num_tokens=32),
}


def build(kind: str, shape: Shape, device: str) -> nn.Module:
    """The plain model, or its conversion; same random float32 weights for one seed."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(shape.config())
    if kind == "converted":
        model = mhar.convert(model, mhar.RoutingConfig.named("delta_block_mhar", block_size=4, num_heads=8))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.bfloat16())
    return model.train()


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """The paper's mid-training AdamW: no decay on embeddings, norms, biases and routing."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        exempt = parameter.ndim < 2 or "embed_tokens" in name or ".router." in name
        (free if exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)


def loss_of(model: Any, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy with z-loss, and cross-entropy alone; both models take this path."""
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    targets = shifted_targets(input_ids)
    sums = chunked_loss(model.lm_head, hidden, targets, LOSS_CHUNK, with_z=True)
    count = targets.numel() - targets.shape[0]
    return (sums[0] + Z_LOSS * sums[1]) / count, sums[0].detach() / count


class Clock:
    """Seconds between marks, on the device's own clock where it has one."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        if not self.cuda:
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1000


@dataclass(frozen=True)
class Step:
    """Seconds of the two halves of a step, and its loss without z-loss."""

    forward_backward: float
    optimizer: float
    loss: float

    @property
    def seconds(self) -> float:
        return self.forward_backward + self.optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, input_ids: Tensor, clock: Clock) -> Step:
    """Forward, backward, clipping, AdamW; the gradients are gone afterwards."""
    begin = clock.mark()
    with torch.autocast(input_ids.device.type, torch.bfloat16, cache_enabled=False):
        loss, cross_entropy = loss_of(model, input_ids)
    loss.backward()
    middle = clock.mark()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    end = clock.mark()
    return Step(clock.between(begin, middle), clock.between(middle, end), float(cross_entropy))


def measure(kind: str, shape: Shape, device: str, num_warmup: int, num_steps: int) -> dict[str, Any]:
    """Train one model for a few steps; times and memory are those of the steps after the warm-up."""
    started = time.perf_counter()
    model = build(kind, shape, device)
    optimizer, clock = make_optimizer(model), Clock(device)
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch, shape.num_tokens)
    steps: list[Step] = []
    for number in range(num_warmup + num_steps):
        if number == num_warmup and clock.cuda:
            torch.cuda.reset_peak_memory_stats(device)
        input_ids = torch.randint(shape.vocab_size, size, generator=generator, device=device)
        steps.append(train_step(model, optimizer, input_ids, clock))
        print(
            f"{kind}: step {number}: {steps[-1].seconds:.3f} s, loss {steps[-1].loss:.6f}", file=sys.stderr, flush=True
        )
    summary = summarise(model, shape, steps, num_warmup) | peak_memory(device)
    if clock.cuda:
        static = summary["weights_gradients_moments_gib"]
        summary["activations_and_buffers_gib"] = summary["peak_allocated_gib"] - static
    return summary | {"wall_s": time.perf_counter() - started}


def summarise(model: nn.Module, shape: Shape, steps: list[Step], num_warmup: int) -> dict[str, Any]:
    """Median times, throughput, losses and the bytes that any such step needs."""
    timed = steps[num_warmup:]
    seconds = statistics.median(step.seconds for step in timed)
    num_parameters = sum(p.numel() for p in model.parameters())
    return {
        "num_parameters": num_parameters,
        "weights_gradients_moments_gib": 16 * num_parameters / GIB,
        "step_s": seconds,
        "step_s_min_max": [min(s.seconds for s in timed), max(s.seconds for s in timed)],
        "forward_backward_s": statistics.median(s.forward_backward for s in timed),
        "optimizer_s": statistics.median(s.optimizer for s in timed),
        "tokens_per_s": shape.batch * shape.num_tokens / seconds,
        "losses": [step.loss for step in steps],
    }


def peak_memory(device: str) -> dict[str, float | None]:
    """Largest memory of a CUDA device since the last reset; None on others."""
    if not device.startswith("cuda"):
        return {"peak_allocated_gib": None, "peak_reserved_gib": None, "device_gib": None}
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        "device_gib": torch.cuda.get_device_properties(device).total_memory / GIB,
    }


def in_own_process(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a new process; its error is ours."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--only", kind, "--output", str(result)]
        for name in ("shape", "device", "warmup", "steps"):
            command += [f"--{name}", str(getattr(arguments, name))]
        subprocess.run(command, check=True)
        return json.loads(result.read_text())


def compare(plain: dict[str, Any], converted: dict[str, Any]) -> dict[str, Any]:
    """Converted over plain, and how far apart the first losses (same weights, closed gates) are."""
    ratio = {"tokens_per_s": converted["tokens_per_s"] / plain["tokens_per_s"]}
    if plain["peak_allocated_gib"] is not None:
        ratio["peak_allocated_gib"] = converted["peak_allocated_gib"] / plain["peak_allocated_gib"]
    return {
        "converted_over_plain": ratio,
        "first_loss_difference": converted["losses"][0] - plain["losses"][0],
        "largest_loss_difference": max(abs(c - p) for c, p in zip(converted["losses"], plain["losses"], strict=True)),
    }


def environment(device: str) -> dict[str, str]:
    """What the numbers depend on."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "CPU"
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "mhar": mhar.__version__,
        "python": platform.python_version(),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The comparison for a terminal."""
    rows = [f"{'':<10}{'tokens/s':>12}{'step s':>9}{'fwd+bwd s':>11}{'AdamW s':>9}{'peak GiB':>10}{'first loss':>12}"]
    for kind, r in results.items():
        peak = "-" if r["peak_allocated_gib"] is None else f"{r['peak_allocated_gib']:.1f}"
        rows.append(
            f"{kind:<10}{r['tokens_per_s']:>12,.0f}{r['step_s']:>9.3f}{r['forward_backward_s']:>11.3f}"
            f"{r['optimizer_s']:>9.3f}{peak:>10}{r['losses'][0]:>12.6f}"
        )
    return "\n".join(rows)


def main() -> int:
    """Measure both models, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock counts (default 2)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps (default 4)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--only", choices=KINDS, help="measure one model, in this process")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.only:
        report = measure(arguments.only, shape, arguments.device, arguments.warmup, arguments.steps)
        comparable = True
    else:
        results = {kind: in_own_process(kind, arguments) for kind in KINDS}
        report = {"shape": dataclasses.asdict(shape), "environment": environment(arguments.device), "models": results}
        report |= compare(results["plain"], results["converted"])
        comparable = abs(report["first_loss_difference"]) < LOSS_TOLERANCE
        print(
            table(results) if comparable else f"no comparison: first losses differ by {report['first_loss_difference']}"
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if comparable else 1


if __name__ == "__main__":
    raise SystemExit(main())
