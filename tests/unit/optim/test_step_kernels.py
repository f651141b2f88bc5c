"""The fused step against its slow twin, `update.update`: the same bits in every format that it takes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os

import numpy as np
import pytest
import torch
from step_items import ADAM, FIRST, GRADS, HYPERS, KEY, PARAMS, SECOND, SIGNED, UNSIGNED, check, make, same_bits, values

from narrowgauge.numerics.formats import E4M3FN, FP32
from narrowgauge.numerics.granularity import PER_COLUMN, Block
from narrowgauge.numerics.rounding import NEAREST_EVEN
from narrowgauge.optim import kernels, storage
from narrowgauge.optim.kernels import Plan, numba_rules
from narrowgauge.optim.rules import Adam, Hyper, Lion, Rule
from narrowgauge.optim.update import Item, update
from narrowgauge.recipes.cast_spec import CastSpec
from narrowgauge.tensors.quantized import quantize


@pytest.mark.parametrize(("param", "grad"), [*itertools.product(PARAMS, GRADS)])
def test_every_storage_of_parameter_and_gradient(param: str, grad: str) -> None:
    check(Rule.ADAM, [make(param, grad, (SIGNED, UNSIGNED), ADAM, (33, 256), 0)], steps=3)


@pytest.mark.parametrize(("first", "second"), [*itertools.product(FIRST, SECOND)], ids=str)
def test_every_storage_of_the_moments(first: CastSpec, second: CastSpec) -> None:
    check(Rule.ADAM, [make("residual", "e4m3", (first, second), ADAM, (5, 333), 1)], steps=3)


@pytest.mark.parametrize("first", FIRST, ids=str)
@pytest.mark.parametrize(("rule", "hyper", "moments"), HYPERS)
def test_every_rule(rule: Rule, hyper: Hyper, moments: int, first: CastSpec) -> None:
    for param in PARAMS:
        check(rule, [make(param, "e4m3", (first, UNSIGNED)[:moments], hyper, (12, 200), 2)], steps=2)


@pytest.mark.parametrize("width", [16, 100, 128, 1000])
@pytest.mark.parametrize("shape", [(5,), (127,), (1, 129), (3, 1), (7, 40), (2, 3000), (4, 3, 50), (2, 0)], ids=str)
def test_every_shape_and_width(shape: tuple[int, ...], width: int) -> None:
    specs = tuple(dataclasses.replace(spec, granularity=Block(1, width)) for spec in (SIGNED, UNSIGNED))
    for param in ("stochastic", "residual") if 0 not in shape else ():
        check(Rule.ADAM, [make(param, "e4m3", specs, ADAM, shape, 4)], steps=2)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_parameters_in_one_call(threads: int) -> None:
    """Of all kinds and sizes, so that threads meet within tiles, rows and parameters."""
    torch.set_num_threads(threads)  # the fixture of this folder sets it back
    shapes = ((300, 333), (4, 128), (1, 1), (129, 128), (77,), (200, 256))
    kinds = itertools.product(PARAMS, shapes)
    items = [
        make(param, GRADS[i % len(GRADS)], (FIRST[i % 3], SECOND[i // 2 % 3]), ADAM, shape, i)
        for i, (param, shape) in enumerate(kinds)
    ]
    check(Rule.ADAM, [item._replace(stream=i) for i, item in enumerate(items)], steps=2)


@pytest.mark.parametrize("step", [1, 10, 100, 100_000])
@pytest.mark.parametrize("beta2", [0.5, 0.95, 0.999, 1 - 1e-7, 1 - 2.0**-50])
def test_every_bias_correction(step: int, beta2: float) -> None:
    """With quotients by its reciprocal, and divided where it is too small for that."""
    hyper = Adam.at(step, 1e-3, (0.9, beta2), 1e-8, 0.1, decoupled=True)
    for param, first in (("residual", SIGNED), ("fp32", CastSpec(FP32))):
        check(Rule.ADAM, [make(param, "e4m3", (first, UNSIGNED), hyper, (64, 256), step)])


@pytest.mark.parametrize("param", PARAMS)
def test_values_at_the_ends_of_float32(param: str) -> None:
    """Gradients whose squares overflow, subnormal parameters and moments, tiles of zeros alone."""
    item = make(param, "fp32", (SIGNED, UNSIGNED), ADAM, (8, 512), 5)
    item.grad[0] *= 1e30
    item.grad[1] = torch.finfo(torch.float32).max
    item.grad[2] *= 2.0**-140
    item.grad[3] = 0.0
    item.param[2] *= 2.0**-126
    check(Rule.ADAM, [item], steps=3)


def test_any_bits_of_parameters() -> None:
    """Every finite bfloat16 value, with every residual of 251 in a row."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    hi = bits[bits.view(torch.bfloat16).isfinite()].view(torch.bfloat16).repeat(4)
    for dtype, most in ((torch.int8, 127), (torch.int16, 32767)):
        master = (torch.arange(len(hi)) % (2 * most + 1) - most).to(dtype)
        for rule, hyper in ((Rule.SGD, HYPERS[2][1]), (Rule.LION, Lion.at(1e-30, (0.9, 0.99), 0.0))):
            moments = (storage.encode(values((len(hi),), 1.0, 6), SIGNED),) if rule is Rule.LION else ()
            grad = values((len(hi),), 1.0, 7) * hi.float().abs()
            check(rule, [Item(hi.clone(), master.clone(), grad, moments, hyper, False, 0)])


