"""What the guard goes by: casts in force and what a sampled step measured of them, worst over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from narrowgauge.distributed.meeting_point import has_peers
from narrowgauge.numerics.formats import BF16, FP16, FP32
from narrowgauge.numerics.rounding import NONZERO
from narrowgauge.observe.shares import worse
from narrowgauge.recipes.spec import MOMENT_ROLES, OPERAND_ROLES, CastSpec
from narrowgauge.train.guard_apply import Moments, layers_of
from narrowgauge.train.guard_ladder import FLUSHED, Rung

Key = tuple[str, str]  # layer or parameter, role
Measures = Mapping[str, float]
Layers = Mapping[str, Mapping[str, Measures]]  # as in the journal: layer -> role -> measure -> number


WOULD_FLUSH = "would flush"  # of a widened moment: what the narrower format would make of it


class Sample(NamedTuple):
    """One cast in force, and its measures."""

    spec: CastSpec
    measures: Measures


def samples_of(
    model: nn.Module, moments: Moments, layers: Layers, came_from: Mapping[Key, Rung], weighs_moments: bool
) -> dict[Key, Sample]:
    """What this process measured.

    layers: of the sampled step. came_from: of moments that were widened, the narrower format.
    weighs_moments: whether what storing moments did is weighed; if not, it is left out where it is known by chance.
    """
    found: dict[Key, Sample] = {}
    for name, layer in layers_of(model).items():
        for role in OPERAND_ROLES:
            measures = layers.get(name, {}).get(role)
            cast: CastSpec = getattr(layer.training_casts, role)
            # other formats of 16 bits and more are the compute dtype, or have its range
            is_cast = cast.format.is_narrow or (cast.format is FP16 and layer.training_casts.compute is not FP16)
            if is_cast and measures is not None and math.isfinite(measures.get("amax", 0.0)):
                found[name, role] = Sample(cast, measures)
    for label, p in moments.parameters():
        for role in MOMENT_ROLES:
            spec = moments.spec(p, role)
            if spec is None or not (spec.format.is_narrow or spec.format is FP16 or (label, role) in came_from):
                continue
            measures = dict(layers.get(label, {}).get(role, {})) if weighs_moments else {}
            if role == "exp_avg_sq":
                measures.pop(FLUSHED, None)  # of all zeros, the guard counts those that the first moment denies
                narrower = came_from.get((label, role))
                counts = {
                    FLUSHED: moments.lost(p)
                    if spec.format not in (FP32, BF16) and spec.rounding is not NONZERO
                    else 0.0,
                    WOULD_FLUSH: None if narrower is None else moments.lost(p, narrower),
                }
                measures |= {measure: share for measure, share in counts.items() if share is not None}
            found[label, role] = Sample(spec, measures)
    return found


def without_operands(layers: Layers) -> Layers:
    """What is known of moments."""
    return {name: {role: m for role, m in roles.items() if role in MOMENT_ROLES} for name, roles in layers.items()}


def worst_over_ranks(mine: dict[Key, Sample]) -> dict[Key, Sample]:
    """The same samples on all processes, in the same order: of each measure the worst. A collective, where there are
    several processes.
    """
    parts: list[Any] = [mine]
    if has_peers():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
    return merged(parts)


def merged(parts: Iterable[Mapping[Key, Sample]]) -> dict[Key, Sample]:
    """The worst of each measure: the lowest ratio of signal to noise, the largest of all else."""
    found: dict[Key, Sample] = {}
    for part in parts:
        for key, sample in part.items():
            before = found.get(key)
            found[key] = sample if before is None else Sample(before.spec, _worse(before.measures, sample.measures))
    return dict(sorted(found.items()))


def _worse(a: Measures, b: Measures) -> Measures:
    both = {measure: worse(measure, a[measure], b[measure]) for measure in a.keys() & b.keys()}
    return {**a, **b, **both}
