"""A prepared model follows the schedule of its recipe: when it switches, what stays, what checkpoints hold."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.layers.linear import Linear
from narrowgauge.optim.guard import STEPS, StepGuard

FP8_INPUTS = ng.CastSpec(ng.formats.E4M3FN, scale=ng.CURRENT_POW2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.up, self.down, self.lm_head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(x + self.down(torch.relu(self.up(self.norm(x)))))


Parts = tuple[Net, torch.optim.Optimizer]


def prepared(recipe: ng.Recipe, **options: bool) -> Parts:
    model = Net()
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, **options)


def train(parts: Parts, steps: range, bad: int = -1) -> list[float]:
    """Losses of `steps`; the gradient of step `bad` is infinite."""
    model, optimizer = parts
    losses = []
    for step in steps:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        loss = (model(x).float() - x).square().mean()
        (loss * (float("inf") if step == bad else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def runs(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Status and first operand of every linear layer, as the report has them."""
    rows = [row for row in ng.report(model) if row.module in ("Linear", "Net")]
    operand = {row.name: row.reason.partition("; ")[2].split(" x ")[0] for row in rows}
    return {row.name: (row.status, operand[row.name] if row.status == "converted" else "") for row in rows}


def test_layers_change_after_the_step_and_not_before() -> None:
    recipe = ng.recipe("fp8_current", exclude="*up").switch_at(2, "bf16").switch_at(4, "fp8_block")
    parts = prepared(recipe)
    seen = []
    for step in range(6):
        seen.append(runs(parts[0]))
        train(parts, range(step, step + 1))
    kept, e4m3 = ("kept", ""), ("converted", "E4M3FN")
    first = {"up": kept, "down": e4m3, "lm_head": kept}
    second = {"up": kept, "down": kept, "lm_head": kept}
    tiles = ("converted", "E4M3FN 1x128")
    third = {"up": tiles, "down": tiles, "lm_head": kept}
    assert seen == [first, first, second, second, third, third]
    casts = parts[0].up.training_casts
    assert casts.input.granularity == ng.Block(1, 128)


