"""Stages of a pipeline: runs of a model's parts, even in cost, and what of the model one rank keeps of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConversionError, NarrowgaugeError
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.models.gpt import GPT
from narrowgauge.models.mlp import MixtureOfExperts
from narrowgauge.ops.experts import GroupedLinear

Loss = Callable[[Tensor, Tensor], Tensor]
BY_PIPELINE = (
    "this model is one rank's part of a pipeline, and its layers alone give no result: call pipeline.step(batches) or "
    "pipeline.evaluate(batches), on all ranks"
)


@dataclass(frozen=True)
class Span:
    """Stage number `index` of `stages`: the parts `names`, which are children of a GPT's `blocks` or of a Sequential.

    A GPT's first stage also has the embeddings, its last one the norm and the head.
    """

    index: int
    stages: int
    names: tuple[str, ...]

    @property
    def is_first(self) -> bool:
        """True for the stage that reads the input."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that takes the loss."""
        return self.index == self.stages - 1


@dataclass
class SideLoss:
    """Losses that arise within stages and are added to the last one's: those of load balancing.

    factor: what multiplies the loss of a micro-batch in backward, where their gradients start, too. total: their sum
    over the micro-batches and stages of this rank, 0-dim float32.
    """

    factor: Tensor | None = None
    total: Tensor | None = field(default=None, init=False)

    def add(self, x: Tensor, loss: Tensor) -> Tensor:
        """`x`, through which the gradient of `loss` enters backward."""
        self.total = loss.detach() if self.total is None else self.total + loss.detach()
        return x if self.factor is None else _Join.apply(x, loss, self.factor)  # type: ignore[no-any-return]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: Tensor) -> Tensor:
        ctx.factor, ctx.dtype = factor, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.factor.to(ctx.dtype).reshape(()), None


class StagedGPT(GPT):
    """The parts of a GPT that one rank runs, under the names that they have in the whole model.

    Where embeddings are tied, a rank with the last stage and without the first has a copy of the table as `embedding`,
    to which its head is tied. `reset_parameters` draws what the whole model would have at the same places.
    """

    def __init__(self, whole: GPT, spans: Sequence[Span]) -> None:
        nn.Module.__init__(self)
        self.config, self.activation_checkpointing = whole.config, whole.activation_checkpointing
        self.spans = tuple(spans)
        has_first, has_last = (any(getattr(span, end) for span in spans) for end in ("is_first", "is_last"))
        has_table = has_first or (has_last and whole.config.tied_embeddings)
        self.embedding = whole.embedding if has_table else None  # type: ignore[assignment]
        self.positions = whole.positions if has_first else None
        self.rope = whole.rope
        self.blocks = nn.ModuleList()
        for span in spans:
            for name in span.names:
                self.blocks.add_module(name, whole.blocks.get_submodule(name))
        self.norm = whole.norm if has_last else None  # type: ignore[assignment]
        self.lm_head = whole.lm_head if has_last else None  # type: ignore[assignment]
        self.train(whole.training)

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The embedding table, where the head of the pipeline is tied to it; None on stages without it."""
        table: nn.Embedding | None = self.embedding
        return table.weight if self.config.tied_embeddings and table is not None else None  # type: ignore[return-value]

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        targets: Tensor | None = None,
        *,
        span: Span | None = None,
        tokens: int = 0,
        side: SideLoss | None = None,
    ) -> Tensor:
        """One stage: ids [B, T] or what the stage before gave -> what the next one reads, or the loss, 0-dim float32.

        tokens: T, also where x is a part of the sequence.
        """
        if span is None or side is None:
            raise NarrowgaugeError(BY_PIPELINE)
        if span.is_first:
            self._check_input(x, 0)
            x = self.embed(x)
        x, balances = self.run_blocks(x, 0, tokens, names=span.names)
        if balances and self.training:
            share = self.config.load_balancing / self.config.layers
            x = side.add(x, share * torch.stack(balances).sum())
        if not span.is_last:
            return x
        assert targets is not None and self.norm is not None and self.lm_head is not None
        return self.loss(self.lm_head(self.norm(x)), targets)

    def generate(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Refused: no rank has all layers."""
        raise NarrowgaugeError(
            "this model is one rank's part of a pipeline and cannot generate: save it, and load the whole model in one "
            "process"
        )

    def _tie(self) -> None:
        if self.embedding is not None and self.lm_head is not None:
            super()._tie()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """As GPT's, of which this rank keeps its parts: the others are drawn and thrown away, one after the other."""
        mine = dict(self.named_modules())
        device = generator.device if generator is not None else next(self.parameters()).device
        for name, module in GPT(self.config, device="meta").named_modules():
            if name in mine:
                self._reset(name, mine[name], generator)
            elif self._is_drawn(name, module):
                torch.empty(module.weight.shape, device=device).normal_(generator=generator)  # type: ignore[union-attr]


