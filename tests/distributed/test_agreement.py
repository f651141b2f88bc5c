"""Processes that would train different things say so before the first step, with field, values and ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from models import tiny_gpt
from ranks import run

import narrowgauge as ng
from narrowgauge.distributed import agreement
from narrowgauge.distributed.layout import attach, layout

pytestmark = pytest.mark.multiproc
BF16 = ng.CastSpec(ng.formats.BF16)


def message(call) -> str:
    """What the ProcessError of `call()` says, or "none"."""
    try:
        call()
    except ng.ProcessError as error:
        return str(error)
    return "none"


def with_recipes(names: list[str], fields: dict) -> str:
    recipe = ng.recipe(names[dist.get_rank()]).replace(name="mine")
    if dist.get_rank() == 1:
        recipe = recipe.replace(**fields)
    return message(lambda: agreement.check_prepared(tiny_gpt(), recipe, timeout_s=20))


def with_models(widths: list[int]) -> str:
    model = tiny_gpt(width=widths[dist.get_rank()])
    return message(lambda: agreement.check_prepared(model, ng.recipe("fp32"), timeout_s=20))


def with_stages() -> list[str]:
    model = tiny_gpt(layers=1 + dist.get_rank() // 2)
    attach(model, layout(pipeline=2, data=2))
    told = [message(lambda: agreement.check_prepared(model, ng.recipe("fp32"), timeout_s=20))]
    if dist.get_rank() == 3:
        model.blocks[0].requires_grad_(False)
    return [*told, message(lambda: agreement.check_prepared(model, ng.recipe("fp32"), timeout_s=20))]


def with_one_missing() -> tuple[str, float]:
    if dist.get_rank() == 1:
        time.sleep(1.5)
        return "none", 0.0
    begin = time.monotonic()
    told = message(lambda: agreement.check({agreement.EVERYONE: {"seed": 0}}, timeout_s=0.5))
    return told, time.monotonic() - begin


def with_versions(versions: list[str]) -> str:
    mine, before = versions[dist.get_rank()], agreement.version
    agreement.version = lambda package: mine
    try:
        return message(lambda: agreement.check_prepared(tiny_gpt(), ng.recipe("fp32"), timeout_s=20))
    finally:
        agreement.version = before


def test_the_same_recipe_and_model_pass():
    assert run(2, with_recipes, ["narrow8", "narrow8"], {}) == ["none", "none"]


def test_a_field_of_the_recipe_is_named_with_both_values_on_every_rank():
    told = run(3, with_recipes, ["narrow8"] * 3, {})
    assert told == ["none"] * 3
    told = run(3, with_recipes, ["fp32"] * 3, {"grad_comm": BF16, "min_size": 32})
    assert told[0] == told[1] == told[2]
    assert told[0].splitlines()[1:] == [
        f"  recipe.grad_comm: None on ranks 0, 2; {BF16} on rank 1",
        "  recipe.min_size: 16 on ranks 0, 2; 32 on rank 1",
    ]


def test_different_shapes_are_named_by_parameter_and_cut_to_a_few():
    first, second = run(2, with_models, [64, 32])
    assert first == second
    lines = first.splitlines()
    assert lines[1] == "  parameter embedding.weight of stage 0: float32 [64, 64] on rank 0; float32 [64, 32] on rank 1"
    model = tiny_gpt()
    tensors = len([*model.parameters(), *model.buffers()])
    assert len(lines) == 1 + agreement.MOST_NAMED + 1
    assert lines[-1] == f"  and {tensors - agreement.MOST_NAMED} more"


def test_stages_of_a_pipeline_have_other_layers_and_are_compared_each_by_itself():
    told = run(4, with_stages)
    assert [first for first, _ in told] == ["none"] * 4
    second = {second for _, second in told}
    assert len(second) == 1
    line = second.pop().splitlines()[1]
    assert "of stage 1" in line and ", not trained on rank 3" in line and "on rank 2;" in line


def test_versions_are_compared():
    first, second = run(2, with_versions, ["1.0", "1.1"])
    assert first == second and first.splitlines()[1:] == ["  version of narrowgauge: 1.0 on rank 0; 1.1 on rank 1"]


def test_a_rank_that_does_not_come_is_named_within_the_time_out():
    (told, seconds), _ = run(2, with_one_missing)
    assert "rank 1 of 2 did not come" in told and "within 0.5 s" in told
    assert 0.5 <= seconds < 1.4


def test_one_process_agrees_with_itself():
    agreement.check({agreement.EVERYONE: {"seed": 0}})
    agreement.check_prepared(tiny_gpt(), ng.recipe("fp32"))


@pytest.mark.parametrize(
    "ranks_, text",
    [([3], "rank 3"), ([2, 0], "ranks 0, 2"), ([0, 1], "ranks 0, 1"), ([8, 0, 1, 2, 3], "ranks 0-3, 8")],
)
def test_lists_of_ranks_are_short(ranks_, text):
    assert agreement.ranks_text(ranks_) == text


def prepared_by(names: list[str], members: list[int]) -> str:
    """What `prepare` says on each rank; ranks that are no members make a model of their own meanwhile."""
    group = dist.new_group(members)
    model = tiny_gpt()
    if dist.get_rank() in members:
        model = ng.distributed.data_parallel(model, group)
    optimizer = torch.optim.AdamW(model.parameters())
    return message(lambda: ng.prepare(model, optimizer, names[dist.get_rank()]))


def test_prepare_compares_the_recipes_of_the_ranks_that_train_together():
    told = run(3, prepared_by, ["narrow8", "fp32", "fp8_current"], [0, 2])
    assert told[1] == "none" and told[0] == told[2]
    assert "  recipe.name: narrow8 on rank 0; fp8_current on rank 2" in told[0].splitlines()
    assert run(2, prepared_by, ["narrow8", "narrow8"], [0, 1]) == ["none"] * 2