@pytest.mark.parametrize(
    ("first", "second"), [("fp8_current", "bf16"), ("fp8_delayed", "fp32"), ("fp32", "fp8_delayed")]
)
def test_each_part_is_the_run_by_its_own_recipe(first: str, second: str) -> None:
    """The switch itself changes nothing: preparing anew by the second recipe in its place gives the same bits."""
    switched = prepared(ng.recipe(first).switch_at(3, second))
    losses = train(switched, range(6))
    by_hand = prepared(ng.recipe(first))
    expected = train(by_hand, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.prepare(*by_hand, second)
    assert losses == expected + train(by_hand, range(3, 6))
    for (name, a), b in zip(switched[0].state_dict().items(), by_hand[0].state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_skipped_steps_count() -> None:
    parts = prepared(ng.recipe("fp8_current").switch_at(2, "bf16"))
    train(parts, range(2), bad=1)
    assert parts[1].step_was_skipped
    assert runs(parts[0])["up"][0] == "kept"


def test_a_loss_scalers_skips_count_too() -> None:
    recipe = ng.recipe("fp8_current", compute="fp16").switch_at(2, "fp16")
    model, optimizer = prepared(recipe)
    scaler = ng.LossScaler(recipe, "cpu", init_scale=2.0**8)
    for step in range(2):
        assert runs(model)["up"][0] == "converted"
        loss = model(torch.randn(4, 32)).float().square().mean() * (float("inf") if step else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.step_was_skipped
    assert runs(model)["up"][0] == "kept"


def test_parameters_ties_hooks_and_names_stay() -> None:
    model = Net()
    model.lm_head.weight = nn.Parameter(torch.randn(32, 32))
    model.tied = nn.Linear(32, 32, bias=False)
    model.tied.weight = model.lm_head.weight
    calls = []
    model.up.register_forward_hook(lambda *_: calls.append("forward"))
    model.up.weight.register_hook(lambda grad: calls.append("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = ng.prepare(model, optimizer, ng.recipe("fp8_current").switch_at(1, "fp32").switch_at(2, "fp8_rowwise"))
    before = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    names, classes = list(model.state_dict()), []
    for step in range(3):
        train(parts, range(step, step + 1))
        classes.append(type(model.up))
        assert [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)] == before
        assert list(model.state_dict()) == names
        assert model.tied.weight is model.lm_head.weight
    assert classes == [nn.Linear, Linear, Linear]
    assert calls == ["forward", "backward"] * 3


def test_the_compute_dtype_of_the_rest_changes_with_the_recipe() -> None:
    parts = prepared(ng.recipe("bf16").switch_at(1, "fp32"))
    assert parts[0](torch.randn(2, 32)).dtype is torch.bfloat16
    train(parts, range(1))
    assert parts[0](torch.randn(2, 32)).dtype is torch.float32
    assert type(parts[0].up) is nn.Linear


def test_a_forward_that_another_library_wrapped_is_left_alone() -> None:
    model, optimizer = prepared(ng.recipe("bf16").switch_at(1, "fp32"))
    inner, seen = model.forward, []

    def wrapped(x: Tensor) -> Tensor:
        y = inner(x)
        seen.append(y.dtype)
        return y.float()

    model.forward = wrapped
    train((model, optimizer), range(2))
    assert model.forward is wrapped
    assert seen == [torch.bfloat16, torch.float32]


def test_histories_go_on_where_the_casts_stay_and_begin_anew_where_they_do_not() -> None:
    delayed = ng.DelayedScaling(amax_history_len=4)
    parts = prepared(delayed.switch_at(2, delayed.replace(exclude="*up")).switch_at(4, delayed.replace(min_size=0)))
    down, up = parts[0].down, parts[0].up
    train(parts, range(2))
    rolls, history = down.amax_rolls.clone(), down.input_amax_history.clone()
    assert rolls == 2 and "amax_rolls" not in dict(up.named_buffers())  # up was quantized until just now
    train(parts, range(2, 4))
    assert down.amax_rolls == 4
    assert torch.equal(down.input_amax_history[1:2], history[3:])  # the roll moved it on: L = 4, two rolls
    assert up.amax_rolls == 0 and up.input_quant_scale == 1  # fresh
    train(parts, range(4, 5))
    assert (int(down.amax_rolls), int(up.amax_rolls)) == (5, 1)


SCHEDULES = {
    "fp8_delayed to bf16": ng.recipe("fp8_delayed").switch_at(3, "bf16"),
    "bf16 to fp8_delayed": ng.recipe("bf16").switch_at(3, "fp8_delayed"),
    "three": ng.recipe("fp8_current").switch_at(2, "fp8_delayed").switch_at(4, "fp32"),
}


@pytest.mark.parametrize("recipe", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("at", [2, 3, 4])
def test_save_and_load_around_the_switch_change_no_bit(recipe: ng.Recipe, at: int, tmp_path: Path) -> None:
    whole = prepared(recipe)
    expected = train(whole, range(6))
    first = prepared(recipe)
    losses = train(first, range(at))
    ng.save(tmp_path / "c", *first)
    second = prepared(recipe)
    ng.load(tmp_path / "c", *second)
    assert runs(second[0]) == runs(first[0])
    assert losses + train(second, range(at, 6)) == expected
    for (name, a), b in zip(whole[0].state_dict().items(), second[0].state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_loading_goes_back_as_well_as_forward(tmp_path: Path) -> None:
    recipe = ng.recipe("fp8_delayed").switch_at(2, "bf16")
    parts = prepared(recipe)
    train(parts, range(1))
    ng.save(tmp_path / "c", *parts)
    expected = train(parts, range(1, 4))
    assert runs(parts[0])["up"][0] == "kept"
    ng.load(tmp_path / "c", *parts)
    assert runs(parts[0])["up"] == ("converted", "E4M3FN")
    assert train(parts, range(1, 4)) == expected


def test_torchs_own_state_dicts_carry_the_count() -> None:
    recipe = ng.recipe("fp8_current").switch_at(2, "fp8_delayed")
    whole = prepared(recipe)
    expected = train(whole, range(5))
    first = prepared(recipe)
    losses = train(first, range(3))
    assert first[1].state_dict()[STEPS] == 3
    state = copy.deepcopy([part.state_dict() for part in reversed(first)])
    second = prepared(recipe)
    second[1].load_state_dict(state[0])  # the optimizer first: the model's state is that of the recipe in force
    second[0].load_state_dict(state[1])
    assert losses + train(second, range(3, 5)) == expected


def test_a_state_without_a_count_is_said() -> None:
    plain = Net()
    state = torch.optim.AdamW(plain.parameters(), lr=1e-2).state_dict()
    assert STEPS not in state
    parts = prepared(ng.recipe("fp8_current").switch_at(2, "bf16"))
    train(parts, range(1))
    with pytest.warns(UserWarning, match="holds no count of steps.*the precision schedule goes on from step 1"):
        parts[1].load_state_dict(state)
    prepared(ng.recipe("fp8_current"))[1].load_state_dict(state)  # without a schedule nothing depends on it


def test_preparing_again_counts_anew_and_by_another_recipe_ends_the_schedule() -> None:
    recipe = ng.recipe("fp8_current").switch_at(2, "bf16")
    parts = prepared(recipe)
    train(parts, range(2))
    ng.prepare(*parts, recipe)
    guard = StepGuard.on(parts[1])
    assert guard is not None and guard.steps == 0
    assert runs(parts[0])["up"][0] == "converted"
    ng.prepare(*parts, "fp8_current")
    train(parts, range(3))
    assert runs(parts[0])["up"][0] == "converted"
    assert list(parts[1].state_dict()) == ["state", "param_groups", STEPS]


@pytest.mark.parametrize("how", ["prepare", "freeze"])
def test_an_optimizer_steps_on_after_others_converted_its_layers_back(how: str) -> None:
    model = Net()
    model, first = ng.prepare(model, torch.optim.AdamW(model.up.parameters()), "fp8_delayed")
    train((model, first), range(1))
    if how == "prepare":
        ng.prepare(model, torch.optim.AdamW(model.down.parameters()), "fp32")
    else:
        ng.freeze(model, "fp32")
        model.up.bias.requires_grad_()
    assert not any(isinstance(layer, Linear) for layer in model.modules())
    before = model.up.bias.detach().clone()
    train((model, first), range(2), bad=1)  # one step is taken, one skipped
    assert not torch.equal(before, model.up.bias)


def test_what_a_schedule_needs_is_said_at_once() -> None:
    recipe = ng.recipe("fp8_current").switch_at(2, "bf16")
    with pytest.raises(ng.RecipeError, match=r"expected the optimizer .* found None.*recipe.at\(steps\)"):
        ng.prepare(Net(), None, recipe)
    with pytest.raises(ng.RecipeError, match=r"no steps to count here: use prepare\(model, optimizer, recipe\)"):
        ng.convert(Net(), recipe)
    assert ng.convert(Net(), recipe.at(0)).counts()["converted"] == 3
    with ng.autocast(recipe, "cpu"):
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    with pytest.raises(ng.RecipeError, match=r"changes the compute dtype.*use autocast\(recipe.at\(steps\)\)"):
        ng.autocast(ng.recipe("bf16").switch_at(1, "fp32"), "cpu")


def test_doubts_about_a_later_recipe_come_with_prepare_and_not_with_the_switch() -> None:
    model = Net()
    later = ng.recipe("fp8_current").replace(name="later", exclude="*dwon")
    with pytest.warns(UserWarning, match=r"recipe 'later': '\*dwon' matches no linear layer"):
        parts = ng.prepare(model, torch.optim.AdamW(model.parameters()), ng.recipe("bf16").switch_at(1, later))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(parts, range(2))
    assert runs(model)["up"][0] == "converted"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("first", "second"), [("fp8_current", "bf16"), ("fp8_delayed", "fp32")])
def test_a_compiled_model_switches_with_one_more_compilation(first: str, second: str, in_place: bool) -> None:
    recipe = ng.recipe(first).switch_at(3, second)
    expected = train(prepared(recipe), range(6))
    torch._dynamo.reset()
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        compiled.append(len(inputs))
        return graph

    model, optimizer = prepared(recipe)
    run = model if in_place else torch.compile(model, fullgraph=True, backend=backend)
    if in_place:
        model.compile(fullgraph=True, backend=backend)
    counts = []
    losses = []
    for step in range(6):
        losses += train((run, optimizer), range(step, step + 1))  # type: ignore[arg-type]
        counts.append(len(compiled))
    assert counts == [1, 1, 1, 2, 2, 2]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert runs(model)["up"][0] == "kept"
