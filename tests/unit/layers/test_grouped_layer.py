"""Converted layers of many experts: conversion, state of each expert, what is kept through copies and checkpoints."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from states import assert_same_state, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.errors import ConversionError, NarrowgaugeError
from narrowgauge.layers import delayed
from narrowgauge.layers.grouped import GroupedLinear
from narrowgauge.layers.statistics import collect
from narrowgauge.ops import experts
from narrowgauge.tensors.quantized import QuantizedTensor

COUNTS = [5, 0, 33, 2]
RECIPES = ["bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8"]


class Experts(nn.Module):
    """Four experts of two layers each."""

    def __init__(self, bias: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = experts.GroupedLinear(4, 32, 48, bias=bias)
        self.down = experts.GroupedLinear(4, 48, 32, bias=bias)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x, counts)), counts)


def rows(counts: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(counts), 32, generator=generator), torch.tensor(counts)


def prepared(recipe: str | ng.Recipe, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = Experts() if model is None else model
    return ng.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, autocast=False, **options)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, counts: list[int], seed: int = 1) -> Tensor:
    x, split = rows(counts, seed)
    y = model(x, split)
    y.square().sum().backward()
    optimizer.step()
    return y.detach()


@pytest.mark.parametrize("recipe", RECIPES)
def test_conversion_keeps_every_object_and_goes_back(recipe):
    model = Experts(bias=True)
    before = {name: id(p) for name, p in model.named_parameters()}
    values = state_of(model)
    ng.convert(model, recipe)
    assert type(model.up) is GroupedLinear and {name: id(p) for name, p in model.named_parameters()} == before
    ng.convert(model, "fp32")
    assert type(model.up) is experts.GroupedLinear
    assert_same_state(state_of(model), values)
    x, counts = rows(COUNTS)
    assert torch.equal(model(x, counts), Experts(bias=True)(x, counts))


def test_the_report_says_experts_and_why_a_layer_is_kept():
    model = nn.ModuleDict({"first": Experts(), "narrow": experts.GroupedLinear(4, 8, 32)})
    report = ng.convert(model, ng.recipe("fp8_current", exclude=("*down",)))
    assert [(row.name, row.module, row.status) for row in report] == [
        ("first.up", "GroupedLinear", "converted"),
        ("first.down", "GroupedLinear", "kept"),
        ("narrow", "GroupedLinear", "kept"),
    ]
    assert "4 experts, a product for each expert; E4M3FN x E4M3FN, grad_output E5M2" in report["first.up"].reason
    assert "matches exclude glob '*down'" in report["first.down"].reason
    assert "8 inputs: below min_size=16" in report["narrow"].reason


def test_subclasses_and_parametrized_layers_are_skipped_with_the_reason():
    class Own(experts.GroupedLinear):
        pass

    model = nn.ModuleDict({"own": Own(2, 16, 16), "spectral": experts.GroupedLinear(2, 16, 16)})
    nn.utils.parametrizations.orthogonal(model["spectral"])
    with pytest.warns(UserWarning, match="none of this model's is quantized"):
        report = ng.convert(model, "fp8_current")
    assert report["own"].status == report["spectral"].status == "skipped"
    assert "Own is a subclass of GroupedLinear" in report["own"].reason
    assert "parametrized (weight)" in report["spectral"].reason


@pytest.mark.parametrize("recipe", RECIPES)
def test_unused_experts_keep_state_and_get_zeros(recipe):  # case 96
    model, optimizer = prepared(recipe)
    one_step(model, optimizer, [10, 10, 10, 10])
    before = state_of(model)
    optimizer.zero_grad()
    one_step(model, optimizer, [40, 0, 0, 0])
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad[0].any() and not p.grad[1:].any(), name
    for name, value in state_of(model).items():
        assert torch.equal(value[1:], before[name][1:]), name
        assert not torch.equal(value[0], before[name][0]) or name.endswith(("pending", "scale")), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_used_expert_equals_a_dense_run(recipe):  # case 96
    model, optimizer = prepared(recipe)
    dense = nn.Sequential(nn.Linear(32, 48, bias=False), nn.GELU(), nn.Linear(48, 32, bias=False))
    with torch.no_grad():
        dense[0].weight.copy_(model.up.weight[2])
        dense[2].weight.copy_(model.down.weight[2])
    dense, dense_optimizer = prepared(recipe, dense)
    for step in range(3):
        y = one_step(model, optimizer, [0, 0, 20, 0], seed=step)
        x, _ = rows([20], seed=step)
        expected = dense(x)
        expected.square().sum().backward()
        dense_optimizer.step()
        assert torch.equal(y, expected)
        optimizer.zero_grad()
        dense_optimizer.zero_grad()
    theirs = state_of(dense)
    for name, value in state_of(model).items():
        module, _, kind = name.partition(".")
        assert torch.equal(value[2], theirs[f"{'0' if module == 'up' else '2'}.{kind}"]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_tokens_at_all(recipe):  # case 96
    model, optimizer = prepared(recipe, Experts(bias=True))
    one_step(model, optimizer, COUNTS)
    before = state_of(model)
    optimizer.zero_grad()
    x = torch.randn(0, 32, requires_grad=True)
    y = model(x, torch.tensor([0, 0, 0, 0]))
    assert y.shape == (0, 32)
    y.sum().backward()
    optimizer.step()
    assert x.grad is not None and x.grad.shape == (0, 32)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert_same_state(state_of(model), before)


def test_without_an_optimizer_each_expert_rolls_after_its_own_backward():
    model = Experts()
    ng.prepare(model, None, "fp8_delayed", autocast=False)
    state = model.up._buffers
    for step, counts in enumerate([[20, 20, 0, 0], [0, 40, 0, 0], [0, 40, 0, 0]]):
        model(*rows(counts, seed=step)).square().sum().backward()
    # expert 1: two rolls finished, the third step is live; expert 0: its one step was rolled once
    assert state["amax_rolls"].tolist() == [1, 2, 0, 0]
    assert state["amax_pending"].tolist() == [False, True, False, False]
    history = state["input_amax_history"]
    assert history[0, -1] == rows([20, 20], seed=0)[0][:20].abs().max() and not history[0, 0]
    assert history[1, 0] == rows([40], seed=2)[0].abs().max() and not history[2:].any()


def test_a_skipped_step_clears_every_expert_and_rolls_none():
    model, optimizer = prepared("fp8_delayed")
    one_step(model, optimizer, COUNTS)
    before = state_of(model)
    optimizer.zero_grad()
    x, counts = rows(COUNTS, seed=2)
    (model(x, counts).sum() * torch.inf).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_same_state(state_of(model), before)


def test_ranks_take_the_maximum_of_each_expert_and_of_whether_it_ran():
    class Other:
        """A second rank, where expert 3 ran with an amax of 64 in every role, and no other did."""

        def max_(self, amax: Tensor) -> Tensor:
            *roles, ran = amax.split(4)
            other = [torch.tensor([0.0, 0.0, 0.0, 64.0]), torch.tensor([0.0, 0.0, 0.0, 1.0])]
            return torch.cat([*(role.maximum(other[0]) for role in roles), ran.maximum(other[1])])

    model = Experts()
    ng.convert(model, "fp8_delayed")
    x, counts = rows([40, 0, 0, 0])
    model(x, counts).sum().backward()
    delayed.roll([model.up], Other())
    buffers = model.up._buffers
    assert buffers["amax_rolls"].tolist() == [1, 0, 0, 1]
    assert buffers["input_amax_history"][:, -1].tolist() == [x.abs().max().item(), 0.0, 0.0, 64.0]
    assert buffers["input_quant_scale"].tolist()[1:] == [1.0, 1.0, 448.0 / 64.0]


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8"])
def test_a_checkpoint_continues_in_every_bit(recipe, tmp_path):
    model, optimizer = prepared(recipe)
    one_step(model, optimizer, COUNTS)
    optimizer.zero_grad()
    ng.save(tmp_path / "saved", model, optimizer)
    other, other_optimizer = prepared(recipe, Experts(seed=9))
    ng.load(tmp_path / "saved", other, other_optimizer)
    assert_same_state(state_of(other), state_of(model))
    assert torch.equal(one_step(model, optimizer, COUNTS, 3), one_step(other, other_optimizer, COUNTS, 3))
    assert_same_state(state_of(other), state_of(model))


def test_histories_of_another_length_keep_the_newest_entries():
    model, optimizer = prepared(ng.DelayedScaling(amax_history_len=6))
    for step in range(4):
        one_step(model, optimizer, COUNTS, step)
        optimizer.zero_grad()
    for length in (3, 9):
        other, _ = prepared(ng.DelayedScaling(amax_history_len=length), Experts(seed=9))
        other.load_state_dict(model.state_dict())
        old, new = (m.up._buffers["input_amax_history"] for m in (model, other))
        kept = min(length, 6) - 1
        assert new.shape == (4, length) and torch.equal(new[:, -kept:], old[:, -kept:]) and old[2, -2:].all()


def test_copies_are_equal_and_independent():
    model, optimizer = prepared("fp8_delayed")
    one_step(model, optimizer, COUNTS)
    twin = copy.deepcopy(model)
    before = state_of(twin)
    optimizer.zero_grad()
    one_step(model, optimizer, COUNTS, 2)
    assert_same_state(state_of(twin), before)
    assert not torch.equal(before["up.weight"], model.up.weight)


@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpointing_changes_no_bit(recipe):
    results = []
    for recomputing in (False, True):
        model, optimizer = prepared(recipe, Experts(bias=True))
        x, counts = rows(COUNTS)
        x.requires_grad_()
        y = checkpoint(model, x, counts, use_reentrant=False) if recomputing else model(x, counts)
        y.square().sum().backward()
        optimizer.step()
        results.append({**state_of(model), "y": y.detach(), "x": x.grad})
    assert_same_state(*results)


def test_output_has_the_dtype_of_autocast_else_of_the_input():
    model, _ = prepared("fp8_current")
    x, counts = rows(COUNTS)
    assert model(x, counts).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x, counts).dtype is torch.bfloat16


def test_evaluation_moves_no_state_and_can_run_wide():
    model, optimizer = prepared(ng.recipe("fp8_delayed", evaluation="compute"))
    one_step(model, optimizer, COUNTS)
    before = state_of(model)
    x, counts = rows(COUNTS)
    plain = Experts()
    plain.load_state_dict(state_of(model), strict=False)
    with torch.no_grad():
        y, expected = model.eval()(x, counts), plain(x, counts)
    assert_same_state(state_of(model), before)
    assert 1e-4 < float((y - expected).norm() / expected.norm()) < 0.01  # bf16, and no fp8


@pytest.mark.parametrize("smooth", [(), ("*down",)])
def test_statistics_and_smoothing_reach_the_layer(smooth):
    model = Experts()
    ng.convert(model, ng.recipe("fp8_current", smooth=smooth))
    assert [layer.training_casts.smooth for layer in (model.up, model.down)] == [False, bool(smooth)]
    with collect(model) as statistics:
        x, counts = rows(COUNTS)
        model(x, counts).sum().backward()
    read = statistics.read()
    assert set(read) == {"up", "down"} and set(read["up"]) == {"input", "weight", "grad_output"}
    assert read["up"]["input"]["amax"] == x.abs().max()


def test_scaled_fp16_parameters_are_stored_once_for_all_experts():
    model, optimizer = prepared("fp16_pure", Experts())
    assert isinstance(model.up.weight.data, QuantizedTensor) and model.up.weight.data.codes.shape == (4, 48, 32)
    before = model.up.weight.dequantize().clone()
    one_step(model, optimizer, COUNTS)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.up.weight.dequantize(), strict=True)]
    assert changed == [True, False, True, True]


def test_the_ledger_counts_every_expert():
    model, optimizer = prepared("fp8_delayed")
    one_step(model, optimizer, COUNTS)
    ledger = ng.ledger(model, optimizer)
    assert ledger.parameters == 2 * 4 * 32 * 48


def test_meta_construction_then_reset_starts_fresh():
    with torch.device("meta"):
        model = Experts(bias=True)
    ng.convert(model, "fp8_delayed")
    model.to_empty(device="cpu")
    for layer in (model.up, model.down):
        layer.reset_parameters()
    assert not model.up._buffers["input_amax_history"].any()
    assert (model.up._buffers["weight_quant_scale"] == 1).all() and model.up.weight.std() > 0
    assert model(*rows(COUNTS)).isfinite().all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks, where a graph breaks
@pytest.mark.parametrize("recipe", ["fp32", "fp8_delayed", "mxfp8"])
def test_compiled_training_is_eager_training_and_compiles_once_for_all_splits(recipe):
    states, graphs = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, optimizer = prepared(recipe)
        seen: list[Any] = []

        def backend(graph: Any, inputs: Any, seen: list[Any] = seen) -> Any:
            seen.append(graph)
            return graph.forward

        step = torch.compile(model, backend=backend) if compiled else model
        for number, counts in enumerate([COUNTS, [10, 10, 10, 10], [40, 0, 0, 0], [0, 0, 1, 39], [37, 1, 1, 1]]):
            one_step(step, optimizer, counts, number)
            optimizer.zero_grad()
            graphs.append(len(seen))
        states.append(state_of(model))
    assert_same_state(*states)
    # the activation between the layers, and the state of each layer: fewer graphs than splits, and none for the last
    assert graphs[:5] == [0] * 5 and 0 < graphs[-1] == graphs[-4] <= 5


def test_what_does_not_fit_is_refused():
    model, _ = prepared("fp8_current")
    with pytest.raises(ConversionError, match=r"GroupedLinear\(experts=4, in_features=32.*input \[..., 31\]"):
        model.up(torch.randn(3, 31), torch.tensor([3, 0, 0, 0]))
    with pytest.raises(ConversionError, match=r"does not fit the weight \[4, 48, 32\]"):
        model.up(torch.randn(1, 3, 32), torch.tensor([3, 0, 0, 0]))
    with pytest.raises(NarrowgaugeError, match="add up to 4 tokens, and 3 are given"):
        model.up(torch.randn(3, 32), torch.tensor([4, 0, 0, 0]))


def _train_rank(rank: int, folder: str, recipe: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{recipe}", rank=rank, world_size=2)
    model, optimizer = prepared(recipe)
    parallel = nn.parallel.DistributedDataParallel(model)
    for counts in ([[10, 0, 0, 0], [0, 0, 0, 0]], [[0, 5, 0, 0], [4, 0, 0, 0]]):
        x, split = rows(counts[rank], seed=rank)
        parallel(x, split).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save([p.detach() for p in model.parameters()], os.path.join(folder, f"{recipe}-{rank}.pt"))
    torch.distributed.destroy_process_group()


@pytest.mark.multiproc
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block"])
def test_ranks_with_and_without_tokens_stay_together(recipe, tmp_path):  # case 96
    context = torch.multiprocessing.get_context("spawn")
    workers = [context.Process(target=_train_rank, args=(rank, str(tmp_path), recipe)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
        if worker.is_alive():
            worker.kill()
            pytest.fail("a rank waits for the other")
        assert worker.exitcode == 0
    first, second = (torch.load(tmp_path / f"{recipe}-{rank}.pt", weights_only=True) for rank in range(2))
    start = list(Experts().parameters())
    for a, b, old in zip(first, second, start, strict=True):
        assert torch.equal(a, b)
        assert [not torch.equal(x, y) for x, y in zip(a, old, strict=True)] == [True, True, False, False]
