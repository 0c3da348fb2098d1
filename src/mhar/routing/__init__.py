"""Depth routing as modules; nothing here knows about any model family."""

from mhar.routing.config import RoutingConfig
from mhar.routing.history import DepthHistory
from mhar.routing.hooks import SiteRead
from mhar.routing.plan import SitePlan, routing_plan
from mhar.routing.router import DepthRouter

__all__ = ["DepthHistory", "DepthRouter", "RoutingConfig", "SitePlan", "SiteRead", "routing_plan"]
