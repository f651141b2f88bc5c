"""Bytes that autograd saves for backward, learnt from the real forward pass of two blocks, run without values.

Blocks are alike, so the second block's bytes are those of every further one. What is counted is what
`SavedActivations` counts in a real run: activations as they are saved, quantized where the recipe does so, and codes of
weights that wait for the gradients of inputs.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from narrowgauge.observe.plan_state import is_multiplied_as_stored, layers_of, quantized, weight_codes
from narrowgauge.preparation import prepare
from narrowgauge.recipes.spec import Recipe

_SIZES = ("first", "block", "last", "inside", "weights")
KEPT = "no layer"  # an include glob that matches none


@dataclass(frozen=True)
class Saved:
    """Bytes that one micro-batch saves, on one process with all features.

    first: what comes before the blocks, e.g. the embedding. block: of one. last: what comes after them. inside: of one
    block while it is recomputed, where it is checkpointed; else 0. weights: codes of weights among `block`, or among
    `inside` where that is not 0, which do not follow the tokens. stream: dtype between the blocks.
    """

    first: int
    block: int
    last: int
    inside: int
    weights: int
    stream: torch.dtype

    @staticmethod
    def nothing() -> Saved:
        """For a first look at what stays."""
        return Saved(0, 0, 0, 0, 0, torch.float32)

    def total(self, blocks: int) -> int:
        """What `SavedActivations` counts in the forward pass of a model of so many blocks."""
        return self.first + blocks * self.block + self.last


def saved(config: GPTConfig, recipe: Recipe, batch: int, tokens: int, checkpointing: bool) -> Saved:
    """What a GPT saves for backward under a resolved recipe, for `batch` sequences of so many tokens.

    Layers that the recipe keeps at the ends (`first_last`) save what kept layers do: a mean over the blocks. Where
    layers have casts of their own, all blocks are run.

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
        return _measured_whole(config, recipe, batch, tokens, checkpointing)
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

    return Saved(**{name: value(name) for name in _SIZES}, stream=next(iter(known.values())).stream)


def _share_quantized(config: GPTConfig, recipe: Recipe) -> float:
    """Of the layers that take part without `first_last`, how many still do."""
    from narrowgauge.observe.plan_layout import outline  # which is about whole models

    layers = outline(config).all_layers
    chosen, all_chosen = (sum(quantized(layers, each).values()) for each in (recipe, recipe.replace(first_last=(0, 0))))
    return chosen / all_chosen if all_chosen else 0.0


def _mean(quantized_: Saved, kept: Saved, share: float) -> Saved:
    def mixed(name: str) -> int:
        return round(share * getattr(quantized_, name) + (1 - share) * getattr(kept, name))

    return Saved(**{name: mixed(name) for name in _SIZES}, stream=quantized_.stream)


def _measured_whole(config: GPTConfig, recipe: Recipe, batch: int, tokens: int, checkpointing: bool) -> Saved:
    """Of a model whose blocks are not alike: a block is their mean."""
    marks, stream = _run(config, recipe, batch, tokens, checkpointing)
    block = round((marks[-2] - marks[0]) / config.layers)
    last = marks[-1] - marks[0] - config.layers * block  # so that the total is exact
    layers = [each for each in layers_of(GPT(config, device="meta")) if each.name.startswith("blocks.")]
    chosen = quantized(layers, recipe)
    own = {each: recipe.for_layer(each.name) for each in layers if chosen[each.name]}
    weights = sum(0 if is_multiplied_as_stored(o) else weight_codes(each, o) for each, o in own.items())
    stored = sum(weight_codes(each, o) for each, o in own.items() if is_multiplied_as_stored(o))
    if not checkpointing:
        # without values torch does not see that these codes are the parameter's
        block -= round(stored / config.layers)
    inside = _measured_whole(config, recipe, batch, tokens, False).block if checkpointing else 0
    return Saved(marks[0], block, last, inside, round(weights / config.layers), stream)


@functools.lru_cache(maxsize=1024)
def _measured(config: GPTConfig, recipe: Recipe, batch: int, tokens: int, checkpointing: bool) -> Saved:
    """Of a model of two blocks."""
    marks, stream = _run(config, recipe, batch, tokens, checkpointing)
    first, block, last = marks[0], marks[2] - marks[1], marks[3] - marks[2]
    first += marks[1] - marks[0] - block  # the first block may save what it shares with none
    model = GPT(config.replace(layers=1), device="meta")
    layers = [each for each in layers_of(model) if each.name.startswith("blocks.")]
    chosen = quantized(layers, recipe)
    weights = sum(weight_codes(each, recipe) for each in layers if chosen[each.name])
    if is_multiplied_as_stored(recipe):
        # without values torch does not see that these codes are the parameter's
        block, weights = block - (0 if checkpointing else weights), 0
    inside = _measured(config, recipe, batch, tokens, False).block if checkpointing else 0
    return Saved(first, block, last, inside, weights, stream)


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
