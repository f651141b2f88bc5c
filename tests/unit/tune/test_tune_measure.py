"""What single layers lose and take by a choice, against the same thing done by hand."""

from __future__ import annotations

import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import ConfigError, NarrowgaugeError, RecipeError
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.observe.ledger import SavedActivations
from narrowgauge.recipes.library import recipe
from narrowgauge.recipes.spec import GEMMS, Recipe
from narrowgauge.tune.choices import Choice, choices_of, ends, put, recipe_of, tunable, wide
from narrowgauge.tune.estimate import Estimates, whole
from narrowgauge.tune.measure import Effect, costs_of, measure, slope_of

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = ng.recipe("bf16").resolve("cpu")
NAMES = ("fp8_current", "mxfp8", "nvfp4")
CONFIG = GPTConfig(vocab_size=96, layers=2, width=32, heads=2, kv_heads=1, ffn_width=64, context=32)
LAYERS = [
    f"blocks.{block}.{kind}"
    for block in (0, 1)
    for kind in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
]


def plain_model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG, generator=torch.Generator().manual_seed(0))


def prepared(by: Recipe, model: GPT | None = None) -> GPT:
    return ng.prepare(model or plain_model(), None, by)[0]


def batches(count: int, seed: int = 1, size: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(CONFIG.vocab_size, (count, size, 33), generator=generator)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in windows]


def loss_and_grads(model: GPT, batch: tuple[torch.Tensor, torch.Tensor], seed: int):
    torch.manual_seed(seed)
    _, loss = model(*batch)
    return loss.detach().double(), torch.autograd.grad(loss, list(model.parameters()))


def choices():
    return {choice.name: choice for choice in choices_of(BASE, NAMES)}


def test_the_choices_are_the_compute_dtype_and_the_casts_of_the_names() -> None:
    found = choices()
    assert list(found) == ["bf16", *NAMES]
    assert found["bf16"].is_wide and not found["bf16"].recipe.quantizes_gemms
    assert [choice.relative_time for choice in found.values()] == [1.0, 0.5, 0.5, 0.25]
    assert found["nvfp4"].recipe.hadamard is not None and found["nvfp4"].recipe.first_last == (0, 0)
    (gw_hp,) = choices_of(BASE, ("fp8_rowwise_gw_hp",))[1:]
    assert gw_hp.relative_time == pytest.approx((0.5 + 0.5 + 1) / 3)  # grad_weight stays in bf16


def test_a_product_is_as_slow_as_its_wider_operand() -> None:
    narrow = recipe("fp8_current")
    mine = Choice("mine", wide(BASE).replace(input=narrow.input, grad_output=narrow.grad_output))
    assert [mine.bits(gemm) for gemm in GEMMS] == [16, 16, 8]  # the weight stays wide
    assert mine.relative_time == pytest.approx((1 + 1 + 0.5) / 3)


def test_float32_takes_twice_the_time_of_16_bits() -> None:
    for name in ("fp32", "tf32"):
        found = choices_of(ng.recipe(name).resolve("cpu"), ("fp8_current", "fp8_rowwise_gw_hp", "nvfp4"))
        assert [each.relative_time for each in found] == [2.0, 0.5, pytest.approx((0.5 + 0.5 + 2) / 3), 0.25]


def test_what_is_stored_and_sent_stays_the_base_recipes() -> None:
    base = recipe("narrow8").resolve("cpu")
    found = recipe_of(base, {"blocks.0.mlp.down": "nvfp4"}, {c.name: c for c in choices_of(base, NAMES)}, "mine")
    for role in ("param", "master", "grad", "exp_avg", "exp_avg_sq", "grad_comm", "compute", "min_state_size"):
        assert getattr(found, role) == getattr(base, role)
    assert found.name == "mine" and found.for_layer("blocks.0.mlp.down").input == recipe("nvfp4").input
    assert not found.for_layer("blocks.1.mlp.down").quantizes_gemms


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("fp8_curent",), RecipeError, "did you mean 'fp8_current'"),
        (("fp32",), RecipeError, "casts no operand of a product, and bf16 is a choice anyway"),
        (("fp8_delayed",), RecipeError, "use fp8_current"),
        ((), ConfigError, "found none"),
        (("nvfp4", "nvfp4"), ConfigError, "each name once, found 'nvfp4' twice"),
    ],
)
def test_choices_that_are_none_say_so(names, error, message) -> None:
    with pytest.raises(error, match=message):
        choices_of(BASE, names)