def test_quotients_by_a_reciprocal_are_those_of_a_division() -> None:
    draw = torch.Generator().manual_seed(8)
    roots = torch.randint(0, 0x7F7FFFFF, (4000,), generator=draw).int().view(torch.float32).numpy()
    roots = np.sqrt(np.concatenate([roots, np.float32([0, 2.0**-149, 2.0**-126, 3.4028235e38])]))
    for b in np.float32(2.0) ** -np.random.default_rng(9).uniform(0, 16, 500).astype(np.float32):
        found = np.array([numba_rules.quotient(a, b, np.float32(1) / b) for a in roots[:: 1 + int(b * 7)]], np.float32)
        assert np.array_equal(found, roots[:: 1 + int(b * 7)] / b)
    assert numba_rules.quotient(np.float32(np.inf), np.float32(0.3), np.float32(1) / np.float32(0.3)) == np.inf


@pytest.mark.parametrize("x", [254.5, 0.5, 1.5, 2.5, 127.5])
def test_a_root_that_is_nearly_a_tie_is_rounded_as_the_twin_does(x: float) -> None:
    """Second moments whose scaled root is next to a half: the fast way cannot know, and must ask."""
    around = torch.tensor(x, dtype=torch.float32).square()
    steps = torch.arange(-40, 41)
    row = torch.full((128,), 255.0**2)
    row[1 : 1 + len(steps)] = (around.view(torch.int32) + steps).to(torch.int32).view(torch.float32)
    free = Adam(0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1e-8, 1.0, 0.0)  # v is the square of the gradient
    for scale in (1.0, 3.7e-9):
        grad = (row.double().sqrt() * scale).float().repeat(4, 1)
        item = make("residual", "fp32", (SIGNED, UNSIGNED), free, (4, 128), 10)._replace(grad=grad)
        check(Rule.ADAM, [item])


def test_a_plan_notices_what_changed_between_its_steps() -> None:
    """Gradients of another kind and with other strides, replaced state, other memory behind a parameter."""
    item = make("residual", "e4m3", (SIGNED, UNSIGNED), ADAM, (40, 256), 11)
    twin, plan = copy.deepcopy(item), Plan(Rule.ADAM)
    other = make("residual", "fp32", (SIGNED, UNSIGNED), ADAM, (40, 256), 12)
    changes = (
        {},
        {"grad": other.grad},
        {"grad": other.grad.T.contiguous().T},
        {"moments": other.moments},
        {"moments": tuple(storage.encode(storage.decode(m, item.param.shape), CastSpec(FP32)) for m in item.moments)},
        {"master": None, "stochastic": True},
        {"stream": 8},
    )
    for change in changes:
        item, twin = item._replace(**change), twin._replace(**copy.deepcopy(change))
        assert plan.run([item], KEY) == []
        update(Rule.ADAM, twin, KEY)
        assert same_bits(item.param, twin.param)
        assert all(map(same_bits, item.moments, twin.moments))
    item.param.data = item.param.data.clone()
    assert plan.run([item], KEY) == []
    update(Rule.ADAM, twin, KEY)
    assert same_bits(item.param, twin.param)


