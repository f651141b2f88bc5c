"""Data parallelism: every rank has the whole model, and its own part of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed import ddp, wire
from narrowgauge.distributed import partition as whole_tensors
from narrowgauge.distributed.collectives import Group
from narrowgauge.distributed.gradients import GradientReducer
from narrowgauge.distributed.layout import GroupReducer, Layout, attach, check_unprepared, layout_of
from narrowgauge.errors import ConversionError, NarrowgaugeError
from narrowgauge.layers import gradients
from narrowgauge.layers.gradient_hooks import KeptGradient
from narrowgauge.layers.gradients import trainable
from narrowgauge.ops.reduce import SINGLE_PROCESS, Reducer
from narrowgauge.recipes.spec import Recipe
from narrowgauge.tensors.local import local
from narrowgauge.tensors.quantized import QuantizedTensor

_ATTRIBUTE = "_narrowgauge_replicas"


class Replicas:
    """The mark of a data-parallel model: over which group its gradients are averaged.

    A pickled one has lost its group: the model that comes back is one of a single process.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def data_parallel(
    model: nn.Module, over: Layout | dist.ProcessGroup | None = None, *, partition: bool = False
) -> nn.Module:
    """Make `model` a replica: the ranks' gradients are averaged during backward, in 8 bits where the recipe says so.

        model = ng.distributed.data_parallel(GPT(config), ng.distributed.layout(data=2))
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), "narrow8")

    over: a layout, whose dimension "data" it is, or a process group; None: all processes. The values of parameters and
    buffers become those of the group's first rank. Then `prepare` has each gradient averaged over the group as the
    recipe's `grad_comm` says, as soon as it is there, and kept as its `grad` says: every rank has the same bits. A
    parameter that no rank used has no gradient. A loss is taken to be the mean over as many samples on every rank, see
    `share_of_batch`; inside `narrowgauge.accumulate` nothing travels before its end. `p.grad` is None until the mean is
    there, at the latest when backward returns. Buffers, such as running statistics, stay each rank's own afterwards.
    partition: each rank keeps the optimizer's state of its own whole parameters, steps them and sends them to the
    others as `param_comm` says (FP8-LM's form of ZeRO-1).

    Returns the same object: no wrapper, and the same names in its state dict. A model that is sharded by
    `torch.distributed.fsdp.fully_shard` averages by itself. Raises ConversionError for a model that is prepared
    already, that torch's DDP has wrapped (`prepare` takes such a model as it is), or whose gradients cannot be averaged
    so: of float64, complex or sparse ones, or of parameters on several devices.
    """
    if isinstance(model, DistributedDataParallel):
        raise ConversionError(
            "expected a model, found one that DistributedDataParallel has wrapped, which averages gradients itself: "
            "prepare it as it is, or pass model.module to data_parallel instead"
        )
    check_unprepared(model, "data_parallel")
    if isinstance(over, Layout):
        attach(model, over)
        group = over.group("data")
    else:
        group = over
    if dist.get_world_size(group) == 1 or _is_sharded(model):
        return model
    _check(model)
    _spread(model, group)
    model.register_forward_pre_hook(_refuse_unprepared)
    setattr(model, _ATTRIBUTE, Replicas(group))
    if partition:
        whole_tensors.request(model, group)
    return model


def install(model: nn.Module, recipe: Recipe) -> None:
    """`layers.gradients.install`, with gradients averaged where `data_parallel` or torch's DDP has made replicas."""
    if isinstance(model, DistributedDataParallel):
        ddp.install(model, recipe)
        return
    mark: Replicas | None = model.__dict__.get(_ATTRIBUTE)
    if mark is None:
        gradients.install(model, recipe)
        return
    _check(model)
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is _refuse_unprepared]:
        del model._forward_pre_hooks[key]
    gradients.install(model, recipe, GradientReducer(model, recipe, mark.group))


def amax_reducer(model: nn.Module) -> Reducer:
    """What takes the maximum of amax values over all ranks that have the same layers as this one, or parts of them."""
    found = layout_of(model)
    mark: Replicas | None = model.__dict__.get(_ATTRIBUTE)
    if found is not None:
        group: Any = found.stage
    elif mark is not None:
        group = mark.group
    elif isinstance(model, DistributedDataParallel):
        group = model.process_group
    else:
        return SINGLE_PROCESS
    return GroupReducer(group) if dist.get_world_size(group) > 1 else SINGLE_PROCESS


