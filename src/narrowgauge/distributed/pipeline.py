"""Pipeline parallelism: each rank has some layers, and micro-batches flow through the ranks, on torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed import codec, pipeline_schedule, sharding, wire
from narrowgauge.distributed.boundary import ROLE, Boundary
from narrowgauge.distributed.layout import Layout, attach
from narrowgauge.distributed.pipeline_run import Places, Shape, StageRun, forward_only, learn_shapes, tokens_of
from narrowgauge.distributed.stages import (
    Loss,
    SideLoss,
    Span,
    StagedGPT,
    StagedSequential,
    check_whole,
    gpt_costs,
    partition,
)
from narrowgauge.distributed.tied import tie_of
from narrowgauge.errors import ConfigError, ConversionError
from narrowgauge.layers.convert import device_of, keep_candidates
from narrowgauge.layers.gradients import accumulate
from narrowgauge.models.gpt import GPT
from narrowgauge.ops.deferred import WeightGradients
from narrowgauge.recipes.spec import CastSpec, Recipe

Batch = tuple[Tensor, Tensor]  # inputs, targets: of a GPT int64 [B, T]
_ATTRIBUTE = "_narrowgauge_pipeline"


def split_pipeline(
    model: nn.Module,
    layout: Layout,
    schedule: str = "1f1b",
    *,
    stages_per_rank: int | None = None,
    costs: Sequence[float] | None = None,
    loss: Loss | None = None,
) -> Pipeline:
    """Keep this rank's layers of `model` and run it as a pipeline over the layout's dimension "pipeline".

        pipeline = ng.distributed.split_pipeline(GPT(config), layout, "1f1b")
        model, optimizer = ng.prepare(pipeline.model, AdamW(pipeline.model.parameters()), "narrow8")
        mean_loss = pipeline.step(micro_batches); optimizer.step(); optimizer.zero_grad()

    model: a GPT, or an nn.Sequential whose parts each take one floating tensor with the samples along dimension 0 and
    give another. It may be on the meta device: then `pipeline.model.to_empty(device=...)` and a GPT's
    `reset_parameters()` give this rank's layers, with the weights that the whole model would have had, and no rank ever
    holds more. `model` itself is not to be used afterwards: it shares the layers.

    schedule: "gpipe", "1f1b", "interleaved" (two stages a rank, or `stages_per_rank`), "zero_bubble" (ZB1P) or "zbv"
    (two stages a rank, down the ranks and up again). In the last two, the weight gradients of layers that a recipe has
    converted are a pass of their own; other layers, and experts, take theirs together with those of the activations.

    costs: of each block or part, to balance the stages by; None: multiplications of a GPT, parameters of a Sequential.
    loss: of a Sequential: loss(output, targets), the mean over the micro-batch; a GPT has its own.

    Call it first: before parallelize_tensor, shard, data_parallel, the optimizer and prepare. Raises ConfigError for an
    unknown schedule, ConversionError for fewer blocks than stages and for models that cannot be split.
    """
    check_whole(model)
    how = pipeline_schedule.schedule_named(schedule)
    per_rank = how.default if stages_per_rank is None else stages_per_rank
    how.check_stages(per_rank)
    names, known_costs = _parts(model, loss)
    if costs is not None and len(costs) != len(names):
        raise ConfigError(f"expected {len(names)} costs, one for each block or part, found {len(costs)}")
    ranks = layout.size("pipeline")
    runs = partition(known_costs if costs is None else costs, ranks * per_rank)
    spans = [Span(at, len(runs), tuple(names[i] for i in run)) for at, run in enumerate(runs)]
    mine = [spans[at] for at in how.stages_of(layout.rank("pipeline"), ranks, per_rank)]
    if isinstance(model, GPT):
        staged: StagedGPT | StagedSequential = StagedGPT(model, mine)
    else:
        assert isinstance(model, nn.Sequential) and loss is not None
        staged = StagedSequential(model, mine, loss)
    keep_candidates(model, staged)
    return Pipeline(staged, layout, how, per_rank)


def _parts(model: nn.Module, loss: Loss | None) -> tuple[list[str], list[float]]:
    """Names of what the stages are made of, and their costs."""
    if isinstance(model, GPT):
        return [name for name, _ in model.blocks.named_children()], gpt_costs(model)
    if not isinstance(model, nn.Sequential):
        raise ConversionError(
            f"expected a GPT or a torch.nn.Sequential to split into stages, found {type(model).__name__}: give its "
            "parts in the order in which they run, as torch.nn.Sequential(...)"
        )
    if loss is None:
        raise ConversionError("expected loss=, a function of the last part's output and the targets, found none")
    parts = {name: part for name, part in model._modules.items() if part is not None}  # a part may be there twice
    held: dict[int, str] = {}
    for name, part in parts.items():
        for p in part.parameters():
            if held.setdefault(id(p), name) != name:
                raise ConversionError(
                    f"parts '{held[id(p)]}' and '{name}' share a parameter: put them into one part, so that they stay "
                    "on one stage"
                )
    return list(parts), [1.0 + sum(p.numel() for p in part.parameters()) for part in parts.values()]


class Pipeline:
    """This rank's part of a pipeline. model: its layers, under the names that they have in the whole model.

    `step` and `loss` are called on all ranks of the pipeline, with the same batches.
    """

    def __init__(
        self, model: StagedGPT | StagedSequential, layout: Layout, schedule: pipeline_schedule.Schedule, per_rank: int
    ) -> None:
        self.model, self.layout, self.schedule = model, layout, schedule
        self.recipe: Recipe | None = None
        ranks = layout.size("pipeline")
        of_stage = tuple(schedule.rank_of(stage, ranks) for stage in range(ranks * per_rank))
        self.places = Places(layout.group("pipeline"), layout.rank("pipeline"), of_stage)
        self.tie = tie_of(model, self.places)
        self._shapes: dict[Any, dict[int, tuple[Shape, Shape]]] = {}
        self._made: tuple[Any, Any, list[StageRun]] | None = None
        self._objective: Callable[[Tensor, Tensor], Tensor] | None = None  # of the step under way
        attach(model, layout)
        setattr(model, _ATTRIBUTE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the layers belongs to no pipeline

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def step(self, batches: Sequence[Batch], scale: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Forward and backward of all micro-batches: the mean of their losses, 0-dim float32, on every rank.

        The gradient of that mean, or of `scale` of it, is summed in float32 over the micro-batches and left on the
        parameters as the recipe's `grad` says; copies of a tied table have the sum of both. batches: (inputs, targets)
        of one shape. Raises ConfigError for too few of them, ConversionError for different shapes.
        """
        self._check(batches)
        device, count = device_of(self.model), len(batches)
        part = torch.full((), 1.0 / count, dtype=torch.float32, device=device)
        side = SideLoss(part if scale is None else scale(part))
        losses: list[Tensor] = []

        def objective(loss: Tensor, targets: Tensor) -> Tensor:
            losses.append(loss.detach().clone())  # torch detaches what it was given in place
            return loss / count if scale is None else scale(loss / count)

        inputs, targets = (torch.cat([batch[i] for batch in batches]).to(device) for i in (0, 1))
        schedule, stages = self._schedule(batches)
        self._objective = objective
        for stage in stages:
            stage.side, stage.tokens = side, tokens_of(inputs)
        reads = [inputs] if any(span.is_first for span in self.model.spans) else []
        last = {"target": targets, "targets": targets} if any(span.is_last for span in self.model.spans) else {}
        with accumulate(self.model), pipeline_schedule.own_errors():
            earlier = None if self.tie is None else self.tie.set_aside(self.table)
            schedule.step(*reads, return_outputs=False, **last)
            if self.tie is not None:
                self.tie.sum_gradients(self.table, self.spec_of("grad_comm", self.table), earlier)
        return self._over_stages(sum(losses, torch.zeros((), device=device)), side) / count

    @torch.no_grad()
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of one batch without gradients, 0-dim float32, on every rank; in the model's current mode."""
        device, side = device_of(self.model), SideLoss()
        inputs, targets = inputs.to(device), targets.to(device)
        found = forward_only(self.model, self.places, inputs, targets, self.spec_of(ROLE), side)
        return self._over_stages(found, side)

    def adopt(self, recipe: Recipe) -> None:
        """Take up a resolved recipe, and make copies of a tied table equal: before `prepare` stores the parameters."""
        self.recipe, self._made = recipe, None
        self._shapes.clear()
        if self.tie is not None:
            self.tie.broadcast(self.table)
            self.tie.mark(self.table)

    @property
    def table(self) -> nn.Parameter:
        """The embedding table, where the head is tied to it, on a rank that has it."""
        assert isinstance(self.model, StagedGPT) and self.model.tied_copy is not None
        return self.model.tied_copy

    def spec_of(self, role: str, p: Tensor | None = None) -> CastSpec | None:
        """What travels for a role; None: values as they are. p: of which parameter; small ones travel as they are."""
        if self.recipe is None or (p is not None and p.numel() < self.recipe.min_state_size):
            return None
        return codec.spec_of(self.recipe, role)

    def _over_stages(self, loss: Tensor, side: SideLoss) -> Tensor:
        """The sum of what all stages have added to the loss."""
        total = (loss if side.total is None else loss + side.total).detach().float().reshape(1)
        dist.all_reduce(total, group=self.places.group)
        ranks = dist.get_world_size(self.places.group)
        wire.record(wire.CONTROL, "all_reduce", total.dtype, 2 * total.nbytes * (ranks - 1) // ranks)
        return total[0]

    def _check(self, batches: Sequence[Batch]) -> None:
        if not batches:
            raise ConfigError("expected at least one micro-batch, found none")
        self.schedule.check_micro_batches(len(batches), self.layout.size("pipeline"))
        if self.schedule.puts_off and sharding.is_sharded(self.model):
            raise ConversionError(
                f"schedule '{self.schedule.name}' takes weight gradients after torch's FSDP2 has reduced those that "
                "were there: use schedule '1f1b' or 'interleaved' with shards, or replicas, parallel.data, with this"
            )
        shapes = list(dict.fromkeys((tuple(x.shape), tuple(y.shape)) for x, y in batches))
        if len(shapes) > 1:
            raise ConversionError(
                f"expected micro-batches of one shape in a step, found inputs and targets {shapes[0]} and {shapes[1]}: "
                "pad or drop what is left over at the end of the data"
            )
        if torch.is_anomaly_check_nan_enabled() and torch.is_anomaly_enabled() and self.spec_of(ROLE) is not None:
            raise ConversionError(
                "anomaly detection takes the codes that travel backward for numbers: use "
                "torch.autograd.set_detect_anomaly(True, check_nan=False)"
            )

    def _schedule(self, batches: Sequence[Batch]) -> tuple[Any, list[StageRun]]:
        """torch's schedule for so many micro-batches of such a shape, and its stages on this rank."""
        inputs, targets = (x.to(device_of(self.model)) for x in batches[0])
        key = (len(batches), inputs.shape, inputs.dtype, targets.shape, targets.dtype)
        if self._made is None or self._made[0] != key:
            self._made = None  # its buffers go first
            shapes = self._shapes.get(key[1:])
            if shapes is None:
                shapes = learn_shapes(self.model, self.places, (inputs, targets), self.spec_of(ROLE))
                self._shapes[key[1:]] = shapes
            runs = [self._stage(span, *shapes[span.index], inputs.shape[0]) for span in self.model.spans]
            stages = [stage for _, stage in runs]
            made = pipeline_schedule.make(self.schedule, stages, len(batches), self._take_loss)
            self._made = key, made, [run for run, _ in runs]
        return self._made[1], self._made[2]

    def _take_loss(self, loss: Tensor, targets: Tensor) -> Tensor:
        # torch wants to know the function when the schedule is made, for many steps
        assert self._objective is not None
        return self._objective(loss, targets)

    def _stage(self, span: Span, reads: Shape, sends: Shape, samples: int) -> tuple[StageRun, Any]:
        before, after = None, None
        if not span.is_first and not self.places.is_here(span.index - 1):
            before = Boundary(reads.of(samples), reads.dtype, self.spec_of(ROLE))
        if not span.is_last and not self.places.is_here(span.index + 1):
            after = Boundary(sends.of(samples), sends.dtype, self.spec_of(ROLE))
        later = WeightGradients() if self.schedule.puts_off else None
        run = StageRun(self.model, span, before, after, later)
        stage = pipeline_schedule.make_stage(
            run,
            span,
            device_of(self.model),
            self.places.group,
            _example(before, reads, samples, has_gradient=not span.is_first),
            _example(after, sends, samples, has_gradient=True),
            None if later is None else later.take,
        )
        return run, stage


def _example(boundary: Boundary | None, shape: Shape, samples: int, has_gradient: bool) -> Tensor:
    """What torch is told of an end of a stage: a tensor without values."""
    if boundary is not None:
        return boundary.carrier("meta").requires_grad_(has_gradient)
    return torch.empty(shape.of(samples), dtype=shape.dtype, device="meta", requires_grad=has_gradient)


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """The pipeline that a model is a part of, or None."""
    return model.__dict__.get(_ATTRIBUTE)


def adopt(model: nn.Module, recipe: Recipe) -> None:
    """What `prepare` does for a part of a pipeline, before it stores the parameters, with a resolved recipe.

    Raises ConversionError where torch's DDP stands around the part: the pipeline would run past it.
    """
    if isinstance(model, DistributedDataParallel) and pipeline_of(model.module) is not None:
        raise ConversionError(
            "expected a pipeline's model, found it inside DistributedDataParallel, past which the pipeline runs: use "
            "narrowgauge.distributed.data_parallel(pipeline.model, layout)"
        )
    found = pipeline_of(model)
    if found is not None:
        found.adopt(recipe)
