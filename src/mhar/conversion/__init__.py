"""Pretrained checkpoint -> routed model, and the proof that step 0 is unchanged."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mhar.conversion.graft import convert
    from mhar.conversion.reference_layout import from_reference
    from mhar.conversion.revert import revert_checkpoint
    from mhar.conversion.stream import convert_checkpoint
    from mhar.conversion.verify import compare_logits, verify_folders

HOMES = {
    "convert": "graft",
    "convert_checkpoint": "stream",
    "revert_checkpoint": "revert",
    "from_reference": "reference_layout",
    "compare_logits": "verify",
    "verify_folders": "verify",
}

__all__ = ["compare_logits", "convert", "convert_checkpoint", "from_reference", "revert_checkpoint", "verify_folders"]


def __getattr__(name: str) -> object:
    """Import what is asked for: transformers takes seconds to load."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
