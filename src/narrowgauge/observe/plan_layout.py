"""How a layout divides a GPT, as shapes: what one rank has of it, by the plans that the distributed code goes by."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from narrowgauge.distributed import tensor_plan
from narrowgauge.distributed.parallel_layers import Column, Row
from narrowgauge.distributed.sections import Sections
from narrowgauge.distributed.stages import gpt_costs, partition
from narrowgauge.errors import ConfigError, ConversionError
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.observe.plan_state import Layer, Shape, layers_of, shapes_of

MOST_RANKS = 1 << 24  # beyond any machine: a number that was mistyped
MOST_BALANCED = 256  # blocks
_DIMS: dict[str, Mapping[str, int]] = {
    tensor_plan.COLUMN: Column.dims, tensor_plan.ROW: Row.dims, tensor_plan.EMBEDDING: {"weight": 0},
}  # fmt: skip
BLOCK = "blocks.0."


@dataclass(frozen=True)
class Spread:
    """Ranks of each kind, as `narrowgauge.distributed.layout` and `train`'s `--parallel.` have them.

    reshard: with shard: gathered parameters are freed after forward. Tensor-parallel ranks part sequences, too.
    Raises ConfigError for sizes that are no whole numbers of at least 1.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    reshard: bool = True

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            count("parallel." + name, getattr(self, name), MOST_RANKS)

    @property
    def ranks(self) -> int:
        """Processes of it all."""
        return self.data * self.shard * self.tensor * self.pipeline

    @property
    def readers(self) -> int:
        """Processes that read sequences of their own."""
        return self.data * self.shard

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


DIMENSIONS = tuple(each.name for each in fields(Spread) if each.name != "reshard")


def count(name: str, value: object, most: int = 1 << 40) -> int:
    """`value`, where it is a whole number from 1 to `most`; else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name}={value!r}: expected a whole number from 1 to {most:,}")
    return value


@dataclass(frozen=True)
class Outline:
    """The parameters and layers of a model of equal blocks.

    block: of each block, with names as in the first. ends: of all others. first, last: those of them that the first
    and the last stage of a pipeline have. buffers: bytes of buffers, on every rank.
    """

    config: GPTConfig
    block: tuple[Shape, ...]
    ends: tuple[Shape, ...]
    layers: tuple[Layer, ...]
    buffers: int

    @property
    def all_layers(self) -> list[Layer]:
        """The linear layers of the whole model, in order."""
        inside = [each for each in self.layers if each.name.startswith(BLOCK)]
        blocks = [
            replace(each, name=f"blocks.{at}.{each.name.removeprefix(BLOCK)}")
            for at in range(self.config.layers)
            for each in inside
        ]
        return blocks + [each for each in self.layers if not each.name.startswith(BLOCK)]

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.config.layers * sum(p.numel for p in self.block) + sum(p.numel for p in self.ends)

    def first(self) -> list[Shape]:
        """What the first stage has beside blocks."""
        return [p for p in self.ends if p.name.startswith(("embedding.", "positions."))]

    def last(self) -> list[Shape]:
        """What the last stage has beside blocks: where the head is tied to it, the table, too."""
        of_head = ("norm.", "lm_head.", "embedding.") if self.config.tied_embeddings else ("norm.", "lm_head.")
        return [p for p in self.ends if p.name.startswith(of_head)]


@functools.lru_cache(maxsize=256)
def outline(config: GPTConfig, tensor: int = 1) -> Outline:
    """The first of `tensor` ranks' part of a GPT. Raises ConfigError where heads or features do not divide."""
    model = GPT(config.replace(layers=1), device="meta")
    shapes = shapes_of(model)
    if tensor > 1:
        shapes = _parted(model, shapes, tensor)
    block = tuple(each for each in shapes if each.name.startswith(BLOCK))
    ends = tuple(each for each in shapes if not each.name.startswith(BLOCK))
    buffers = sum(b.nbytes for b in model.buffers())
    return Outline(config, block, ends, tuple(layers_of(model)), buffers)


def _parted(model: GPT, shapes: list[Shape], ranks: int) -> list[Shape]:
    try:
        places = tensor_plan.plan_of(model, None, ranks)
    except ConversionError as error:
        raise ConfigError(f"parallel.tensor={ranks}: {error}") from None
    modules = dict(model.named_modules())
    found: list[Shape] = []
    for shape in shapes:
        name, _, key = shape.name.rpartition(".")
        place = places.get(name)
        dims = _DIMS.get(place.kind, {}) if place else {}
        if place is None or key not in dims:
            found.append(shape)
            continue
        dim = dims[key]
        sizes = place.sizes or (modules[name].get_parameter(key).shape[dim],)
        if name not in ("embedding", "lm_head") and any(size % ranks for size in sizes):
            raise ConfigError(
                f"parallel.tensor={ranks}: '{name}' has {max(sizes)} features, which do not divide: choose a tensor "
                "size that divides them"
            )
        held = list(shape.whole)
        held[dim] = sum(end - begin for begin, end in Sections(dim, tuple(sizes), ranks).ranges(0))
        found.append(replace(shape, held=tuple(held)))
    return found


@functools.lru_cache(maxsize=1024)
def blocks_of_stages(config: GPTConfig, stages: int) -> tuple[int, ...]:
    """How many blocks each stage of a pipeline has. Raises ConfigError for more stages than blocks."""
    if stages > config.layers:
        raise ConfigError(
            f"parallel.pipeline={stages}: the model has {config.layers} blocks, and a stage needs one at least: use at "
            f"most {config.layers} stages"
        )
    if stages == 1:
        return (config.layers,)
    if config.layers > MOST_BALANCED:  # balancing takes its square
        return tuple(config.layers // stages + (at < config.layers % stages) for at in range(stages))
    one, _ = costs = gpt_costs(GPT(config.replace(layers=2), device="meta"))
    block = one - config.width
    whole = [block] * config.layers
    whole[0] += config.width
    whole[-1] += costs[1] - block
    return tuple(len(run) for run in partition(whole, stages))


def counted(shapes: list[Shape], times: int = 1) -> Counter[Shape]:
    """How often each shape is there, whatever its name."""
    found: Counter[Shape] = Counter()
    for each in shapes:
        found[replace(each, name="")] += times
    return found
