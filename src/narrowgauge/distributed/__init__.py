"""Training over many processes on stock torch.distributed, with 8 bits on the wire."""

from __future__ import annotations

from narrowgauge.distributed.layout import Layout, layout, layout_of
from narrowgauge.distributed.pipeline import Pipeline, pipeline_of, split_pipeline
from narrowgauge.distributed.replicas import data_parallel, share_of_batch
from narrowgauge.distributed.sharding import shard
from narrowgauge.distributed.tensor_parallel import parallelize_tensor

__all__ = [
    "Layout", "Pipeline", "data_parallel", "layout", "layout_of", "parallelize_tensor", "pipeline_of", "shard",
    "share_of_batch", "split_pipeline",
]  # fmt: skip
