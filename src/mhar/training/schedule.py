"""Learning-rate schedules: pure functions of the step."""

import math

from mhar.training.config import ScheduleSection


def lr_factor(schedule: ScheduleSection, step: int, steps: int) -> float:
    """The learning rate of update `step` (from 0) of `steps`, as a part of the peak.

    Linear warm-up to 1 at step `warmup_steps`, then down to `min_ratio` at the last step:
    "cosine" and "linear" from there on; "wsd" (Hu et al. 2024) and "one_minus_sqrt" (Haegele et al. 2024) stay at the
    peak and decay over the last `decay_fraction` of all steps, linearly or as 1 - sqrt.
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    begin = warmup
    if schedule.kind in ("wsd", "one_minus_sqrt"):
        begin = max(warmup, steps - 1 - round(schedule.decay_fraction * steps))
    done = min(max(step - begin, 0) / max(steps - 1 - begin, 1), 1.0)
    remaining = {
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "linear": 1 - done,
        "wsd": 1 - done,
        "one_minus_sqrt": 1 - math.sqrt(done),
    }[schedule.kind]
    return schedule.min_ratio + (1 - schedule.min_ratio) * remaining
