"""Bytes that autograd saves for backward, learnt from the real forward pass of two blocks, run without values.

Blocks are alike, so the second block's bytes are those of every further one. What is counted is what
`SavedActivations` counts in a real run: activations as they are saved, quantized where the recipe does so, and codes of
weights that wait for the gradients of inputs.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.distributed.simulation import without_values
from narrowgauge.errors import ConfigError
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.observe.ledger import SavedActivations
from narrowgauge.observe.plan_layers import LayerCast, casts_of, small_model
from narrowgauge.observe.plan_layout import outline
from narrowgauge.observe.plan_state import is_multiplied_as_stored, quantized, weight_codes
from narrowgauge.preparation import prepare
from narrowgauge.recipes.spec import Recipe

KEPT = "no layer"  # an include glob that matches none


@dataclass(frozen=True)
class Saved:
    """Bytes that one micro-batch saves, on one process with all features.

    first: what comes before the blocks, e.g. the embedding. block: of one. last: what comes after them. inside: of one
    block while it is recomputed, where it is checkpointed; else 0. stream: dtype between the blocks. own: where blocks
    differ, (block, inside) of each, and `block` is their mean.
    """

    first: int
    block: int
    last: int
    inside: int
    stream: torch.dtype
    own: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def nothing() -> Saved:
        """For a first look at what stays."""
        return Saved(0, 0, 0, 0, torch.float32)

    def of_block(self, at: int) -> tuple[int, int]:
        """(block, inside) of the block of this number."""
        return self.own[at] if self.own else (self.block, self.inside)

    def total(self, blocks: int) -> int:
        """What `SavedActivations` counts in the forward pass of a model of so many blocks."""
        return self.first + sum(self.of_block(at)[0] for at in range(blocks)) + self.last


def saved(config: GPTConfig, recipe: Recipe, batch: int, tokens: int, checkpointing: bool) -> Saved:
    """What a GPT saves for backward under a resolved recipe, for `batch` sequences of so many tokens.

    Layers that the recipe keeps at the ends (`first_last`) save what kept layers do: a mean over the blocks. Where
    layers have casts of their own, a block of each kind is run.

    Raises ConfigError for mixtures of experts, where it follows from which tokens visit which experts.
    """
    if config.experts:
        raise ConfigError(
            f"experts={config.experts}: what experts save follows from the tokens that visit them; expected a dense "
            "model"
        )
    if tokens > config.context:
        raise ConfigError(f"sequence_length={tokens}: the model's context is {config.context}; change either")
    if recipe.layers:
        return _measured_kinds(config, recipe, batch, tokens, checkpointing)
    plain = recipe.replace(first_last=(0, 0), schedule=())
    shape = config.replace(layers=2)
    found = _measured(shape, plain, batch, tokens, checkpointing)
    if recipe.first_last == (0, 0) or not recipe.quantizes_gemms:
        return found
    kept = _measured(shape, plain.replace(include=(KEPT,), exclude=Recipe().exclude), batch, tokens, checkpointing)
    return _mean(found, kept, _share_quantized(config, recipe))


def extrapolated(at: int, known: Mapping[int, Saved]) -> Saved:
    """What a member of a family saves, of three others: bytes are polynomials of degree 2 in the width.

    at, known: by a number that the width is a multiple of, such as the heads. Exact where tiles fill up the widths.
    """

    def value(name: str) -> int:
        found = Fraction(0)
        for x, member in known.items():
            others = [Fraction(at - y, x - y) for y in known if y != x]
            found += math.prod(others, start=Fraction(getattr(member, name)))
        return round(found)

    stream = next(iter(known.values())).stream
    return Saved(value("first"), value("block"), value("last"), value("inside"), stream)


def _share_quantized(config: GPTConfig, recipe: Recipe) -> float:
    """Of the layers that take part without `first_last`, how many still do."""
    layers = outline(config).all_layers
    chosen, all_chosen = (sum(quantized(layers, each).values()) for each in (recipe, recipe.replace(first_last=(0, 0))))
    return chosen / all_chosen if all_chosen else 0.0


def _mean(quantized_: Saved, kept: Saved, share: float) -> Saved:
    def mixed(name: str) -> int:
        return round(share * getattr(quantized_, name) + (1 - share) * getattr(kept, name))

    return Saved(mixed("first"), mixed("block"), mixed("last"), mixed("inside"), quantized_.stream)


@functools.lru_cache(maxsize=64)
def _measured_kinds(config: GPTConfig, recipe: Recipe, batch: int, tokens: int, checkpointing: bool) -> Saved:
    """Of a model whose blocks are not alike."""
    casts = casts_of(config, recipe)
    marks, stream = _run(*small_model(config, recipe, casts), batch, tokens, checkpointing)
    sizes = [end - begin for begin, end in itertools.pairwise(marks[1:-1])]
    first = marks[1] - sizes[casts.kind_of[0]]  # the first block may save what it shares with none
    if not checkpointing:
        # without values torch does not see that these codes are the parameter's
        sizes = [size - _stored_codes(kind) for size, kind in zip(sizes, casts.kinds, strict=True)]
    whole = _measured_kinds(config, recipe, batch, tokens, False) if checkpointing else None
    own = tuple((sizes[kind], 0 if whole is None else whole.of_block(at)[0]) for at, kind in enumerate(casts.kind_of))
    block, inside = (round(sum(each) / config.layers) for each in zip(*own, strict=True))
    return Saved(first, block, marks[-1] - marks[-2], inside, stream, own)


def _stored_codes(layers: Sequence[LayerCast]) -> int:
    """Bytes of codes of weights that are multiplied as they are stored."""
    chosen = [each for each in layers if each.is_quantized and is_multiplied_as_stored(each.recipe)]
    return sum(weight_codes(each.layer, each.recipe) for each in chosen)


@functools.lru_cache(maxsize=1024)
def _measured(config: GPTConfig, recipe: Recipe, batch: int, tokens: int, checkpointing: bool) -> Saved:
    """Of a model of two blocks."""
    marks, stream = _run(config, recipe, batch, tokens, checkpointing)
    first, block, last = marks[0], marks[2] - marks[1], marks[3] - marks[2]
    first += marks[1] - marks[0] - block  # the first block may save what it shares with none
    if not checkpointing:
        # without values torch does not see that these codes are the parameter's
        block -= _stored_codes(casts_of(config, recipe).kinds[0])
    inside = _measured(config, recipe, batch, tokens, False).block if checkpointing else 0
    return Saved(first, block, last, inside, stream)


def _run(
    config: GPTConfig, recipe: Recipe, batch: int, tokens: int, checkpointing: bool
) -> tuple[list[int], torch.dtype]:
    """Bytes saved before the first block, after it, after each other one and at the end; the dtype in between."""
    model = GPT(config, device="meta", activation_checkpointing=checkpointing)
    marks: list[int] = []
    dtypes: list[torch.dtype] = []
    with _prepared(model, recipe), SavedActivations(model) as counter:

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            marks.append(counter.bytes)
            dtypes.append(args[0].dtype)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            marks.append(counter.bytes)

        model.blocks[0].register_forward_pre_hook(before)
        for block in model.blocks:
            block.register_forward_hook(after)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        result = model(ids, ids)
        marks.append(counter.bytes)
        del result
    return marks, dtypes[0]


def saved_by(model: nn.Module, recipe: Recipe, run: Callable[[nn.Module], Tensor]) -> int:
    """Bytes that the forward pass of any model saves, run without values. The model is prepared, and of no use then.

    run: makes the inputs, calls the model and returns what backward begins with. Raises ConfigError for a model whose
    forward pass depends on values.
    """
    with _prepared(model, recipe), SavedActivations(model) as counter:
        try:
            result = run(model)
        except Exception as error:  # whatever a forward pass without values may raise
            raise ConfigError(
                f"{type(model).__name__} does not run without values ({type(error).__name__}: {error}): expected a "
                "forward pass whose shapes do not depend on numbers"
            ) from error
        size = counter.bytes
        del result
    return size


@contextmanager
def _prepared(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Inside, the model has no values and runs by the recipe."""
    with warnings.catch_warnings(), without_values(model):
        warnings.simplefilter("ignore")  # of what `prepare` says to people who train
        prepare(model, None, recipe)
        yield
