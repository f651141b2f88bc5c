"""Files of a checkpoint of many processes, as torch.distributed.checkpoint wants them written and read.

Each process writes one safetensors file; the first one fills the folder's index and manifest and gives the folder its
name, after all have written. Nothing is pickled into a file, and nothing is unpickled from one.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from narrowgauge.errors import CheckpointError
from narrowgauge.train import folder
from narrowgauge.train.distributed_checkpoint_index import INDEX, Index, Stored


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class FolderWriter(StorageWriter):
    """Writes a folder, whole or not at all. One instance a save."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary: Path | None = None  # known to the coordinator, once it is there

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to reset: one instance writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """False: only narrowgauge chooses this writer."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed before the plans."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder under its temporary name, and tell every rank where its file goes."""
        self.temporary = folder.make_temporary(self.path)
        return [replace(plan, storage_data=str(self.temporary / file_of(rank))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, and tell its size and its SHA-256."""
        results: list[WriteResult] = []
        if plan.items:
            path = Path(plan.storage_data)
            tensors: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
            with folder.os_errors():
                save_file(tensors, path, metadata={"format": "pt"})
            entry = folder.seal(path)
            results = [
                WriteResult(item.index, tensors[item.index.fqn].nbytes, (path.name, entry)) for item in plan.items
            ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write index and manifest, and give the folder its name. metadata.planner_data: the Index."""
        assert self.temporary is not None
        index: Index = metadata.planner_data
        metadata.planner_data = None  # it is sent to all ranks
        files: dict[str, Any] = {}
        for result in (each for rank in results for each in rank):
            name, entry = result.storage_data
            files[name] = entry
            chunk = metadata.state_dict_metadata[result.index.fqn]
            dtype, shape = chunk.properties.dtype, tuple(chunk.size)  # type: ignore[union-attr]
            index.stored[result.index.fqn] = Stored(name, result.index.fqn, dtype, shape)
        for name in files:
            if not (self.temporary / name).is_file():
                raise CheckpointError(
                    f"{self.path}: rank 0 does not find {name}, which another rank wrote: expected a folder that all "
                    "ranks see: save to a file system that they share"
                )
        (self.temporary / INDEX).write_text(index.to_json(), encoding="utf-8")
        files[INDEX] = folder.seal(self.temporary / INDEX)
        folder.publish(self.temporary, self.path, files)

    def give_up(self) -> None:
        """Remove what was begun: called after all ranks have stopped writing."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)


class FolderReader(StorageReader):
    """Reads parts of the tensors of a folder; where they are is in the plan, as the planner finishes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to reset: one instance reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """False: only narrowgauge chooses this reader."""
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Empty: the planner reads the index, whose errors are to reach the user."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed before the plans."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan's items, file by file. plan.storage_data: key -> Stored."""
        by_file: dict[str, list[Any]] = defaultdict(list)
        for item in plan.items:
            by_file[plan.storage_data[item.storage_index.fqn].file].append(item)
        for name, items in sorted(by_file.items()):
            with safe_open(self.path / name, framework="pt") as file:
                for item in items:
                    key = plan.storage_data[item.storage_index.fqn].name
                    target = planner.resolve_tensor(item)
                    # a tensor of no dimensions has no slices
                    parts = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
                    target.copy_(file.get_slice(key)[parts] if parts else file.get_tensor(key))
                    planner.commit_tensor(item, target)
        return _done(None)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
