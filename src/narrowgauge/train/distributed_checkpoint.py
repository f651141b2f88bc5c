"""Checkpoints of many processes, through torch.distributed.checkpoint, and parts of checkpoints for any process.

All ranks call `write` and `read`; a failure on one of them is raised on all.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from narrowgauge.distributed.meeting_point import has_peers
from narrowgauge.errors import CheckpointError, NarrowgaugeError
from narrowgauge.train.distributed_checkpoint_assembly import Request
from narrowgauge.train.distributed_checkpoint_collect import Holding, collect, merge, variants
from narrowgauge.train.distributed_checkpoint_request import Claims, ask, check_claims
from narrowgauge.train.distributed_checkpoint_single import open_index
from narrowgauge.train.distributed_checkpoint_storage import FolderReader, FolderWriter
from narrowgauge.train.folder import verify
from narrowgauge.train.save_handle import SaveHandle

# gloo groups for saves beside training, whose collectives must not mix with those of training
_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def write(
    path: Path,
    model: nn.Module,
    state: Mapping[str, Any] | None,
    names: Sequence[Sequence[str]],
    extra: Mapping[str, Any],
    about: dict[str, str],
    *,
    asynchronous: bool,
) -> SaveHandle | None:
    """Write the folder of a checkpoint: every rank its part, the first one the index. Arguments: see `collect`.

    about: versions and layout. asynchronous: return at once, with what has been copied being written by a thread.
    Raises CheckpointError.
    """
    planner = _SavePlanner(about)
    try:
        planner.holding, planner.tensors = collect(model, state, names, extra, copies=asynchronous)
    except NarrowgaugeError as error:  # the other ranks are to hear of it
        planner.failure = error
    if not asynchronous:
        _save(path, planner, None)
        return None
    group = _group_of_its_own()
    return SaveHandle(path, lambda: _save(path, planner, group))


def read(
    path: Path,
    model: nn.Module,
    names: Sequence[Sequence[str]] | None,
    is_verified: bool = False,
) -> dict[str, Any]:
    """This process's part of a checkpoint of any layout, as `checkpoint.load` takes it: see `request.ask`.

    names: of the optimizer's parameters, in the groups' order; None: its state is not wanted. is_verified: as of
    `checkpoint.load`. Raises CheckpointError.
    """
    alone = not has_peers()
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    planner = _LoadPlanner(path, model, names, rank, ranks, is_verified)
    reader = FolderReader(path)
    try:
        if alone:
            plan = planner.create_local_plan()
            check_claims(path, planner.request.index, [plan.planner_data])
            reader.read_data(planner.finish_plan(plan), planner).wait()
        else:
            dcp.load({}, storage_reader=reader, planner=planner)
    except CheckpointException as error:
        raise _first_failure(path, error, "read") from error
    return planner.build()


def _save(path: Path, planner: _SavePlanner, group: dist.ProcessGroup | None) -> None:
    writer = FolderWriter(path)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        writer.give_up()
        raise _first_failure(path, error, "written") from error


def _first_failure(path: Path, failed: CheckpointException, what: str) -> CheckpointError:
    """The failure of the lowest rank as an error of ours."""
    rank = min(failed.failures)
    error = failed.failures[rank][0]
    if isinstance(error, CheckpointError):
        return error
    where = f"{path} was not {what}: rank {rank}"
    if isinstance(error, OSError) and error.errno is not None:
        hint = (
            "make room, or choose another place"
            if error.errno == errno.ENOSPC
            else "mend that, or choose another place"
        )
        return CheckpointError(f"{where} found: {error.strerror}; nothing that was there before is lost: {hint}")
    return CheckpointError(f"{where} failed with {error!r}")


def _group_of_its_own() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    return _groups[world]


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans the tensors that `collect` found; every one is written by one of the ranks that have it."""

    def __init__(self, about: dict[str, str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.about = about
        self.holding: Holding | None = None
        self.tensors: dict[str, Tensor] = {}
        self.failure: NarrowgaugeError | None = None

    def create_local_plan(self) -> SavePlan:
        """An item for every tensor, and what this rank holds."""
        if self.failure is not None:
            raise self.failure
        return SavePlan([_item(key, tensor) for key, tensor in self.tensors.items()], planner_data=self.holding)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Leave every tensor to one rank, those that differ among ranks to each; and make the index."""
        holdings = [plan.planner_data for plan in all_plans]
        index = merge(holdings)
        index.about, index.variants = self.about, variants(holdings)
        plans = [replace(plan, items=_own_keys(plan.items, index.variants, r)) for r, plan in enumerate(all_plans)]
        plans, metadata = super().create_global_plan(plans)
        metadata.planner_data = index
        return [replace(plan, planner_data=None) for plan in plans], metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of an item."""
        key = write_item.index.fqn
        return self.tensors[key] if key in self.tensors else self.tensors[key.rpartition("#")[0]]


class _LoadPlanner(LoadPlanner):
    """Plans what this rank wants of a folder."""

    def __init__(self, path: Path, model: nn.Module, names: Any, rank: int, ranks: int, is_verified: bool) -> None:
        self.path, self.model, self.names, self.rank, self.ranks = path, model, names, rank, ranks
        self.is_verified = is_verified

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """All is known already."""

    def create_local_plan(self) -> LoadPlan:
        """Look at this rank's share of the files, read the index, and ask for this rank's parts."""
        if not self.is_verified:
            verify(self.path, self.rank, self.ranks)
        self.request = Request(open_index(self.path), self.rank)
        self.build, claims = ask(self.request, self.path, self.model, self.names)
        self.fetches = list(self.request.targets)
        items = [
            ReadItem(
                LoadItemType.TENSOR, MetadataIndex(str(at)), torch.Size([0] * len(box.sizes)), MetadataIndex(key),
                torch.Size(box.offsets), torch.Size(box.sizes),
            )
            for at, (key, box) in enumerate(self.fetches) if box.numel
        ]  # fmt: skip
        return LoadPlan(items, planner_data=claims)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """See that nothing of the checkpoint is wanted by none."""
        claims: list[Claims] = [plan.planner_data for plan in global_plan]
        check_claims(self.path, self.request.index, claims)
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Tell the reader where the tensors are."""
        return replace(central_plan, storage_data=self.request.index.stored)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: the plans hold tensors only."""
        raise AssertionError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The memory to fill."""
        return self.request.targets[self.fetches[int(read_item.dest_index.fqn)]]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing more is to be done."""


def _item(key: str, tensor: Tensor) -> WriteItem:
    offsets = torch.Size([0] * tensor.ndim)
    chunk = ChunkStorageMetadata(offsets, tensor.shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), tensor.shape)
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.TENSOR, tensor_data=data)


def _own_keys(items: list[WriteItem], variants: Mapping[str, Mapping[int, str]], rank: int) -> list[WriteItem]:
    """Items under the keys that a rank's tensors are to have."""
    named: Callable[[WriteItem], str] = lambda item: variants.get(item.index.fqn, {}).get(rank, item.index.fqn)  # noqa: E731
    return [replace(item, index=MetadataIndex(named(item), item.index.offset)) for item in items]
