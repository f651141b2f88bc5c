"""freeze: weights in FP8 that are not trained, and gradients that flow through them."""

from __future__ import annotations

import copy

import pytest
import torch
from frozen import WEIGHTS, bits_of, stored_bytes
from states import assert_same_state, state_of
from stored import Tied, loss_of, prepared, quantized_names
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.layers.freeze import frozen_spec
from narrowgauge.numerics.formats import E4M3FN, E5M2, INT8
from narrowgauge.tensors.quantized import QuantizedTensor

CastSpec = ng.CastSpec
RECIPES = ["bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "fp8_lm_o2", "narrow8"]


class Adapted(nn.Module):
    """Three layers, each with an adapter of rank 4 beside it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(width, 4, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(4, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = F.gelu(base(x) + up(down(x)))
        return x


def values_in_float32(model: nn.Module) -> nn.Module:
    """A plain model with the values that the frozen one multiplies."""
    plain = Adapted()
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(model.get_parameter(name))
    return plain


# adapters


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_reach_the_adapters_of_earlier_layers(recipe: str) -> None:  # case 60
    model = Adapted()
    ng.freeze(model.base, recipe)
    plain = values_in_float32(model)
    x, target = torch.randn(2, 32, 64)
    for each in (model, plain):
        F.mse_loss(each(x), target).backward()
    for at in range(3):
        for ours, theirs in ((model.down[at], plain.down[at]), (model.up[at], plain.up[at])):
            a, b = ours.weight.grad.flatten(), theirs.weight.grad.flatten()
            assert F.cosine_similarity(a, b, dim=0) >= 0.99
            assert abs(a.norm() / b.norm() - 1) <= 0.05
    assert all(p.grad is None for p in model.base.parameters())


@pytest.mark.parametrize("how", ["torch", "bf16", "narrow8", "fp8_lm_o3", "fp8_delayed"])
def test_five_steps_leave_the_base_as_it_was(how: str) -> None:  # cases 56, 60
    model = Adapted()
    ng.freeze(model.base, "fp8_current")
    before, base = bits_of(model.base), state_of(model.base)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if how != "torch":
        model, optimizer = ng.prepare(model, optimizer, how)
        adapters = [p for p in model.parameters() if p.requires_grad]
    x, target = torch.randn(2, 32, 64)
    losses = []
    for _ in range(5):
        loss = F.mse_loss(model(x).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = bits_of(model.base)
    assert len(before) == 9 and all(torch.equal(before[name], after[name]) for name in before)
    assert_same_state(base, {k: v for k, v in state_of(model.base).items() if k in base})
    frozen = list(model.base.parameters())
    assert not any(p.requires_grad or p.grad is not None or optimizer.state.get(p) for p in frozen)
    assert all(optimizer.state[p] for p in adapters) and len(adapters) == 6


def test_a_step_beside_a_frozen_base_saves_no_wide_copy_of_its_weights() -> None:
    for recipe in ("bf16", "fp8_current", "fp8_block"):
        model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
        ng.freeze(model, recipe)
        owned = {p.codes.data_ptr() for p in model.parameters() if isinstance(p, QuantizedTensor)}
        saved: list[torch.Tensor] = []

        def keep(x: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(torch.randn(2, 64, requires_grad=True))
        for x in saved:
            x = x.codes if isinstance(x, QuantizedTensor) else x
            assert x.numel() < 64 * 512 or x.data_ptr() in owned


# what is stored


@pytest.mark.parametrize("embeddings", [True, False])
def test_weights_take_one_byte_and_all_else_stays(embeddings: bool) -> None:
    model = Tied()
    loss_of(model).backward()
    plain = dict(model.named_parameters())
    model.block.weight.tag = "kept"  # type: ignore[attr-defined]
    values = {name: p.detach().clone() for name, p in plain.items()}
    assert ng.freeze(model, ng.recipe("narrow8", embeddings=embeddings)) is model
    names = WEIGHTS if embeddings else WEIGHTS[1:]
    assert quantized_names(model) == names and model.lm_head.weight is model.embedding.weight
    expected = 0
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter) and not p.requires_grad and p.grad is None
        if isinstance(p, QuantizedTensor):
            assert p.spec == CastSpec(E4M3FN) and p.codes.untyped_storage().nbytes() == p.numel()
            assert torch.equal(p.detach().dequantize(), ng.quantize(values[name], p.spec).dequantize())
            expected += p.numel() + 8  # a scale and an amax
        else:
            assert p is plain[name] and torch.equal(p, values[name])
            expected += p.numel() * 4
    assert model.block.weight.tag == "kept"  # type: ignore[attr-defined]
    assert stored_bytes(model) == expected


@pytest.mark.parametrize(
    ("recipe", "spec"),
    [
        ("bf16", CastSpec(E4M3FN)),
        ("fp8_current", CastSpec(E4M3FN)),
        ("fp8_delayed", CastSpec(E4M3FN)),
        ("fp8_lm_o3", CastSpec(E4M3FN, scale=ng.TENSOR_POW2)),
        ("fp8_block", CastSpec(E4M3FN, ng.Block(128, 128), ng.CURRENT_POW2)),
        ("mxfp8", CastSpec(E4M3FN, ng.Block(1, 32), ng.E8M0_UP)),
        ("nvfp4", CastSpec(E4M3FN)),
    ],
)
def test_weights_are_cast_as_the_products_take_them(recipe: str, spec: CastSpec) -> None:
    assert frozen_spec(ng.recipe(recipe)) == spec
    layer = nn.Linear(96, 160, bias=False)
    values = layer.weight.detach().clone()
    ng.freeze(layer, recipe)
    assert isinstance(layer.weight, QuantizedTensor) and layer.weight.spec == spec
    assert torch.equal(layer.weight.detach().dequantize(), ng.quantize(values, spec).dequantize())


def test_other_casts_of_weights_are_not_stored() -> None:
    for weight in (CastSpec(INT8), CastSpec(E4M3FN, scale=ng.NONE), None):
        assert frozen_spec(ng.recipe("fp8_current", weight=weight)) == CastSpec(E4M3FN)
    rounded = CastSpec(E5M2, rounding=ng.STOCHASTIC)
    assert frozen_spec(ng.recipe("fp8_current", weight=rounded)) == CastSpec(E5M2)


# without delayed scaling: a frozen weight has its own scale, whatever its history
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp8_delayed"])
def test_a_frozen_layer_gives_what_a_converted_one_gives(recipe: str) -> None:
    torch.manual_seed(0)
    chosen = ng.recipe(recipe, emulation="exact")
    converted = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    frozen = ng.freeze(copy.deepcopy(converted), chosen)
    if chosen.weight is None:  # products in the compute dtype of weights that are stored in FP8
        converted.load_state_dict(frozen.state_dict())
    ng.convert(converted, chosen)
    x = torch.randn(16, 64)
    assert torch.equal(frozen(x), converted(x))  # not one rounding more
    assert (frozen.training, frozen.eval().training) == (True, False)
    assert torch.equal(frozen(x), converted.eval()(x))


def test_a_frozen_layer_needs_no_history() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), 1e4 * torch.randn(16, 64)  # saturates by the scale that a history begins with
    by_history, by_amax = (
        ng.freeze(copy.deepcopy(layer), ng.recipe(name, emulation="exact")).eval()
        for name in ("fp8_delayed", "fp8_current")
    )
    with torch.no_grad():
        found, exact = by_history(x), layer(x)
        assert torch.equal(found, by_amax(x))
    assert 0.01 < (found - exact).norm() / exact.norm() < 0.06


def test_the_report_says_what_is_frozen() -> None:
    model = ng.freeze(Tied(), "narrow8")
    report = ng.report(model)
    assert report["block"].reason.endswith("weight stored as E4M3FN, frozen")
    assert report["embedding"].reason.endswith("weight stored as E4M3FN, frozen")
    assert "stored" not in report["norm"].reason
    values = 48 * 32 + 2 * 32 * 32
    note = f"frozen: 3 weights of {values:,} values in {values + 24:,} bytes (3 as E4M3FN); 4 stay float32"
    assert report.notes == (note,) and note in str(report)
    assert ng.report(ng.freeze(model, "narrow8")).notes == (note,)
    trained, _ = prepared("fp8_lm_o3")
    assert ng.report(trained)["block"].reason.endswith("weight stored as E4M3FN")


class Headed(nn.Module):
    """A table, two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(48, 64)
        self.up, self.down, self.lm_head = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 48, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.table(ids)
        return self.lm_head(x + self.down(F.gelu(self.up(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("recipe", "stored"),
    [
        ("fp8_current", 2),
        ("fp8_rowwise", 2),
        ("mxfp8", 2),
        ("narrow8", 2),
        ("fp8_delayed", 0),
        ("nvfp4", 0),
        ("bf16", 0),
    ],
)
def test_exact_freezing_changes_no_bit_of_what_is_computed(recipe: str, stored: int) -> None:  # case 106
    model, _ = ng.prepare(Headed(), None, recipe)
    ids = torch.arange(48)[None]
    with torch.no_grad():
        before = model(ids)
        frozen = ng.freeze(copy.deepcopy(model), recipe, exact=True)
        assert torch.equal(frozen(ids), before)
    names = {name for name, p in frozen.named_parameters() if isinstance(p.data, QuantizedTensor)}
    assert names == ({"up.weight", "down.weight"} if stored else set())
    assert not any(p.requires_grad for p in frozen.parameters())
    if stored:
        with torch.no_grad():  # all that can be stored in FP8: another table and another head
            assert not torch.equal(ng.freeze(copy.deepcopy(model), recipe)(ids), before)
