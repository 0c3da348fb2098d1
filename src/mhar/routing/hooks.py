"""Observers and interventions of one router: registered in contexts, bound to the histories started inside them."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from mhar.routing.plan import SitePlan


@dataclass(frozen=True, slots=True)
class SiteRead:
    """What an observer receives at each read that has sources.

    Attributes:
        site: index of the site; name: its name, such as "layers.0.mlp".
        source_names: N names, in the order of `weights` and `sources`.
        weights: [N, ..., H], detached, float32 (float64 in a float64 model).
        sources: N tensors [..., D], detached; views of the model's own activations: not to be modified.
    """

    site: int
    name: str
    source_names: tuple[str, ...]
    weights: Tensor
    sources: Sequence[Tensor]


Observer = Callable[[SiteRead], None]
Intervention = Callable[[SitePlan, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ActiveHooks:
    """The hooks that one history obeys."""

    observers: tuple[Observer, ...] = ()
    interventions: tuple[Intervention, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.observers or self.interventions)


class Hooks:
    """The hooks registered on one router. Copies and pickles of a router carry none of them."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, ActiveHooks]] = []

    @contextmanager
    def registered(
        self, observers: Sequence[Observer] = (), interventions: Sequence[Intervention] = ()
    ) -> Generator[None]:
        """Register for this thread until the context ends, whatever ends it."""
        entry = (threading.get_ident(), ActiveHooks(tuple(observers), tuple(interventions)))
        self._entries.append(entry)
        try:
            yield
        finally:
            self._entries = [kept for kept in self._entries if kept is not entry]

    def active(self) -> ActiveHooks:
        """All hooks of the calling thread, outermost first."""
        if not self._entries:
            return ActiveHooks()
        mine = [hooks for thread, hooks in self._entries if thread == threading.get_ident()]
        return ActiveHooks(
            tuple(o for hooks in mine for o in hooks.observers),
            tuple(i for hooks in mine for i in hooks.interventions),
        )

    def __deepcopy__(self, memo: dict[int, object]) -> "Hooks":
        return Hooks()

    def __reduce__(self) -> tuple[type["Hooks"], tuple[()]]:
        return Hooks, ()
