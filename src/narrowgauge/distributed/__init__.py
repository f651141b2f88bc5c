"""Training over many processes on stock torch.distributed, with 8 bits on the wire."""

from __future__ import annotations

from narrowgauge.distributed.layout import Layout, layout, layout_of

__all__ = ["Layout", "layout", "layout_of"]
