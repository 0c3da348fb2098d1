"""Multi-Head Attention Residuals: depth routing for Transformers."""

from mhar.ops import depth_read
from mhar.routing import DepthHistory, DepthRouter, RoutingConfig

__version__ = "0.1.0"

__all__ = ["DepthHistory", "DepthRouter", "RoutingConfig", "depth_read"]