def test_a_plan_does_not_step_beyond_a_parameter_that_shrank_in_place() -> None:
    item = make("fp32", "fp32", (SIGNED, UNSIGNED), ADAM, (8, 128), 18)
    plan = Plan(Rule.ADAM)
    assert plan.run([item]) == []
    before = item.param.detach().clone()
    item.param.data = item.param.data[:4]  # the same memory, and the moments of the whole
    shrunk = item._replace(grad=item.grad[:4].clone())
    assert plan.run([shrunk]) == [shrunk]
    assert torch.equal(item.param, before[:4])
    with pytest.raises(RuntimeError, match="shape"):
        update(Rule.ADAM, shrunk, KEY)


def test_a_plan_returns_what_the_kernels_do_not_take() -> None:
    taken = make("fp32", "fp32", (SIGNED, UNSIGNED), ADAM, (8, 128), 13)
    half = taken._replace(param=taken.param.half())
    double = taken._replace(param=taken.param.double())
    strided = taken._replace(param=taken.param.T.contiguous().T)
    column = taken._replace(moments=(quantize(taken.grad, CastSpec(E4M3FN, PER_COLUMN)), taken.moments[1]))
    plain = taken._replace(
        moments=(taken.moments[0], quantize(taken.grad.abs(), dataclasses.replace(UNSIGNED, rounding=NEAREST_EVEN)))
    )
    others = [half, double, strided, column, plain]
    before = copy.deepcopy(others)
    assert [kernels.takes(Rule.ADAM, item) for item in (taken, *others)] == [True] + [False] * len(others)
    found = Plan(Rule.ADAM).run([half, taken._replace(param=taken.param.clone()), double, strided, column, plain], None)
    assert [id(item) for item in found] == [id(item) for item in others]
    assert all(same_bits(a.param.float(), b.param.float()) for a, b in zip(others, before, strict=True))
    assert kernels.step(Rule.ADAM, [], None) == []


def test_autograd_sees_what_a_step_writes() -> None:
    item = make("residual", "fp32", (SIGNED, UNSIGNED), ADAM, (8, 128), 14)
    parts = (item.param, item.master, item.moments[0].codes, item.moments[1].dequant_scale)  # type: ignore[attr-defined]
    before = [part._version for part in parts]  # type: ignore[union-attr]
    Plan(Rule.ADAM).run([item])
    assert [part._version for part in parts] == [version + 1 for version in before]  # type: ignore[union-attr]


def test_zero_gradients_from_the_start_move_no_bit() -> None:  # case 41
    for param in PARAMS:
        item = make(param, "fp32", (SIGNED, UNSIGNED), ADAM._replace(decay=1.0), (8, 128), 15)
        zeros = torch.zeros(8, 128)
        moments = (storage.encode(zeros, SIGNED), storage.encode(zeros, UNSIGNED))
        item = item._replace(grad=zeros.clone(), moments=moments)
        before = copy.deepcopy(item)
        Plan(Rule.ADAM).run([item], KEY)
        assert same_bits(item.param, before.param) or param in ("fp32", "bf16", "stochastic")
        assert torch.equal(item.param, before.param)
        assert same_bits(item.master, before.master)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_steps_in_threads_of_its_own() -> None:
    torch.set_num_threads(2)
    item = make("residual", "e4m3", (SIGNED, UNSIGNED), ADAM, (1024, 256), 16)
    stepped = copy.deepcopy(item)
    Plan(Rule.ADAM).run([stepped])  # by a thread that the child does not have
    for part in (item.param, item.master):
        part.share_memory_()
    child = os.fork()
    if child == 0:
        Plan(Rule.ADAM).run([item])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert same_bits(item.param, stepped.param) and same_bits(item.master, stepped.master)
