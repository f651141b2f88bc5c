"""prepare: masters, storage of parameters, optimizers, schedulers, and what it refuses."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.layers.linear import Linear
from narrowgauge.recipes.spec import OPERAND_ROLES, CastSpec

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")
RECIPES = ng.recipe_names()
BF16, FP16, FP32 = ng.formats.BF16, ng.formats.FP16, ng.formats.FP32


class Tied(nn.Module):
    """An embedding, a block, and a head that is the embedding."""

    def __init__(self, vocabulary: int = 48, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.block = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.lm_head(self.norm(self.block(self.embedding(ids)) * scale))


IDS = torch.arange(32).reshape(2, 16)


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(IDS).float().flatten(0, 1), IDS.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, recipe: str | ng.Recipe) -> list[float]:
    scaler = ng.LossScaler(recipe)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        ng.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_the_loop_stays_unchanged_and_the_loss_falls(recipe: str, options: dict[str, bool]) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    groups = optimizer.param_groups
    prepared, optimizer = ng.prepare(model, optimizer, recipe)
    assert prepared is model and optimizer.param_groups is groups
    losses = train(model, optimizer, 20, recipe)
    assert losses[-1] < 0.7 * losses[0]
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("recipe", ["fp16", "fp8_current", "bf16", "fp32"])
@pytest.mark.parametrize("half", ["all", "one"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_become_float32_masters_and_are_told(recipe, half, dtype) -> None:  # case 23
    model = Tied()
    (model if half == "all" else model.block).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parameters = list(model.parameters())
    with pytest.warns(UserWarning, match="made float32 masters in place"):
        ng.prepare(model, optimizer, recipe)
    assert "float32 masters" in str(ng.report(model))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(p.dtype is torch.float32 for p in model.parameters())
    losses = train(model, optimizer, 20, recipe)
    assert losses[-1] < 0.7 * losses[0]


def test_a_frozen_half_base_with_adapters_trains(  # case 23
) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.base = nn.Linear(32, 32).half().requires_grad_(False)
            self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    model = Adapted()
    before = model.base.weight.detach().clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ng.prepare(model, optimizer, "fp16")
    scaler = ng.LossScaler("fp16")
    x = torch.randn(8, 32)
    losses = []
    for _ in range(20):
        loss = (model(x).float() - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.base.weight.dtype is torch.float16 and torch.equal(model.base.weight, before)


def test_moments_made_in_half_follow_their_parameter() -> None:
    model = nn.Linear(16, 16).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="masters"):
        ng.prepare(model, optimizer, "bf16")
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.float32
    assert model.weight.grad.dtype is torch.float32
    optimizer.step()


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16_pure"])  # its .grad is bfloat16
def test_accumulation_of_gradients_is_exact(recipe: str) -> None:  # case 28
    layer = nn.Linear(1, 1, bias=False)
    # one input and one output are quantized, too; powers of two, so that every value comes back from its codes exactly
    chosen = ng.recipe(recipe, min_size=0, min_state_size=0)
    if chosen.input is not None and not chosen.input.is_delayed:
        pow2 = {role: ng.CastSpec(getattr(chosen, role).format, scale=ng.CURRENT_POW2) for role in OPERAND_ROLES}
        chosen = chosen.replace(**pow2)
    ng.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0), chosen)
    assert isinstance(layer, Linear) is (recipe != "fp32")
    assert getattr(layer, "quantized", False) is (recipe not in ("fp32", "tf32", "bf16", "fp16", "fp16_pure"))
    with ng.accumulate(layer):
        for value in (256.0, 1.0, -256.0):
            layer(torch.tensor([[value]])).float().sum().backward()
    assert layer.weight.grad.item() == 1.0
    assert isinstance(layer.weight.grad, ng.QuantizedTensor) is chosen.grad.format.is_narrow


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed"])
def test_clipping_with_a_fused_optimizer_needs_no_scaler(recipe: str) -> None:  # case 32
    results = []
    for fused in (True, False):
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        ng.prepare(model, optimizer, recipe)
        for _ in range(3):
            loss_of(model).backward()
            ng.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6)


def ones_model(dtype: torch.dtype) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4096, dtype=dtype))
    return model


def steps_of_sgd(model: nn.Module, recipe: str | ng.Recipe) -> torch.Tensor:
    _, optimizer = ng.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), recipe)
    for _ in range(100):
        model.weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().float()


def test_masters_take_updates_below_half_an_ulp_of_bfloat16() -> None:  # case 35
    with pytest.warns(UserWarning, match="masters"):
        weight = steps_of_sgd(ones_model(torch.bfloat16), "bf16")
    assert (weight - 0.9).abs().max() <= 0.004


def test_bfloat16_parameters_without_masters_are_warned_of() -> None:  # case 35
    recipe = ng.recipe("bf16", param=CastSpec(BF16))
    with pytest.warns(UserWarning, match="below half a unit in the last place are lost"):
        weight = steps_of_sgd(ones_model(torch.float32), recipe)
    assert (weight == 1.0).all()


def test_bfloat16_parameters_keep_the_gradient_that_the_recipe_says() -> None:  # case 28
    for grad, expected in ((CastSpec(FP32), 1.0), (CastSpec(BF16), 0.0)):
        model = ones_model(torch.float32)
        with pytest.warns(UserWarning, match="half a unit"):
            ng.prepare(
                model, torch.optim.SGD(model.parameters(), lr=1.0), ng.recipe("bf16", param=CastSpec(BF16), grad=grad)
            )
        for value in (256.0, 1.0, -256.0):
            (model.weight[:1] * value).sum().backward()
        assert model.weight.grad.dtype is grad.format.dtype
        assert model.weight.grad[0].item() == expected


@pytest.mark.parametrize("recipe", ["fp16", "fp16_pure"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adams_epsilon_does_not_vanish(recipe: str, options: dict[str, bool], kind) -> None:  # case 37
    layer = nn.Linear(16, 16, bias=False).half()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    optimizer = kind(layer.parameters(), lr=1e-3, weight_decay=0.0, **options)
    with pytest.warns(UserWarning, match="masters"):
        ng.prepare(layer, optimizer, recipe)
    gradient = torch.zeros(16, 16)
    gradient[0] = 1e-4
    layer.weight.grad = gradient
    optimizer.step()
    weight = layer.weight.detach().float()
    assert (weight[1:] == 1.0).all()
    assert torch.allclose(weight[0], torch.full((16,), 0.999), rtol=0, atol=2**-11)


@pytest.mark.parametrize("recipe", RECIPES)
def test_tied_weights_stay_tied_and_are_stepped_once(recipe: str) -> None:  # case 55
    model = Tied()
    count = sum(p.numel() for p in model.parameters())
    # a step that the rounding does not drown
    rate = {"bf16_pure": 1.0, "narrow8_sr": 1.0, "narrow8": 1.0, "fp8_lm_o3": 3.0}.get(recipe, 0.1)
    chosen = ng.recipe(recipe, min_state_size=0)
    _, optimizer = ng.prepare(model, torch.optim.SGD(model.parameters(), lr=rate), chosen)
    assert model.lm_head.weight is model.embedding.weight
    assert sum(p.numel() for p in model.parameters()) == count
    assert sum(p is model.lm_head.weight for p in optimizer.param_groups[0]["params"]) == 1
    before = model.lm_head.weight.detach().float().clone()
    loss_of(model).backward()
    gradient = model.lm_head.weight.grad.float()
    optimizer.step()
    moved = before - model.lm_head.weight.detach().float()
    step = (rate * gradient).abs().max().item()
    # half a unit in the last place of the largest weight; a whole one where rounding is stochastic
    units = {"fp16_pure": 2**-10, "fp8_lm_o1": 2**-10, "fp8_lm_o2": 2**-10, "fp8_lm_o3": 2**-4, "bf16_pure": 2**-7,
             "narrow8_sr": 2**-7, "narrow8": 2**-8}  # fmt: skip
    tolerance = units[recipe] * before.abs().max().item() if recipe in units else 1e-6
    assert torch.allclose(moved, rate * gradient, rtol=0, atol=tolerance) and tolerance < 0.5 * step
    model.to("cpu")
    model.load_state_dict(model.state_dict())
    assert model.lm_head.weight is model.embedding.weight


@pytest.mark.parametrize("embeddings", [True, False])
def test_fp16_pure_stores_weights_as_scaled_float16_in_the_same_groups(embeddings: bool) -> None:
    model = Tied()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    groups = [
        {"params": [model.norm.weight, model.block.weight, model.embedding.weight], "weight_decay": 0.1},
        {"params": [model.block.bias, model.lm_head.weight], "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    marks: list[str] = []
    model.block.weight.register_hook(lambda grad: marks.append("hook"))
    model.block.weight.mark = "kept"
    held = optimizer.param_groups
    ng.prepare(model, optimizer, ng.recipe("fp16_pure", embeddings=embeddings))
    assert optimizer.param_groups is held and len(held) == 2
    wanted = [[model.norm.weight, model.block.weight, model.embedding.weight], [model.block.bias, model.lm_head.weight]]
    for group, names in zip(held, wanted, strict=True):
        assert all(a is b for a, b in zip(group["params"], names, strict=True))
    quantized = {name for name, p in model.named_parameters() if isinstance(p, ng.QuantizedTensor)}
    assert quantized == {"block.weight", "lm_head.weight", *(["embedding.weight"] if embeddings else [])}
    assert model.block.weight.codes.dtype is torch.float16 and model.block.weight.mark == "kept"
    before = model.block.weight.detach().dequantize().clone()
    loss_of(model).backward()
    optimizer.step()
    scheduler.step()
    assert marks == ["hook"] and [group["lr"] for group in held] == [0.05, 0.25]
    assert not torch.equal(before, model.block.weight.detach().dequantize())
    assert isinstance(optimizer.state[model.block.weight]["exp_avg"], torch.Tensor)


def test_the_forward_runs_in_autocast_unless_asked_otherwise() -> None:
    model = Tied()
    ng.prepare(model, None, "bf16")
    assert model(IDS, scale=2.0).dtype is torch.bfloat16
    assert list(inspect.signature(model.forward).parameters) == ["ids", "scale"]
    with torch.autocast("cpu", dtype=torch.float16):
        assert model(IDS).dtype is torch.bfloat16  # the recipe's region is the inner one
    ng.prepare(model, None, "fp16")
    assert model(IDS).dtype is torch.float16
    ng.prepare(model, None, "fp16", autocast=False)
    assert "forward" not in vars(model) and model(IDS).dtype is torch.float32
    with ng.autocast("fp16"):
        assert model(IDS).dtype is torch.float16


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_on_the_meta_device_says_that_it_has_no_values(recipe: str) -> None:  # case 113
    with torch.device("meta"):
        model = Tied()
    ng.prepare(model, None, recipe)
    assert model(IDS.to("meta")).shape == (2, 16, 48)
    with pytest.raises(ng.ConversionError, match="meta device and has no values"):
        model(IDS)


def test_preparations_nest() -> None:
    model = Tied()
    seen = []
    model.block.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    ng.prepare(model.block, None, "fp16")
    ng.prepare(model, None, "bf16")  # the whole takes the part over
    assert model(IDS).dtype is torch.bfloat16
    ng.prepare(model.block, None, "fp16")  # a part of its own inside the whole
    assert model(IDS).dtype is torch.bfloat16
    assert seen == [torch.bfloat16, torch.float16]


def test_another_librarys_forward_stays_in_force() -> None:
    model = Tied()
    plain = model.forward
    model.forward = lambda ids: plain(ids) * 2
    theirs = model.forward
    for _ in range(2):
        ng.prepare(model, None, "bf16")
        assert torch.equal(model(IDS), 2 * _plain_in_bf16(model))
    ng.prepare(model, None, "bf16", autocast=False)
    assert model.forward is theirs


def _plain_in_bf16(model: nn.Module) -> torch.Tensor:
    with ng.autocast("bf16"):
        return type(model).forward(model, IDS)


def test_float32_buffers_stay_float32_when_the_model_changes_dtype() -> None:  # cases 86, 99
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    model.register_buffer("table", torch.rand(8))
    model.register_buffer("ids", torch.arange(3))
    ng.prepare(model, None, "bf16")
    table, mean = model.table.clone(), model[1].running_mean.clone()
    model.to(torch.bfloat16).half()
    assert model.table.dtype is torch.float32 and torch.equal(model.table, table)
    assert model[1].running_mean.dtype is torch.float32 and torch.equal(model[1].running_mean, mean)
    assert model.ids.dtype is torch.int64 and model[0].weight.dtype is torch.float16


@pytest.mark.parametrize("role", ["grad_comm", "param_comm", "activation_comm", "pipeline_comm"])
@pytest.mark.parametrize(
    "spec",
    [
        CastSpec(ng.formats.E4M3FN),
        CastSpec(ng.formats.E4M3FN, ng.PER_ROW),
        CastSpec(ng.formats.E4M3FN, ng.Block(128, 128)),
        CastSpec(ng.formats.E2M1FN, ng.Block(1, 16), ng.NVFP4),
        CastSpec(FP16),
    ],
)
def test_scales_that_would_span_parts_of_ranks_cannot_travel(role: str, spec: CastSpec) -> None:
    with pytest.raises(ng.RecipeError, match=rf"{role}=\(.*\): .*expected"):
        ng.prepare(Tied(), None, ng.recipe("bf16", **{role: spec}))


@pytest.mark.parametrize(
    ("role", "spec"),
    [
        ("param", CastSpec(FP16)),
        ("param", CastSpec(FP16, ng.PER_ROW, ng.CURRENT)),
        ("param", CastSpec(ng.formats.E4M3FN, ng.Block(1, 32), ng.E8M0_UP)),
        ("grad", CastSpec(BF16, rounding=ng.STOCHASTIC)),
    ],
)
def test_roles_that_this_version_cannot_do_are_refused(role: str, spec: CastSpec) -> None:
    model = Tied()
    keys = [type(module) for module in model.modules()]
    with pytest.raises(ng.RecipeError, match=rf"{role}=\(.*\) is not supported by this version; expected"):
        ng.prepare(model, torch.optim.AdamW(model.parameters()), ng.recipe("fp8_current", **{role: spec}))
    assert [type(module) for module in model.modules()] == keys


def test_moments_of_bfloat16_parameters_are_what_the_recipe_says() -> None:
    recipe = ng.recipe("bf16", param=CastSpec(BF16))
    for moments in (CastSpec(BF16), CastSpec(FP32)):
        model = Tied()
        with pytest.warns(UserWarning, match="half a unit"):
            _, optimizer = ng.prepare(
                model,
                torch.optim.AdamW(model.parameters(), lr=0.01),
                recipe.replace(grad=CastSpec(BF16), exp_avg=moments, exp_avg_sq=moments, min_state_size=0),
            )
        assert train(model, optimizer, 20, recipe)[-1] < 3.5
        assert optimizer.state[model.block.weight]["exp_avg"].dtype is moments.format.dtype


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch.compile's own
def test_optimizers_that_it_does_not_know_are_refused() -> None:
    model = Tied()
    with pytest.raises(ng.ConversionError, match=r"expected torch.optim.AdamW, Adam, SGD or Muon, .*found .*RMSprop"):
        ng.prepare(model, torch.optim.RMSprop(model.parameters()), "bf16")
    with pytest.raises(ng.ConversionError, match="found builtins.str"):
        ng.prepare(model, "adamw", "bf16")
    other = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ng.ConversionError, match=r"parameter 5 of group 0, shape \[3\], is none of the model's"):
        ng.prepare(model, other, "bf16")
    with pytest.raises(ng.ConversionError, match=r"expected a torch.nn.Module to prepare, found list"):
        ng.prepare([model], None, "bf16")
    with pytest.raises(ng.RecipeError, match="did you mean 'fp8_current'"):
        ng.prepare(model, None, "fp8_curent")
    with pytest.raises(ng.ConversionError, match="call prepare first"):
        ng.prepare(torch.compile(model), None, "bf16")


def test_parameters_stored_in_sixteen_bits_come_back_and_those_in_eight_only_by_their_master() -> None:
    model = Tied()
    ng.prepare(model, None, "fp16_pure")
    values = model.block.weight.dequantize()
    ng.prepare(model, None, "bf16")
    assert type(model.block.weight) is nn.Parameter and torch.equal(model.block.weight, values)
    _, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), "fp8_lm_o3")
    with pytest.raises(ng.ConversionError, match=r"'embedding.weight' is stored as \(E4M3FN, .*so pass that one"):
        ng.prepare(model, None, "bf16")
    ng.prepare(model, optimizer, "bf16")
    assert torch.allclose(model.block.weight, values, rtol=2**-11, atol=0)


def test_layers_roll_by_themselves_only_without_an_optimizer() -> None:
    model = Tied()
    ng.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8_delayed")
    assert isinstance(model.block, Linear) and model.block.rolls_at_step
    ng.prepare(model, None, "fp8_delayed")
    assert not model.block.rolls_at_step
