"""Where a run's figures go beside its journal: TensorBoard's event files, trackio, Weights & Biases.

Each is a listener beside the caller's own. trackio and W&B go where their own settings say (e.g. WANDB_MODE=offline,
TRACKIO_DIR): nothing is sent anywhere that these do not name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.errors import ConfigError
from narrowgauge.observe.shares import worst_by_role
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.events import Evaluated, Event, OnEvent, StepDone


class Sink(Protocol):
    """Takes the figures of a step."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Take figures by tag."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


@contextmanager
def with_sinks(on_event: OnEvent, config: TrainConfig, folder: Path) -> Iterator[OnEvent]:
    """Yield a listener that passes every event on and hands figures to the sinks that `config` asks for.

    folder: the run's. Raises ConfigError where a sink's package is not installed, or it cannot start.
    """
    with ExitStack() as stack:
        sinks: list[Sink] = []
        for key, make in _SINKS.items():
            if getattr(config, key):
                sinks.append(make(config, folder))
                stack.callback(sinks[-1].close)

        def listener(event: Event) -> None:
            figures = figures_of(event)
            for sink in sinks if figures else ():
                sink.log(figures, event.step)
            on_event(event)

        yield listener if sinks else on_event


def figures_of(event: Event) -> dict[str, float]:
    """What sinks are told of an event, by tag.

    train/NAME, validation/NAME: of a step, and an evaluation. casts/ROLE/MEASURE: mean shares over layers. worst/ROLE/
    MEASURE: of the layer in which the sample's measure is the worst, the lowest SQNR or the largest share. bytes/ROLE.
    """
    if isinstance(event, Evaluated):
        return {f"validation/{name}": getattr(event, name) for name in ("loss", "bits_per_byte")}
    if not isinstance(event, StepDone):
        return {}
    figures = {f"train/{name}": getattr(event, name) for name in ("loss", "grad_norm", "lr", "tokens_per_s")}
    figures["train/loss_scale"] = event.loss_scale
    for role, measures in (event.statistics or {}).items():
        figures |= {f"casts/{role}/{measure}": share for measure, share in measures.items()}
    if event.precision is not None:
        for role, measures in worst_by_role(event.precision).items():
            figures |= {f"worst/{role}/{measure}": value for measure, value in measures.items()}
        figures |= {f"bytes/{role}": size for role, size in (event.bytes_by_role or {}).items()}
    return figures


class _TensorBoard:
    def __init__(self, config: TrainConfig, folder: Path) -> None:
        writer = _imported("tensorboard", "torch.utils.tensorboard", "tensorboard", "narrowgauge[report]").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for tag, value in figures.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """trackio or wandb: a module with one run under way, begun by `init`."""

    def __init__(self, key: str, config: TrainConfig, **options: Any) -> None:
        self._module = _imported(key, key, key, key)
        with _standard_output_free():
            try:
                self._run = self._module.init(
                    project=config.project,
                    name=config.name,
                    config=dataclasses.asdict(config),
                    resume="allow",
                    **options,
                )
            except Exception as error:  # of kinds of their own: no account, no network
                raise ConfigError(
                    f"{key}=true: expected {key} to start, found: {error}: mend its settings, or leave {key} out"
                ) from error

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        with _standard_output_free():
            self._run.finish()


def _trackio(config: TrainConfig, folder: Path) -> Sink:
    return _Tracker("trackio", config, embed=False)


def _wandb(config: TrainConfig, folder: Path) -> Sink:
    # a run that is resumed goes on as the same one; its console is left to the command line
    return _Tracker("wandb", config, id=config.name, dir=str(folder), settings={"console": "off"})


@contextmanager
def _standard_output_free() -> Iterator[None]:
    """What a tracker prints goes to standard error: standard output is for the figures that a command was asked for."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _imported(key: str, module: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{key}=true: expected the package {package}, found none: pip install '{extra}'") from None


_SINKS: dict[str, Callable[[TrainConfig, Path], Sink]] = {
    "tensorboard": _TensorBoard, "trackio": _trackio, "wandb": _wandb,
}  # fmt: skip
