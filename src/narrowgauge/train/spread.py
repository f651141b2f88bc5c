"""A model over the processes of a run, before its optimizer is made: stages, layers, shards, then replicas."""

from __future__ import annotations

from narrowgauge import distributed
from narrowgauge.models.gpt import GPT
from narrowgauge.train.ranks import Ranks
from narrowgauge.train.sections import ParallelConfig
from narrowgauge.train.step import Stages


def spread(model: GPT, config: ParallelConfig, ranks: Ranks) -> tuple[GPT, Stages | None]:
    """This process's part of the model, and what runs the stages where there are several.

    Raises ConversionError or ConfigError where the model does not divide so.
    """
    layout = ranks.layout
    if layout is None:
        return model, None
    pipeline = None
    if config.pipeline > 1:
        pipeline = distributed.split_pipeline(model, layout, schedule=config.schedule)
        model = pipeline.model  # type: ignore[assignment]
    if config.tensor > 1:
        distributed.parallelize_tensor(model, layout, sequence=config.sequence)
    if config.shard > 1:
        distributed.shard(model, layout, reshard_after_forward=config.reshard)
    elif config.data > 1:
        distributed.data_parallel(model, layout, partition=config.partition)
    return model, pipeline