def test_all_layers_but_the_head_are_there_to_choose_for() -> None:
    narrow = choices()["nvfp4"]
    assert tunable(plain_model(), narrow) == LAYERS
    with_head = choices_of(BASE.replace(exclude=()), ("nvfp4",))[1]
    assert tunable(plain_model(), with_head) == [*LAYERS, "lm_head"]
    with pytest.raises(ConfigError, match="layers to choose for, found none: 'blocks.0.attention.qkv' is kept"):
        tunable(plain_model(), choices_of(BASE.replace(min_size=4096), ("nvfp4",))[1])
    with pytest.raises(ConfigError, match="it has no linear layer"):
        tunable(torch.nn.Sequential(torch.nn.ReLU()), narrow)


def test_hand_rules_by_layers_and_by_blocks() -> None:
    assert ends(LAYERS) == ([LAYERS[0], LAYERS[-1]], LAYERS)
    names = [f"model.layers.{at}.proj" for at in range(3)]
    assert ends([*names, "other"])[1] == [names[0], names[2]]
    assert ends(["a", "b", "c"]) == (["a", "c"], ["a", "c"])


def test_put_is_bitwise_the_recipe() -> None:
    assignment = {LAYERS[0]: "nvfp4", LAYERS[3]: "fp8_current", LAYERS[6]: "mxfp8", LAYERS[7]: "bf16"}
    by_put, by_recipe = prepared(wide(BASE)), prepared(recipe_of(BASE, assignment, choices(), "x"))
    put(by_put, assignment, choices())
    (batch,) = batches(1)
    (loss, grads), (other, others) = loss_and_grads(by_put, batch, 3), loss_and_grads(by_recipe, batch, 3)
    assert loss == other
    assert all(torch.equal(mine, its) for mine, its in zip(grads, others, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_an_effect_is_what_the_recipe_of_that_one_layer_does(name: str) -> None:
    """The probe, against a model prepared anew with `include` of the one layer."""
    layer, data, seed = LAYERS[3], batches(2), 11
    model = prepared(wide(BASE))
    found = measure(model, [layer], {n: choices()[n] for n in ("bf16", name)}, data, seed)
    effect = found.effects[layer, name]
    alone = prepared(choices()[name].recipe.replace(include=(layer,)))
    plain = prepared(BASE)
    for number, batch in enumerate(data):
        loss, grads = loss_and_grads(alone, batch, seed + number)
        right_loss, right = loss_and_grads(plain, batch, seed + number)
        assert found.losses[number] == float(right_loss)
        assert effect.loss_changes[number] == float(loss - right_loss)
        shares = [
            (float((mine - its).square().sum() / its.square().sum()), its.numel())
            for mine, its in zip(grads, right, strict=True)
        ]
        expected = sum(share * count for share, count in shares) / sum(count for _, count in shares)
        assert effect.errors[number] == pytest.approx(expected, rel=1e-5) and expected > 0
        own = [n for n, _ in plain.named_parameters()].index(f"{layer}.weight")
        assert effect.own_errors[number] == pytest.approx(shares[own][0], rel=1e-5)
    together = found.together[name]  # of one layer, all layers are that layer
    assert (together.loss_changes, together.errors) == (effect.loss_changes, effect.errors)


def test_the_model_is_left_as_it_was() -> None:
    model, (batch,) = prepared(wide(BASE)), batches(1)
    before = loss_and_grads(model, batch, 0)
    seen = []
    measure(model, LAYERS[:2], choices(), batches(2), 0, lambda done, total: seen.append((done, total)))
    costs_of(model, LAYERS, choices(), batch)
    after = loss_and_grads(model, batch, 0)
    assert before[0] == after[0] and all(map(torch.equal, before[1], after[1]))
    assert seen == [(at + 1, 20) for at in range(20)]  # 2 batches x (all wide, 2 layers x 3, 3 together)


def test_bytes_are_those_of_the_codes_and_scales_that_are_kept() -> None:
    (batch,), rows = batches(1), 64
    found = costs_of(prepared(wide(BASE)), LAYERS, choices(), batch)
    layer, inputs, outputs = "blocks.0.mlp.down", 64, 32
    assert found[layer, "bf16"].bytes == 2 * rows * inputs  # the weight is kept by reference
    assert found[layer, "fp8_current"].bytes == rows * inputs + inputs * outputs + 2 * 4  # two float32 scales
    assert found[layer, "mxfp8"].bytes == (rows * inputs + inputs * outputs) * 33 // 32 + 2 * 4
    assert found[layer, "nvfp4"].bytes == rows * inputs * 9 // 16 + inputs * outputs // 2 + 8 + 2 * 4
    assert found[layer, "bf16"].time == rows * inputs * outputs == 4 * found[layer, "nvfp4"].time


def test_bytes_of_layers_add_up_to_what_the_whole_forward_pass_saves() -> None:
    (batch,) = batches(1)
    costs = costs_of(prepared(wide(BASE)), LAYERS, choices(), batch)
    mixed = dict(zip(LAYERS, ("nvfp4", "bf16", "fp8_current", "mxfp8") * 2, strict=True))
    sizes = []
    for assignment in (dict.fromkeys(LAYERS, "bf16"), mixed):
        model = prepared(recipe_of(BASE, assignment, choices(), "x"))
        with SavedActivations(model) as counter:
            result = model(*batch)
        sizes.append(counter.bytes)
        del result
    by_layers = sum(costs[layer, mixed[layer]].bytes - costs[layer, "bf16"].bytes for layer in LAYERS)
    assert sizes[1] - sizes[0] == by_layers < 0


def test_a_planted_layer_stands_out() -> None:
    """One input channel in 16 is 2^17 times the others, and its weights as much smaller: the same function, bitwise."""
    model = plain_model()
    bad = "blocks.1.mlp.gate_up"
    before = model(*batches(1)[0])[1]
    with torch.no_grad():
        model.blocks[1].mlp_norm.weight[::16] *= 2.0**17
        model.blocks[1].mlp.gate_up.weight[:, ::16] /= 2.0**17
    assert torch.equal(model(*batches(1)[0])[1], before)
    found = measure(prepared(wide(BASE), model), LAYERS, choices(), batches(2), 0)
    for name in NAMES:
        costs = {layer: Estimates(found).cost(layer, name, 0.5).value for layer in LAYERS}
        worst, second = sorted(costs, key=costs.__getitem__, reverse=True)[:2]
        assert worst == bad and costs[worst] > 10 * costs[second]


def test_a_model_that_is_not_finite_is_refused_and_a_choice_that_is_not_costs_infinity() -> None:
    model = plain_model()
    with torch.no_grad():
        model.blocks[0].mlp.down.weight[0, 0] = math.nan
    with pytest.raises(NarrowgaugeError, match="the model itself is not finite"):
        measure(prepared(wide(BASE), model), LAYERS, choices(), batches(2), 0)
    for effect in (Effect([0.1, math.nan], [0.0, 0.0]), Effect([0.1, 0.1], [0.0, math.inf])):
        assert whole(effect, 1.0).value == whole(effect, 0.0).value == math.inf


def test_one_batch_is_too_few() -> None:
    with pytest.raises(ConfigError, match="batches=1: expected at least 2"):
        measure(prepared(wide(BASE)), LAYERS, choices(), batches(1), 0)


def test_errors_of_gradients_are_roots_of_mean_squares() -> None:
    assert Effect([0.02, 0.04], [0.10, 0.30], [0.0, 0.5]).grad_error == pytest.approx(math.sqrt(0.2))
    assert Effect([0.02, 0.04], [0.10, 0.30], [0.0, 0.5]).own_grad_error == pytest.approx(0.5)


def test_the_slope_of_a_logarithmic_curve() -> None:
    losses = [8 - 0.7 * math.log(step) for step in range(1, 101)]
    assert slope_of(losses) == pytest.approx(0.7)
    assert slope_of(losses[50:], first_step=51) == pytest.approx(0.7)
    assert slope_of([*losses[:99], math.nan]) == pytest.approx(0.7)
    assert slope_of([1.0, 2.0, 3.0, 4.0]) == 0.0 and slope_of([3.0]) == 0.0


def test_ties_count_once() -> None:
    tied = CONFIG.replace(tied_embeddings=True)
    model = ng.prepare(GPT(tied), None, wide(BASE))[0]
    found = measure(model, LAYERS[:1], {n: choices()[n] for n in ("bf16", "nvfp4")}, batches(2), 0)
    assert found.effects[LAYERS[0], "nvfp4"].grad_error > 0


def test_gradients_in_float16_are_measured_scaled() -> None:
    """Without a scale most gradients of a loss of few nats are flushed in float16, and errors mean nothing."""
    base = ng.recipe("fp16").resolve("cpu")
    found = {}
    for by in (BASE, base):
        some = {choice.name: choice for choice in choices_of(by, ("fp8_current",))}
        model = plain_model()
        with torch.no_grad():
            model.get_submodule("lm_head").weight.mul_(
                2.0**-10
            )  # gradients are as much smaller, as those of long texts
        model = prepared(wide(by), model)
        found[by] = measure(model, LAYERS[:2], some, batches(2), 0).effects[LAYERS[0], "fp8_current"]
    assert found[base].own_grad_error == pytest.approx(found[BASE].own_grad_error, rel=0.05)
