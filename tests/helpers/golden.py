"""Golden cases: public reference numbers in tests/golden (its README says where each comes from)."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mhar import MharForCausalLM
from mhar.conversion import from_reference
from mhar.conversion.reference_layout import released_name

ROOT = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in ROOT.glob("*/config.json"))
OPERATORS = sorted(path.stem for path in (ROOT / "ops").glob("*.safetensors"))


@dataclass(frozen=True)
class Errors:
    """Largest absolute errors of one case; that of gradients is relative to (tensor's maximum + 1e-2)."""

    logits: float
    loss: float
    weights: float
    gradients: float


# tests/golden/README.md, "Suggested tolerances": gradients 1e-4 x tensor max + 1e-6 in float32.
FLOAT32 = Errors(logits=2e-5, loss=3e-6, weights=2e-5, gradients=1e-4)
FLOAT64 = Errors(logits=1e-11, loss=1e-11, weights=1e-11, gradients=1e-11)


def tolerances(case: str) -> Errors:
    """What the golden README allows for a case."""
    return FLOAT64 if case.endswith("_f64") else FLOAT32


def measure(case: str) -> Errors:
    """Load one case, run it forward and backward, and compare everything that its io.safetensors holds."""
    expected = load_file(ROOT / case / "io.safetensors")
    model = from_reference(ROOT / case)
    if case.endswith("_f64"):
        keep_float64(model)
    weights: dict[str, Tensor] = {}
    with model.model.router.observe(lambda read: weights.update({read.name: read.weights})):
        outputs = model(expected["input_ids"], labels=expected["labels"])
    outputs.loss.backward()
    golden_weights = {k.removeprefix("weights/"): v for k, v in expected.items() if k.startswith("weights/")}
    assert weights.keys() == golden_weights.keys(), "the sites that read are not the golden ones"
    gradients = released_gradients(model)
    return Errors(
        logits=largest(outputs.logits, expected["logits"]),
        loss=largest(outputs.loss, expected["loss"]),
        weights=max((largest(weights[site], golden_weights[site]) for site in weights), default=0.0),
        gradients=max(
            largest(gradients[name.removeprefix("grad/")], golden) / (float(golden.abs().max()) + 1e-2)
            for name, golden in expected.items()
            if name.startswith("grad/")
        ),
    )


def largest(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference of two tensors of one shape."""
    assert actual.shape == expected.shape, f"shape {list(actual.shape)} != {list(expected.shape)}"
    return float((actual.detach().double() - expected.double()).abs().max())


def released_gradients(model: MharForCausalLM) -> dict[str, Tensor]:
    """Gradients under the released parameter names; zeros where autograd has none, as the golden files store them."""
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    router = model.model.router
    for site in router.plan:
        for kind in ("query", "norm_weight", "gate", "null_source"):
            stacked = gradients.get(f"model.router.{kind}")
            if stacked is not None and site.row is not None:
                gradient = stacked[site.row]
                gradients[released_name(site, kind)] = gradient.unsqueeze(0) if kind == "query" else gradient
    return gradients


def keep_float64(model: MharForCausalLM) -> None:
    """Replace what transformers computes in float32 (RMSNorm, rotary embedding, loss), as the golden generator did."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm_in_float64(module)
    config = model.config
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** -exponents

    def rotary(hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: object) -> Tensor:
        return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))

    model.model.rotary_emb.forward = rotary
    model.loss_function = loss


def _norm_in_float64(norm: nn.Module):
    def forward(hidden: Tensor) -> Tensor:
        return norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)

    return forward


def operator(name: str) -> tuple[dict[str, Tensor], int, float]:
    """An operator vector: its float64 tensors, num_heads and eps."""
    file = ROOT / "ops" / f"{name}.safetensors"
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    return load_file(file), int(metadata["num_heads"]), float(metadata["eps"])


def config(case: str) -> dict:
    """The case's config.json."""
    return json.loads((ROOT / case / "config.json").read_text())
