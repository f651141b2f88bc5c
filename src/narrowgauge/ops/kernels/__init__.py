"""What a linear layer needs beside casts and products: column sums and transposed copies, fast on a CPU.

Numba is loaded on the first use by a tensor large enough.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MIN_NUMBA = 65536  # below this many values torch's own operations are as fast
_GRAIN = 32  # columns, whose sums fill whole cache lines: no two threads write to one


def column_sum(x: Tensor) -> Tensor:
    """The sum of every column of x [rows, columns], any floating dtype, in float32: [columns].

    One opaque operator, so that compiled code sums in the same order.
    """
    return torch.ops.narrowgauge.column_sum(x)


def transposed(x: Tensor) -> Tensor:
    """A contiguous copy of x.t(), for x [rows, columns] on a CPU."""
    if x.element_size() != 2 or x.numel() < MIN_NUMBA or x.shape[0] % 4 or x.shape[1] % 4:
        return x.t().contiguous()
    from narrowgauge.numerics.kernels.cpu_arrays import shared
    from narrowgauge.numerics.kernels.cpu_threads import in_threads
    from narrowgauge.ops.kernels import numba_layout

    out = x.new_empty(x.shape[1], x.shape[0])
    source, target = (shared(t.detach().contiguous(), np.uint64).reshape(len(t), -1) for t in (x, out))
    in_threads(lambda first, last: numba_layout.transpose(source, first, last, target), source.shape[1], x.numel())
    return out


def _column_sum_cpu(x: Tensor) -> Tensor:
    bits = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}.get(x.dtype)  # numpy has no bfloat16
    x = x.contiguous()  # torch's order of summation depends on the strides, and an expanded gradient must not differ
    if bits is None or x.numel() < MIN_NUMBA:
        return x.sum(0, dtype=torch.float32)
    from narrowgauge.numerics.kernels.cpu_threads import in_threads
    from narrowgauge.ops.kernels import numba_layout

    total = x.new_empty(x.shape[1], dtype=torch.float32)
    array, sums = x.detach().view(bits).numpy(), total.numpy()
    in_threads(
        lambda first, last: numba_layout.column_sum(array, first, last, sums), x.shape[1], x.numel() // 2, _GRAIN
    )
    return total


_library = torch.library.Library("narrowgauge", "FRAGMENT")
_library.define("column_sum(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("column_sum", lambda x: x.sum(0, dtype=torch.float32), "CompositeExplicitAutograd")
_library.impl("column_sum", _column_sum_cpu, "CPU")
torch.library.register_fake(
    "narrowgauge::column_sum", lambda x: x.new_empty(x.shape[1], dtype=torch.float32), lib=_library
)
