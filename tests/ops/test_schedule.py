"""The schedule by itself: every pair of a site and a row it reads is visited exactly once, forward and backward."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhar.errors import ConfigurationError
from mhar.ops.schedule import SublayerSchedule, block_groups, check_schedule, sublayer_schedule


def pairs(schedule: SublayerSchedule) -> set[tuple[int, int]]:
    return {(s, n) for s in range(schedule.first, schedule.last) for n in range(s + 1)}


@st.composite
def schedules(draw: st.DrawFn) -> SublayerSchedule:
    block = draw(st.integers(0, 16))
    inner = draw(st.integers(1, block)) if block else 0
    first = draw(st.integers(0, 1))
    return SublayerSchedule(first, draw(st.integers(first + 1, 60)), block, inner)


@given(schedules())
def test_forward_visits_every_pair_once(schedule: SublayerSchedule) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    mixed: dict[int, int] = {}  # site -> rows in its partial mix
    for s in range(schedule.first, schedule.last):
        shared = schedule.forward(s)
        if shared is not None:
            for site in range(shared.site0, shared.site1):
                assert shared.merge == (mixed.get(site, 0) > 0)
                assert mixed.get(site, 0) == shared.row0
                mixed[site] = shared.row1
                seen.update((site, n) for n in range(shared.row0, shared.row1))
                assert schedule.block_start(site) == schedule.block_start(s)
        assert mixed.get(s, 0) == schedule.own_start(s)
        seen.update((s, n) for n in range(schedule.own_start(s), s + 1))
    assert seen == Counter(pairs(schedule))


@given(schedules(), st.data())
def test_backward_visits_every_pair_once(schedule: SublayerSchedule, data: st.DataObject) -> None:
    last = data.draw(st.integers(schedule.first + 1, schedule.last))
    seen: Counter[tuple[int, int]] = Counter()
    gathered: set[int] = set()
    for n in range(last - 1, -1, -1):
        for shared in schedule.backward(n, last):
            assert shared.site0 > n  # only sites that are done
            for row in range(shared.row0, shared.row1):
                assert shared.merge == (row in gathered)
                gathered.add(row)
            seen.update((s, row) for s in range(shared.site0, shared.site1) for row in range(shared.row0, shared.row1))
        assert schedule.gathered(n, last) == (n in gathered)
        own = range(max(n, schedule.first), min(schedule.own_end(n), last))
        seen.update((s, n) for s in own)
    assert seen == Counter((s, n) for s, n in pairs(schedule) if s < last)


def test_dense_and_auto_and_a_block_length() -> None:
    assert sublayer_schedule(0, 25, "dense", (16, 8)).block == 0
    assert sublayer_schedule(0, 25, "auto", (16, 8)) == SublayerSchedule(0, 25, 16, 8)
    assert sublayer_schedule(1, 25, 5, (16, 8)) == SublayerSchedule(1, 25, 5, 5)
    assert sublayer_schedule(0, 5, 8, (16, 8)).block == 0  # one block holds all sites


@pytest.mark.parametrize("value", [0, 17, -1, True, "sparse", 2.0, None])
def test_other_schedules_are_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"schedule must be .* got"):
        check_schedule(value)


@pytest.mark.parametrize(
    "num_rows, groups",
    [
        ((0, 1, 1, 1, 2, 2, 0), ((1, 4), (4, 6))),
        ((1,) * 40, ((0, 16), (16, 32), (32, 40))),
        ((0, 0), ()),
    ],
)
def test_groups_of_sites_that_read_the_same_rows(num_rows: tuple[int, ...], groups: tuple) -> None:
    assert block_groups(num_rows) == groups