@contextmanager
def share_of_batch(model: nn.Module, samples: int) -> Iterator[None]:
    """Weigh this rank's gradients by its part of the batch, where ranks have different numbers of samples.

        with ng.distributed.share_of_batch(model, len(ids)):
            if len(ids):
                loss(model, ids).backward()

    samples: of which the loss on this rank is the mean: sequences, or tokens; 0 for a rank whose data have run out,
    which takes part without a backward. Every rank enters the context, once for each step, with one backward or one
    `accumulate` in it. Gradients become sum(samples * gradient) / sum(samples) over the ranks. Does nothing for a model
    of one process. Raises NarrowgaugeError for a count below 0, for a second backward, and for models whose gradients
    torch averages: those of DistributedDataParallel and of fully_shard.
    """
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
        raise NarrowgaugeError(f"samples={samples!r}: expected the number of samples on this rank, 0 or more")
    owners = [owner for p in trainable(model) if (owner := KeptGradient.of(p)) is not None]
    sink = next((owner.sink for owner in owners if owner.sink is not None), None)
    if sink is None and _is_sharded(model) and dist.get_world_size() > 1:
        raise NarrowgaugeError(
            "share_of_batch: expected a model of narrowgauge.distributed.data_parallel, found one that fully_shard has "
            "sharded, whose parameters every rank takes part in gathering: give every rank a batch, and multiply its "
            "loss by samples * ranks / (samples of all ranks)"
        )
    if sink is None:
        yield
        return
    if not isinstance(sink, GradientReducer) or isinstance(sink, ddp.DdpSink):
        raise NarrowgaugeError(
            "share_of_batch: expected a model of narrowgauge.distributed.data_parallel, found torch's DDP, which "
            "averages over ranks alike: use data_parallel, or give every rank as many samples"
        )
    before = sink.rounds
    sink.weight, sink.leaves_out = _weight(model, samples, sink.group), samples == 0
    try:
        yield
        if sink.rounds == before:
            sink.finish()
    finally:
        sink.weight, sink.leaves_out = None, False
    if sink.rounds != before + 1:
        raise NarrowgaugeError(
            f"share_of_batch: expected one backward in it, found {sink.rounds - before}: put several into "
            "`with narrowgauge.accumulate(model):`"
        )


def _weight(model: nn.Module, samples: int, group: Group) -> Tensor:
    """samples * ranks / (samples of all ranks): 0-dimensional float32, 0 where no rank has any."""
    ranks = dist.get_world_size(group)
    total = torch.tensor([samples], dtype=torch.int64, device=local(next(model.parameters())).device)
    dist.all_reduce(total, group=group)
    wire.record(wire.CONTROL, "all_reduce", torch.int64, 2 * total.nbytes * (ranks - 1) // ranks)
    return (samples * ranks / total.clamp(min=1).double()).float()[0]


def _refuse_unprepared(model: nn.Module, args: Any) -> None:
    if model.training and torch.is_grad_enabled() and _ATTRIBUTE in vars(model):
        raise ConversionError(
            "the model is data parallel, and nothing averages its gradients yet: call narrowgauge.prepare(model, "
            'optimizer, recipe) before training, with "fp32" for plain data parallelism'
        )


def _is_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule  # it loads much that other models do not need

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _check(model: nn.Module) -> None:
    devices = set()
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.dtype.is_complex or p.dtype is torch.float64:
            raise ConversionError(
                f"parameter '{name}' has dtype {p.dtype}: expected float32, bfloat16 or float16, whose gradients can "
                "be averaged over ranks; convert it, e.g. by model.float(), or freeze it"
            )
        devices.add(p.device)
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ConversionError(f"expected all parameters of a replica on one device, found {found}: move the model")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ConversionError(f"'{name}' makes sparse gradients: build it with sparse=False to average them")


@torch.no_grad()
def _spread(model: nn.Module, group: Group) -> None:
    """Give all ranks the values of the group's first; those on the meta device have none."""
    for tensor in (*model.parameters(), *model.buffers()):
        values = local(tensor)
        if values.is_meta or not values.numel():
            continue
        parts = (values.codes, values.dequant_scale, values.amax) if isinstance(values, QuantizedTensor) else (values,)
        for part in parts:
            data = part.detach().contiguous()
            # as bytes: backends know few dtypes
            dist.broadcast(data.view(-1).view(torch.uint8), group=group, group_src=0)
            part.detach().copy_(data)
            wire.record("param_comm", "broadcast", part.dtype, data.nbytes if dist.get_rank(group) == 0 else 0)
