"""The proof that a conversion changed nothing: logits of base and converted model on the same text."""

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from mhar.errors import CheckpointError
from mhar.models import MharConfig, MharForCausalLM
from mhar.models.families import causal_lm_class

NUM_TOKENS = 512
LOAD_OVERHEAD = 1.5  # a loaded float32 model, one shard in flight, and the logits


@dataclass(frozen=True, slots=True)
class Comparison:
    """Base against converted model in one dtype.

    Attributes:
        dtype: of weights and computation, such as "float32".
        identical: every logit has the same value.
        max_abs_difference: over all logits; NaN when one of them is.
        same_top_token: fraction of positions where both models rank the same token first.
        base_loss, converted_loss: next-token cross-entropy, nats per token.
    """

    dtype: str
    identical: bool
    max_abs_difference: float
    same_top_token: float
    base_loss: float
    converted_loss: float


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, on which tokens, and the results (float32 first)."""

    text: str
    num_tokens: int
    device: str
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Whether the float32 logits are the same, bit for bit."""
        return next(c.identical for c in self.comparisons if c.dtype == "float32")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"passed": self.passed, **dataclasses.asdict(self)}


def compare_logits(base: Tensor, converted: Tensor, input_ids: Tensor) -> Comparison:
    """Compare logits [batch, tokens, vocabulary] that two models gave for the same `input_ids` [batch, tokens]."""
    dtype = str(base.dtype).removeprefix("torch.")
    difference = max((float((b - c).abs().max()) for b, c in _rows(base, converted)), default=0.0)
    top = base.argmax(dim=-1) == converted.argmax(dim=-1)
    return Comparison(
        dtype=dtype,
        identical=torch.equal(base, converted),
        max_abs_difference=difference if base.isfinite().all() and converted.isfinite().all() else float("nan"),
        same_top_token=float(top.float().mean()),
        base_loss=_loss(base, input_ids),
        converted_loss=_loss(converted, input_ids),
    )


def _rows(base: Tensor, converted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows in float64, one position at a time: a vocabulary of 150,000 makes whole copies large."""
    for b, c in zip(base.flatten(0, -2), converted.flatten(0, -2), strict=True):
        yield b.double(), c.double()


def _loss(logits: Tensor, input_ids: Tensor) -> float:
    predicted, labels = logits[:, :-1].float(), input_ids[:, 1:]
    return float(torch.nn.functional.cross_entropy(predicted.flatten(0, 1), labels.flatten()))


def verification_text() -> str:
    """English prose for the comparison (Jane Austen; public domain)."""
    return (files("mhar.conversion") / "passages.txt").read_text(encoding="utf-8")


def verification_tokens(folder: Path, config: MharConfig) -> tuple[Tensor, str]:
    """Token ids [1, tokens] and what they are: prose through the folder's tokenizer, or seeded ids without one."""
    limit = min(NUM_TOKENS, config.max_position_embeddings)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(verification_text(), return_tensors="pt", truncation=True, max_length=limit)["input_ids"]
        described = "English prose (Jane Austen)"
    except (OSError, ValueError, KeyError):  # what transformers raises for a folder without a usable tokenizer
        ids, described = None, ""
    if ids is None or ids.shape[1] < 2 or int(ids.max()) >= config.vocab_size:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (1, limit), generator=generator)
        described = "random token ids (the base has no tokenizer that fits its vocabulary)"
    return ids, described


def verify_folders(base: Path, converted: Path, dtype: torch.dtype, *, device: str = "cpu") -> Verification:
    """Compare a converted folder with its base in float32 and in `dtype`, the checkpoint's own.

    One model is in memory at a time.

    Raises:
        CheckpointError: the converted folder misses tensors, has unexpected ones, or does not load.
    """
    config = MharConfig.from_pretrained(converted)
    input_ids, text = verification_tokens(base, config)
    comparisons: list[Comparison] = []
    for compute in dict.fromkeys((torch.float32, dtype)):
        stock = load_and_check(causal_lm_class(config.base_model_type), base, compute)
        expected = _logits(stock, input_ids, device)
        del stock
        # Fused kernels round norms in their own order: identity is a property of the plain operations.
        routed = load_and_check(MharForCausalLM, converted, compute, routing_backend="reference")
        received = _logits(routed, input_ids, device)
        del routed
        comparisons.append(compare_logits(expected, received, input_ids))
    return Verification(text, input_ids.numel(), device, tuple(comparisons))


def load_and_check(
    model_class: type[PreTrainedModel], folder: Path, dtype: torch.dtype, **config: Any
) -> PreTrainedModel:
    """`from_pretrained` that takes no incomplete folder: missing and misshapen tensors are errors."""
    loaded: Any = model_class.from_pretrained(folder, dtype=dtype, output_loading_info=True, **config)
    model, info = loaded
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "mismatched_keys") if info[kind]}
    if wrong:
        listed = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(keys)}" for kind, keys in wrong.items())
        raise CheckpointError(f"{folder.name} does not fit {model_class.__name__}: {listed}")
    return model


@torch.no_grad()
def _logits(model: PreTrainedModel, input_ids: Tensor, device: str) -> Tensor:
    model.eval().to(device)  # pyright: ignore[reportArgumentType]
    return model(input_ids=input_ids.to(device), use_cache=False).logits.cpu()


def verification_bytes(num_parameters: int) -> int:
    """Memory that `verify_folders` needs."""
    return int(4 * num_parameters * LOAD_OVERHEAD)


def available_bytes(device: str) -> int:
    """Free memory of a CUDA device, or of the host."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
