"""Multi-Head Attention Residuals: depth routing for Transformers."""

from typing import TYPE_CHECKING, Any

from mhar.ops import depth_read
from mhar.routing import DepthHistory, DepthRouter, RoutingConfig

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mhar.models import MharConfig, MharForCausalLM, MharModel

__all__ = [
    "DepthHistory",
    "DepthRouter",
    "MharConfig",
    "MharForCausalLM",
    "MharModel",
    "RoutingConfig",
    "depth_read",
]


def __getattr__(name: str) -> Any:
    """The models are imported at first use: transformers takes seconds to import and routing alone needs none of it."""
    if name not in ("MharConfig", "MharForCausalLM", "MharModel"):
        raise AttributeError(f"module 'mhar' has no attribute {name!r}")
    from mhar import models

    return getattr(models, name)
