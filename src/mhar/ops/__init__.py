"""The depth read and its gradients; nothing here knows about models."""

from mhar.ops.functional import depth_read
from mhar.ops.reference import depth_read_reference

__all__ = ["depth_read", "depth_read_reference"]
