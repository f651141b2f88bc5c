"""What a run that the guard leads back begins from: which checkpoint, which data, and with what counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.observe.journal import Journal
from narrowgauge.optim.guard import StepGuard
from narrowgauge.train import loop
from narrowgauge.train.assemble import Parts
from narrowgauge.train.events import Event, Finished
from narrowgauge.train.loop import run
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.save_handle import SaveHandle

CHANGES: dict[str, Any] = {
    "recipe": "fp8_current", "steps": 12, "save_every": 2, "eval_every": 0, "keep_last": 20, "statistics_every": 0,
    "sample_tokens": 0, "guard": {"mode": "act", "every": 4, "leave_out": 3},
}  # fmt: skip


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let the run that follows read NaN in those batches; `look` is called before each forward of a training step.

    Returns the numbers of the last batch that each forward's step has read, as they come.
    """
    real = loop.assemble

    def install(bad: Container[int], look: Callable[[Parts, int], None] = lambda parts, batch: None) -> list[int]:
        read: list[int] = []

        def changed(*args: Any, **kwargs: Any) -> Parts:
            parts = real(*args, **kwargs)

            def spoil(module: torch.nn.Module, _: Any, out: torch.Tensor) -> torch.Tensor | None:
                if not module.training:
                    return None
                read.append(parts.stream.position // parts.stream.batch_size)
                look(parts, read[-1])
                return out * float("nan") if read[-1] in bad else None

            parts.model.embedding.register_forward_hook(spoil)
            return parts

        monkeypatch.setattr(loop, "assemble", changed)
        return read

    return install


def rollbacks(folder: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["after"]) for row in Journal(folder).of_kind("guard") if row["action"] == "rollback"]


def test_neither_a_damaged_checkpoint_nor_one_of_the_trouble_itself_is_a_way_back(make_config, poisoned) -> None:
    """The trouble begins in step 8, whose checkpoint is of after it, and that of step 6 is damaged meanwhile."""
    config = make_config("a", **CHANGES)
    folder = RunFolder(Path(config.runs_dir) / "a")
    left: list[list[int]] = []

    def look(parts: Parts, batch: int) -> None:
        if batch == 9:
            path = folder.checkpoint(6) / "model.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        if batch == 11:  # what belongs to the path not taken is gone before a step of the other one
            left.append(folder.steps())

    poisoned(range(8, 11), look)
    run(config)
    assert rollbacks(folder.path) == [(4, "step 4")]
    assert left == [[2, 4]]


def test_batches_are_left_out_by_their_number_where_a_step_takes_several(make_config, poisoned) -> None:
    guard = {"mode": "act", "every": 4, "leave_out": 10}
    read = poisoned(range(14, 19))  # steps 7 to 9
    folder = run(make_config("a", **CHANGES | {"accumulation": 2, "guard": guard})).run_dir
    assert rollbacks(folder) == [(6, "step 6")]
    # of the ten batches after the twelfth six have been read: four more are not
    assert read[::2] == [*range(2, 19, 2), *range(24, 35, 2)]


def test_skips_of_the_path_not_taken_are_not_counted(make_config, poisoned) -> None:
    """Three in a row are fewer than five, and of three ways back none goes on counting; that of step 2 is."""
    counted: list[int] = []

    def look(parts: Parts, batch: int) -> None:
        skips = StepGuard.on(parts.optimizer)
        assert skips is not None
        counted.append(skips.skips_in_a_row)

    read = poisoned({2, *range(7, 20)}, look)
    events: list[Event] = []
    folder = run(make_config("a", **CHANGES | {"max_skips": 4}), events.append).run_dir
    assert len(rollbacks(folder)) == 3
    assert counted == [0, 0, 1, 0, 0, 0] + [0, 1, 2] * 3 + [0] * 6 and len(read) == 21
    (finished,) = (event for event in events if isinstance(event, Finished))
    assert finished.skipped_steps == 1


def test_a_checkpoint_that_is_still_being_written_is_waited_for(
    make_config, poisoned, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real, write = threading.Event(), SaveHandle.wait, SaveHandle._run

    def wait(handle: SaveHandle, timeout_s: float | None = None) -> Path:
        asked.set()
        return real(handle, timeout_s)

    def late(handle: SaveHandle, data: Callable[[], None]) -> None:
        asked.wait(10.0)
        write(handle, data)

    monkeypatch.setattr(SaveHandle, "wait", wait)
    monkeypatch.setattr(SaveHandle, "_run", late)
    poisoned(range(7, 10))
    folder = run(make_config("a", **CHANGES | {"save_every": 6, "save_async": True})).run_dir
    assert rollbacks(folder) == [(6, "step 6")]


def test_what_the_journal_looks_at_changes_no_decision(make_config, poisoned) -> None:
    """Decisions go by the guard's own samples: the first layer's input flushes from step 5 on."""
    told = []

    def stale(parts: Parts, batch: int) -> None:
        if batch == 1:
            layer = parts.model.get_submodule("blocks.0.mlp.gate_up")
            layer.register_forward_pre_hook(lambda _, args: (args[0] * 2.0**30,) if is_fifth(parts) else None)
            layer.register_forward_hook(lambda _, args, out: out / 2.0**30 if is_fifth(parts) else None)

    def is_fifth(parts: Parts) -> bool:
        return parts.model.training and parts.stream.position == 5 * parts.stream.batch_size

    for every in (0, 1):
        poisoned(range(0), stale)
        changes = CHANGES | {"recipe": "fp8_delayed", "statistics_every": every}
        folder = run(make_config(f"every-{every}", **changes)).run_dir
        told.append([(row["step"], row["action"]) for row in Journal(folder).of_kind("guard")])
    assert told[0] == told[1] == [(8, "wait"), (9, "promote")]
