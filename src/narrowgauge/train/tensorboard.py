"""TensorBoard event files, written by a listener beside the caller's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from narrowgauge.errors import ConfigError
from narrowgauge.train.events import Evaluated, Event, OnEvent, StepDone


@contextmanager
def with_tensorboard(on_event: OnEvent, folder: Path | None) -> Iterator[OnEvent]:
    """Yield a listener that passes every event on and writes scalars into `folder`; None: `on_event` itself.

    Raises ConfigError where TensorBoard is not installed.
    """
    if folder is None:
        yield on_event
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "tensorboard=true: expected the package tensorboard, found none: pip install 'narrowgauge[report]'"
        ) from None
    writer = SummaryWriter(str(folder))

    def listener(event: Event) -> None:
        for tag, value in _scalars(event).items():
            writer.add_scalar(tag, value, event.step)
        on_event(event)

    try:
        yield listener
    finally:
        writer.close()


def _scalars(event: Event) -> dict[str, Any]:
    if isinstance(event, StepDone):
        scalars = {f"train/{name}": getattr(event, name) for name in ("loss", "grad_norm", "lr", "tokens_per_s")}
        scalars["train/loss_scale"] = event.loss_scale
        for role, measures in (event.statistics or {}).items():
            scalars |= {f"casts/{role}/{measure}": share for measure, share in measures.items()}
        return scalars
    if isinstance(event, Evaluated):
        return {f"validation/{name}": getattr(event, name) for name in ("loss", "bits_per_byte")}
    return {}
