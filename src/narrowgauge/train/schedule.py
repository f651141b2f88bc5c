"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from narrowgauge.train.sections import ScheduleConfig


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate of step `step` (the first is 0) of `steps`: linear warm-up, then a cosine (Loshchilov and Hutter 2017,
    arXiv:1608.03983).

    The rate rises in equal parts and reaches `peak` at step `warmup_steps - 1`; the last step has `final_fraction` of
    it. It depends on the step alone, so that there is nothing to save.
    """
    warmup_steps = schedule.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    last = max(steps - 1 - warmup_steps, 1)
    progress = min((step - warmup_steps) / last, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * cosine)
