"""What a conversion did, as stored in its result and as printed."""

import dataclasses
import platform
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from mhar.conversion.verify import Verification

REPORT = "conversion_report.json"
FORMAT_VERSION = 1


def versions() -> dict[str, str]:
    """Of this library, PyTorch, transformers and Python."""
    from mhar import __version__

    return {
        "mhar": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What `convert_checkpoint` did; stored as conversion_report.json in the result.

    Attributes:
        base: name, hub revision, family and number of parameters, and the licence fields of its card.
        variant: name of the routing variant.
        routing: its configuration, with the number of heads resolved.
        num_routing_parameters: elements that were added.
        verification: the comparison of logits; None when it was skipped, and then `skipped` says why.
        skipped: the reason, None when the logits were compared.
        versions: of mhar, torch, transformers and Python.
    """

    base: dict[str, Any]
    variant: str
    routing: dict[str, Any]
    num_routing_parameters: int
    verification: Verification | None
    skipped: str | None
    versions: dict[str, str] = dataclasses.field(default_factory=versions)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "format_version": FORMAT_VERSION,
            "base": self.base,
            "variant": self.variant,
            "routing": self.routing,
            "num_routing_parameters": self.num_routing_parameters,
            "verification": self.verification.to_dict() if self.verification else {"skipped": self.skipped},
            "versions": self.versions,
        }

    def lines(self) -> list[str]:
        """The report for a terminal."""
        revision = self.base["revision"] or "unknown"
        heads = f"{self.routing['num_heads']} heads, +{self.num_routing_parameters:,} parameters, gates closed"
        lines = [
            f"base      {self.base['name']} ({self.base['model_type']}, {self.base['num_parameters']:,} parameters,"
            f" revision {revision})",
            f"routing   {self.variant}, {heads if self.num_routing_parameters else 'no parameters'}",
        ]
        if self.verification is None:
            return [*lines, f"logits    not compared: {self.skipped}"]
        proof = self.verification
        lines.append(f"compared  {proof.num_tokens} tokens of {proof.text}, on {proof.device}")
        lines.append(f"{'dtype':<10}{'max |difference|':>18}{'same top token':>16}{'base loss':>11}{'converted':>11}")
        lines += [
            f"{c.dtype:<10}{c.max_abs_difference:>18.3g}{c.same_top_token:>16.2%}"
            f"{c.base_loss:>11.4f}{c.converted_loss:>11.4f}"
            for c in proof.comparisons
        ]
        return lines
