"""Where a router keeps the kernels it launches."""

from collections.abc import Callable
from typing import Any


class KernelCache:
    """The bound kernels of one router. Copies and pickles of a router start with an empty one."""

    def __init__(self) -> None:
        self._kernels: dict[Any, Any] = {}

    def get(self, key: Any, build: Callable[[], Any]) -> Any:
        """The kernel under `key`, built on first use."""
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels.setdefault(key, build())
        return kernel

    def scope(self, key: Any) -> "KernelCache":
        """The cache of one setting (dtype, tuning), so that a launch looks up short keys."""
        return self.get(key, KernelCache)

    def __deepcopy__(self, memo: dict[int, object]) -> "KernelCache":
        return KernelCache()

    def __reduce__(self) -> tuple[type["KernelCache"], tuple[()]]:
        return KernelCache, ()
