"""Token means of the routing weights: the numbers behind every depth map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mhar.routing.hooks import SiteRead


class RoutingMap:
    """An observer that sums routing weights over tokens, in float64 and in memory that does not grow.

    >>> routing_map = RoutingMap()
    >>> with router.observe(routing_map):
    ...     model(input_ids)
    >>> routing_map.to_dict()  # what `routing.json` holds
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.source_names: dict[str, tuple[str, ...]] = {}

    def __call__(self, read: SiteRead) -> None:
        """Add one read: weights [N, ..., H]."""
        weights = read.weights.flatten(1, -2)
        # Within one batch float32 sums are exact enough; only the running total needs the longer format.
        total = weights.sum(dim=1).double().cpu()
        self.sums[read.name] = self.sums.get(read.name, torch.zeros_like(total)) + total
        self.counts[read.name] = self.counts.get(read.name, 0) + weights.shape[1]
        self.source_names[read.name] = read.source_names

    def mean(self, name: str) -> Tensor:
        """[N, H] in float64: the mean weight of each source at site `name`."""
        return self.sums[name] / self.counts[name]

    def to_dict(self) -> dict[str, Any]:
        """`{"sites": [{"name", "source_names", "weights": [per source [per head]], "num_tokens"}]}`."""
        sites = [
            {
                "name": name,
                "source_names": list(self.source_names[name]),
                "weights": self.mean(name).tolist(),
                "num_tokens": self.counts[name],
            }
            for name in self.sums
        ]
        return {"sites": sites}
