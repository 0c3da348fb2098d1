"""Multi-Head Attention Residuals: depth routing for Transformers."""

import importlib
from typing import TYPE_CHECKING, Any

from mhar.ops import depth_read
from mhar.routing import DepthHistory, DepthRouter, RoutingConfig

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mhar.conversion import convert
    from mhar.models import MharConfig, MharForCausalLM, MharModel

__all__ = [
    "DepthHistory",
    "DepthRouter",
    "MharConfig",
    "MharForCausalLM",
    "MharModel",
    "RoutingConfig",
    "convert",
    "depth_read",
]


LAZY = {
    "MharConfig": "mhar.models",
    "MharForCausalLM": "mhar.models",
    "MharModel": "mhar.models",
    "convert": "mhar.conversion",
}


def __getattr__(name: str) -> Any:
    """The models are imported at first use: transformers takes seconds to import and routing alone needs none of it."""
    if name not in LAZY:
        raise AttributeError(f"module 'mhar' has no attribute {name!r}")
    return getattr(importlib.import_module(LAZY[name]), name)
