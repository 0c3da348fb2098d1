"""Which sites share one pass over the history. Pure Python: no tensors, no kernels.

Sublayer sources: site s reads rows 0..s. Sites come in blocks of `block`; the rows older than a block are mixed for all
its sites in one pass (a `Pass` before its first site), the rows inside it one by one. Two levels (`inner` < `block`)
repeat this inside a block. The backward pass mirrors it: before the newest row of a block gets its gradient, the
block's rows gather from all later sites.

Block sources: all sites between two births of a row read the same rows, so one pass serves each such group.
"""

from dataclasses import dataclass
from typing import Literal

from mhar.errors import ConfigurationError

Schedule = Literal["auto", "dense"] | int

MAX_BLOCK = 16  # sites of a tensor-core tile


@dataclass(frozen=True, slots=True)
class Pass:
    """Sites [site0, site1) against rows [row0, row1); `merge` continues an earlier pass of the same sites or rows."""

    site0: int
    site1: int
    row0: int
    row1: int
    merge: bool


@dataclass(frozen=True, slots=True)
class SublayerSchedule:
    """Passes of the sublayer forms over sites [first, last), which read rows 0..s.

    block 1 to 16 shares passes; block 0 is the dense form: every site reads every row itself.
    """

    first: int
    last: int
    block: int
    inner: int

    def block_start(self, s: int) -> int:
        """First site and row of s's block: where its slots are counted from."""
        return s - s % self.block if self.block else 0

    def own_start(self, s: int) -> int:
        """First row that site s reads by itself; older ones are in its partial mix."""
        start = self.block_start(s)
        return s - (s - start) % self.inner if self.block else 0

    def own_end(self, n: int) -> int:
        """One past the last site that row n visits by itself; later ones have been gathered."""
        if not self.block:
            return self.last
        return min(self.own_start(n) + self.inner, self.block_start(n) + self.block, self.last)

    def forward(self, s: int) -> Pass | None:
        """The pass to run before site s."""
        if not self.block or s == 0 or self.own_start(s) != s:
            return None
        start = self.block_start(s)
        if s == start:
            return self._pass(s, start + self.block, 0, s, False)
        return self._pass(s, min(s + self.inner, start + self.block), start, s, start > 0)

    def _pass(self, site0: int, site1: int, row0: int, row1: int, merge: bool) -> Pass | None:
        site0, site1 = max(site0, self.first), min(site1, self.last)
        return Pass(site0, site1, row0, row1, merge) if site0 < site1 else None

    def backward(self, n: int, last: int) -> list[Pass]:
        """The passes to run before row n gets its gradient; the backward pass began at site `last` - 1."""
        if not self.block:
            return []
        start = self.block_start(n)
        outer = min(start + self.block, last)
        passes: list[Pass] = []
        gathered = outer < last and outer == start + self.block
        if n == outer - 1 and gathered:
            passes.append(Pass(outer, last, start, outer, False))
        begin = self.own_start(n)
        end = min(begin + self.inner, outer)
        if n == end - 1 and end < outer:
            passes.append(Pass(end, outer, begin, end, gathered))
        return passes

    def gathered(self, n: int, last: int) -> bool:
        """Whether row n has gathered from later sites by passes."""
        return bool(self.block) and self.own_end(n) < last


def sublayer_schedule(first: int, last: int, schedule: Schedule, preferred: tuple[int, int]) -> SublayerSchedule:
    """The schedule a user asked for; "auto" takes `preferred` = (block, inner), (0, 0) for the dense form."""
    if schedule == "auto":
        block, inner = preferred
    elif schedule == "dense":
        block, inner = 0, 0
    else:
        check_schedule(schedule)
        block = inner = schedule
    return SublayerSchedule(first, last, block, inner) if block < last else SublayerSchedule(first, last, 0, 0)


def check_schedule(schedule: object) -> None:
    """Raise ConfigurationError unless `schedule` is "auto", "dense" or a block length from 1 to 16."""
    valid = isinstance(schedule, int) and not isinstance(schedule, bool) and 1 <= schedule <= MAX_BLOCK
    if not valid and schedule not in ("auto", "dense"):
        raise ConfigurationError(
            f'schedule must be "auto", "dense" or a block length from 1 to {MAX_BLOCK}, got {schedule!r}'
        )


def block_groups(num_rows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Groups [site0, site1) of at most 16 consecutive sites that read the same number of shared rows (> 0)."""
    groups: list[tuple[int, int]] = []
    for s, rows in enumerate(num_rows):
        if rows == 0:
            continue
        begin, end = groups[-1] if groups else (-1, -1)
        if end == s and num_rows[begin] == rows and s - begin < MAX_BLOCK:
            groups[-1] = (begin, s + 1)
        else:
            groups.append((s, s + 1))
    return tuple(groups)
