"""torch's DistributedDataParallel with 8 bits on the wire: a communication hook that `prepare` registers.

DDP keeps its own wide buckets, and gradients of parameters in 16 bits pass through them in 16 bits: what this saves is
bytes between ranks. `data_parallel` saves the memory as well.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed.buckets import plan
from narrowgauge.distributed.gradients import GradientReducer
from narrowgauge.distributed.reduction import Reduction, wide_values
from narrowgauge.errors import ConversionError
from narrowgauge.layers import delayed, gradients
from narrowgauge.layers.gradient_hooks import KeptGradient, is_cast
from narrowgauge.recipes.spec import Recipe


class DdpSink(GradientReducer):
    """What keeps gradients wide until DDP has averaged them; the end of an `accumulate` context it averages itself."""

    sets_aside = False
    in_parameter_dtype = True

    def __init__(self, model: DistributedDataParallel, recipe: Recipe) -> None:
        super().__init__(model, recipe, model.process_group)
        self._syncs: bool | None = None

    def begin(self) -> None:
        """Let DDP leave gradients alone until the context ends."""
        super().begin()
        model = self._wrapper()
        self._syncs, model.require_backward_grad_sync = model.require_backward_grad_sync, False

    def take(self, p: nn.Parameter) -> None:
        """Of a backward: leave `p.grad` to DDP. At the end of a context: average it."""
        if torch._C._current_graph_task_id() == -1:
            super().take(p)

    def finish(self, completes: bool = True) -> None:
        """Average what the context has summed."""
        if self._syncs is not None:
            self._wrapper().require_backward_grad_sync = self._syncs
            self._syncs = None
        super().finish(completes)

    def cast(self) -> None:
        """Keep all gradients as the recipe says, once DDP has written them."""
        for p in gradients.trainable(self._wrapper()):
            owner = KeptGradient.of(p)
            if owner is not None:
                owner.keep(p)

    def _wrapper(self) -> DistributedDataParallel:
        model = self._model()
        assert isinstance(model, DistributedDataParallel)
        return model


class _UnderWay(NamedTuple):
    """A DDP bucket: where the means go, by parameter, and the future that DDP waits for."""

    reductions: list[Reduction]
    gradients: list[Tensor]
    buffer: Tensor
    done: torch.futures.Future[Tensor]


class CommHook:
    """The state of the hook: the buckets of the backward under way.

    Collectives are never started when another ends, in the backend's thread, where ranks would start them in different
    orders: the all-gather of a bucket starts when DDP hands over the next one, or with the last.
    """

    def __init__(self, sink: DdpSink) -> None:
        self._sink = weakref.ref(sink)
        self._buckets: list[_UnderWay] = []

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start the mean of a bucket; the future holds its buffer once it is there."""
        sink = self._sink()
        assert sink is not None
        if bucket.index() == 0:
            self._buckets = []
        found = _start(bucket, sink)
        self._buckets.append(found)
        count = len(self._buckets)
        if count > 1:
            _gather(self._buckets[-2])
        if count > 2:
            _write(self._buckets[-3])
        if bucket.is_last():
            _gather(self._buckets[-1])
            for each in self._buckets[max(count - 2, 0) :]:
                _write(each)
            self._buckets = []
            engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            # DDP queues its own last step, which writes p.grad, after this hook has returned: ours is to follow that
            engine.queue_callback(lambda: engine.queue_callback(sink.cast))
        return found.done


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks the names, and takes no annotation in quotes
    return state.reduce(bucket)


def install(model: DistributedDataParallel, recipe: Recipe) -> None:
    """Keep gradients as `recipe.grad` says, averaged by DDP as `grad_comm` says.

    DDP's own reducer is built anew, since parameters may have been replaced. Raises ConversionError for a DDP with a
    communication hook of another's, with mixed precision of its own, or whose gradients are views of its buckets.
    """
    _check(model, recipe)
    sink = DdpSink(model, recipe)
    gradients.install(model, recipe, sink)
    # histories of amax values are each rank's own until the step takes their maximum; DDP would send rank 0's to all
    names = [role + suffix for role in delayed.OPERAND_ROLES for suffix in (delayed.HISTORY, delayed.SCALE)]
    for prefix, _ in model.module.named_modules():
        for name in (*names, delayed.ROLLS, delayed.PENDING):
            model.parameters_to_ignore.add(f"{prefix}.{name}" if prefix else name)
    _build_anew(model)
    model.register_comm_hook(CommHook(sink), _hook)


def _build_anew(model: DistributedDataParallel) -> None:
    """Let DDP build its reducer as it does when it is unpickled; the old one takes its hooks off as it goes."""
    del model.reducer, model.logger
    ignored = model.parameters_to_ignore
    model._module_parameters = [p for name, p in model.module.named_parameters() if name not in ignored]
    model._comm_hooks = []
    # __setstate__ falls back to the default group where the state has none
    model.__setstate__({"process_group": model.process_group})


def _check(model: DistributedDataParallel, recipe: Recipe) -> None:
    if any(hook is not _hook for hook, _ in model._comm_hooks):
        raise ConversionError(
            "the DistributedDataParallel has a communication hook, and prepare registers its own: build it without, or "
            "use narrowgauge.distributed.data_parallel"
        )
    if model.mixed_precision is not None:
        raise ConversionError(
            "expected a DistributedDataParallel without mixed_precision: the recipe decides precision"
        )
    if model.gradient_as_bucket_view and is_cast(recipe.grad):
        raise ConversionError(
            f"recipe '{recipe.name}' keeps gradients as ({recipe.grad}), and DDP's are views of its wide buckets: "
            "build it with gradient_as_bucket_view=False"
        )


def _start(bucket: dist.GradBucket, sink: DdpSink) -> _UnderWay:
    found = bucket.gradients()
    specs = [sink.travels_as(p) for p in bucket.parameters()]  # type: ignore[arg-type]
    sizes = [grad.numel() for grad in found]
    buffer = bucket.buffer()
    reductions = []
    for planned in plan(sizes, specs, dist.get_world_size(sink.group), most_values=sum(sizes) + 1):
        reduction = Reduction(planned, sink.group, buffer.device)
        for place, piece in enumerate(planned.pieces):
            reduction.put(place, found[piece.parameter].reshape(-1))
        reduction.launch()
        reductions.append(reduction)
    done = torch.futures.Future() if buffer.device.type == "cpu" else torch.futures.Future(devices=[buffer.device])
    return _UnderWay(reductions, found, buffer, done)


def _gather(bucket: _UnderWay) -> None:
    for reduction in bucket.reductions:
        reduction.gather()


def _write(bucket: _UnderWay) -> None:
    for reduction in bucket.reductions:
        spec = reduction.bucket.spec
        for piece, rows in zip(reduction.bucket.pieces, reduction.finish(), strict=True):
            grad = bucket.gradients[piece.parameter]
            grad.copy_(wide_values(rows, spec, grad.shape, grad.dtype))
    bucket.done.set_result(bucket.buffer)
