"""What an intervention costs: loss change of every sequence, with a paired interval."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from mhar.analysis.probe import find_router
from mhar.analysis.routing_map import RoutingMap
from mhar.errors import InputError
from mhar.evaluation.statistics import NARROW_NOTE, format_interval, paired_bootstrap
from mhar.routing.interventions import Change, freeze, only_at, parse, parse_sites

FREEZE = "freeze"


@dataclass(frozen=True, slots=True)
class InterventionEffect:
    """Mean loss with and without, in nats per token, and the interval of the change over sequences.

    One sequence gives no interval and no p-value; `is_narrow` marks the interval of few.
    """

    intervention: str
    loss: float
    changed_loss: float
    loss_change: float
    low: float | None
    high: float | None
    p_value: float | None
    n: int
    is_narrow: bool = False


def parse_all(model: nn.Module, texts: Sequence[str]) -> list[Change | str]:
    """Interventions from text, checked against the model; "freeze[@SITE...]" is made later, from recorded routing.

    Raises:
        InputError, ConfigurationError: an unknown intervention, or a site, source or head that does not exist.
    """
    router = find_router(model)
    changes: list[Change | str] = []
    for text in texts:
        is_freeze = text.partition("@")[0] == FREEZE
        change = _frozen(text, {}) if is_freeze else parse(text)
        change.check(router.plan, router.num_heads)
        changes.append(text if is_freeze else change)
    return changes


def _frozen(text: str, means: Mapping[str, Tensor]) -> Change:
    """The change that "freeze[@SITE...]" stands for, given token means of the weights by site."""
    _, at, sites = text.partition("@")
    return only_at(parse_sites(sites), freeze(means)) if at else freeze(means)


@torch.inference_mode()
def sequence_losses(model: Any, batches: Iterable[Tensor]) -> NDArray[np.float64]:
    """Mean next-token loss of each sequence, in nats per token: [sequences]."""
    losses: list[Tensor] = []
    for input_ids in batches:
        input_ids = input_ids.to(model.device)
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        nats = F.cross_entropy(logits.flatten(0, 1).float(), input_ids[:, 1:].flatten(), reduction="none")
        losses.append(nats.view(len(input_ids), -1).double().mean(dim=1).cpu())
    if not losses:
        raise InputError("no sequence to measure an intervention on")
    return torch.cat(losses).numpy()


def effects(
    model: nn.Module, batches: Sequence[Tensor], changes: Sequence[Change | str], *, seed: int = 0
) -> list[InterventionEffect]:
    """The effect of each intervention alone, on the same sequences; the model is the same afterwards.

    "freeze" replaces the routing by its own token means over `batches`: what is lost is what depends on the input.
    """
    router = find_router(model)
    recorded = RoutingMap()
    with router.observe(recorded):
        before = sequence_losses(model, batches)
    means = {name: recorded.mean(name) for name in recorded.sums}
    found: list[InterventionEffect] = []
    for change in changes:
        active = _frozen(change, means) if isinstance(change, str) else change
        with router.intervene(active):
            after = sequence_losses(model, batches)
        name = change if isinstance(change, str) else change.name
        found.append(_effect(name, before, after, seed))
    return found


def _effect(name: str, before: NDArray[np.float64], after: NDArray[np.float64], seed: int) -> InterventionEffect:
    paired = paired_bootstrap(before, after, seed=seed)
    return InterventionEffect(
        name,
        float(before.mean()),
        float(after.mean()),
        paired.difference,
        paired.low,
        paired.high,
        paired.p_value,
        paired.n,
        paired.is_narrow,
    )


def to_dict(found: Sequence[InterventionEffect]) -> dict[str, Any]:
    """For `interventions.json`."""
    return {"rows": [asdict(effect) for effect in found]}


def markdown(found: Sequence[InterventionEffect]) -> str:
    """The effects as a Markdown table."""
    lines = ["| intervention | loss change (nats/token) | 95 % interval | sequences |", "|---|---|---|---|"]
    lines += [
        f"| {e.intervention} | {e.loss_change:+.4f} | {format_interval(e.low, e.high, e.is_narrow)} | {e.n} |"
        for e in found
    ]
    if any(e.is_narrow for e in found):
        lines += ["", NARROW_NOTE]
    return "\n".join(lines)