class StagedSequential(nn.Sequential):
    """The children of a Sequential that one rank runs, under their names.

    loss: loss(output of the last part, targets) -> 0-dim mean over the micro-batch.
    """

    loss: Loss

    def __init__(self, whole: nn.Sequential, spans: Sequence[Span], loss: Loss) -> None:
        super().__init__()
        self.spans = tuple(spans)
        for span in spans:
            for name in span.names:
                self.add_module(name, whole.get_submodule(name))
        self.__dict__["loss"] = loss  # no part of the model, even where it is a module
        self.train(whole.training)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        targets: Tensor | None = None,
        *,
        span: Span | None = None,
        tokens: int = 0,
        side: SideLoss | None = None,
    ) -> Tensor:
        """One stage: the model's input or what the stage before gave -> what the next one reads, or the loss."""
        if span is None:
            raise NarrowgaugeError(BY_PIPELINE)
        for name in span.names:
            x = self.get_submodule(name)(x)
        return self.loss(x, targets).float() if span.is_last else x  # type: ignore[arg-type]


def gpt_costs(model: GPT) -> list[float]:
    """Multiplications of each block for one token, on average over the context; the ends have embedding and head."""
    config = model.config
    costs: list[float] = []
    for block in model.blocks:
        weights = sum(
            m.weight.numel() * (config.experts_per_token / config.experts if isinstance(m, GroupedLinear) else 1.0)
            for m in block.modules()
            if isinstance(m, (nn.Linear, GroupedLinear))
        )
        routers = sum(m.router.weight.numel() for m in block.modules() if isinstance(m, MixtureOfExperts))
        costs.append(weights + routers + config.width * config.context)  # two products over half the context
    costs[0] += config.width
    costs[-1] += config.vocab_size * config.width
    return costs


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """Runs of neighbours, at least one each, whose largest sum of costs is the smallest; then the most even.

    Raises ConversionError where there are fewer costs than stages.
    """
    if len(costs) < stages:
        raise ConversionError(
            f"expected at least one block for each of {stages} pipeline stages, found {len(costs)} blocks: use fewer "
            "stages (parallel.pipeline, or stages_per_rank), or a deeper model"
        )
    upto = list(itertools.accumulate(costs, initial=0.0))
    # best[k][n] for the first n costs in k runs: (largest sum, sum of squares, where the last run begins)
    best: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0)] + [(float("inf"), float("inf"), 0)] * len(costs)]
    for _ in range(stages):
        before, row = best[-1], [(float("inf"), float("inf"), 0)]
        for end in range(1, len(costs) + 1):
            sums = ((begin, upto[end] - upto[begin]) for begin in range(end))
            row.append(min((max(before[b][0], s), before[b][1] + s * s, b) for b, s in sums))
        best.append(row)
    runs: list[range] = []
    end = len(costs)
    for row in reversed(best[1:]):
        runs.append(range(row[end][2], end))
        end = row[end][2]
    return runs[::-1]


def check_whole(model: nn.Module) -> None:
    """Raise ConversionError for a model that cannot be split any more."""
    if isinstance(model, (StagedGPT, StagedSequential)):
        raise ConversionError("the model is split into stages already: give split_pipeline the whole one")
    if any(isinstance(module, RecipeLayer) for module in model.modules()):
        raise ConversionError("the model is prepared already: call split_pipeline first, then build the optimizer")
