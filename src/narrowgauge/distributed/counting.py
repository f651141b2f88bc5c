"""Who steps together, and which rank counts a value: so that norms and decisions are those of the whole model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed.layout import DIMENSIONS, GroupReducer, Layout, layout_of
from narrowgauge.distributed.replicas import amax_reducer
from narrowgauge.errors import ConversionError
from narrowgauge.ops.reduce import SINGLE_PROCESS, Reducer
from narrowgauge.tensors.local import is_distributed
from narrowgauge.tensors.shares import given_share, parted, place_share

# a parameter has the same values along these, unless it is parted over them; stages have parameters of their own
_HELD_ALONG = tuple(name for name in DIMENSIONS if name != "pipeline")


def deciding(model: nn.Module) -> Reducer:
    """Over all processes that step together with this one.

    Those of the layout, else of the mesh that the parameters are on, else of the replicas.
    """
    found = layout_of(model)
    if found is not None:
        return GroupReducer(found.everyone) if dist.get_world_size(found.everyone) > 1 else SINGLE_PROCESS
    whole: Any = next((p for p in model.parameters() if is_distributed(p)), None)
    if whole is None or whole.device_mesh.size() == 1:
        return amax_reducer(model)
    mesh = whole.device_mesh
    if mesh.size() == dist.get_world_size():
        return GroupReducer(None)
    return GroupReducer(mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group())


def count_once(model: nn.Module, reducer: Reducer) -> None:
    """Mark the parameters of a model with a layout, so that one collective over all of its processes makes a norm.

    reducer: `deciding(model)`. Of several ranks with the same values the first counts them; a tied copy that was marked
    so is counted nowhere. Without a layout the placements of DTensors tell, a collective for each of their dimensions.
    Raises ConversionError for a DTensor on a mesh that is not the layout's.
    """
    found = layout_of(model)
    if found is None or reducer is SINGLE_PROCESS:
        return
    for name, p in model.named_parameters():
        along = _parted_along(name, p, found)
        is_first = all(found.rank(dim) == 0 for dim in _HELD_ALONG if dim not in along)
        place_share(p, (reducer,), given_share(p).counted and is_first)


def _parted_along(name: str, p: Tensor, found: Layout) -> set[str]:
    """The dimensions of the layout over which the values of `p` are parted."""
    whole: Any = p
    along: set[str] = set()
    for dim, _ in parted(p):
        names = whole.device_mesh.mesh_dim_names
        known = names[dim].split("_") if names else []  # "data_shard": two that were made one
        if not known or any(each not in DIMENSIONS for each in known):
            raise ConversionError(
                f"parameter '{name}' is parted over a mesh of dimensions {names}: expected those of the model's layout "
                f"({found}), as in fully_shard(model, mesh=layout.mesh['shard'])"
            )
        along.update(known)
    return along
