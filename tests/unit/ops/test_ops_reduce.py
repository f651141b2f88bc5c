"""The amax reduction of a group of one."""

import torch

from narrowgauge.ops.reduce import SINGLE_PROCESS, Reducer


def test_a_group_of_one_leaves_amax_as_it_is():
    reducer: Reducer = SINGLE_PROCESS
    amax = torch.tensor([1.0, float("nan"), 3.0])
    assert reducer.max_(amax) is amax
