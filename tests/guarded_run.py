"""A tiny run with a fault of precision, which the guard sees: one layer's input leaves the history of its scale."""

from __future__ import annotations

from typing import Any

from narrowgauge.train.assemble import Parts

LAYER = "blocks.0.mlp.gate_up"


def changes(calm: int) -> dict[str, Any]:
    """Of the tiny run's configuration: the guard acts, and looks at every fourth step."""
    return {
        "recipe": "fp8_delayed", "steps": 12, "save_every": 2, "eval_every": 6, "keep_last": 20, "statistics_every": 0,
        "guard": {"mode": "act", "every": 4, "calm": calm},
    }  # fmt: skip


def batch_of(parts: Parts) -> int:
    """The number of the batch in hand, from 1, which a resumed run knows, too."""
    return parts.stream.position // parts.stream.batch_size


def stale(parts: Parts) -> None:
    """In one batch a layer reads 2^30 x, and its output is divided by that: the history keeps the amax."""
    layer = parts.model.get_submodule(LAYER)
    layer.register_forward_pre_hook(
        lambda m, args: (args[0] * 2.0**30,) if m.training and batch_of(parts) == 5 else None
    )
    layer.register_forward_hook(lambda m, _, out: out / 2.0**30 if m.training and batch_of(parts) == 5 else None)
