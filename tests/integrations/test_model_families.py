"""`prepare` on models of transformers: what is converted, what stays, and that all their uses still work."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import FAMILIES, IDS, batch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.layers.report import CONVERTED
from narrowgauge.tensors.quantized import QuantizedTensor

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")
RECIPES = ("fp8_current", "fp8_delayed", "mxfp8", "narrow8")
# relative errors of one product, as measured on normal values: E4M3 by E4M3, and E4M3 by E5M2
FORWARD, BACKWARD = 0.038, 0.059


def plain(x: Tensor) -> Tensor:
    return (x.dequantize() if isinstance(x, QuantizedTensor) else x).float()


def prepared(name: str, recipe: str, lr: float = 0.0) -> tuple[Any, Any]:
    model = FAMILIES[name].make()
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0), recipe)


def check_what_is_converted(name: str, model: Any) -> None:
    family, report = FAMILIES[name], ng.report(model)
    rows = {row.name: row for row in report}
    norms = {row.name for row in report if row.reason == "statistics in float32"}  # torch's own
    assert {row.name for row in report if row.status == CONVERTED} - norms == family.converted
    for kept, (module, reason) in family.kept.items():
        assert (rows[kept].module, rows[kept].status) == (module, "kept") and rows[kept].reason.startswith(reason)
    assert report.counts()["skipped"] == 0
    holders = {f"{n}.{p}".removeprefix(".") for n, m in model.named_modules() for p, _ in m.named_parameters("", False)}
    assert {holder.rpartition(".")[0] for holder in holders} <= rows.keys()  # no parameter without a word


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_converted_and_how_far_gradients_are_from_float32(
    name: str, recipe: str
) -> None:  # cases 55, 57, 86, 99
    exact = FAMILIES[name].make()
    wanted = exact(**batch(name))
    wanted.loss.backward()
    model, optimizer = prepared(name, recipe)
    check_what_is_converted(name, model)
    if recipe == "fp8_delayed":  # scales of a first step, whose updates have length 0
        model(**batch(name)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = model(**batch(name))
    found.loss.backward()

    # every product brings an error of its own, and what it adds to the stream is at most the whole of it
    products = len(FAMILIES[name].converted) + FAMILIES[name].more_errors
    slack = 2 if name == "mixtral" else 1  # an expert more or less is an error beyond all rounding
    error = found.logits.float() - wanted.logits
    assert FORWARD / 4 <= error.norm() / wanted.logits.norm() <= slack * math.sqrt(products) * FORWARD
    assert 0 < (found.loss - wanted.loss).abs() <= 2 * error.abs().max()  # log-softmax changes by at most this
    layers = FAMILIES[name].converted
    weights = {n: p for n, p in exact.named_parameters() if p.ndim > 1 and n.rpartition(".")[0] in layers}
    truth = torch.cat([p.grad.flatten() for p in weights.values()])
    ours = torch.cat([plain(model.get_parameter(n).grad).flatten() for n in weights])
    one = FORWARD if recipe == "mxfp8" else BACKWARD
    assert one * 0.8 <= (ours - truth).norm() / truth.norm() <= slack * math.sqrt(2 * products) * one

    stays = [(n, b) for n, b in model.named_buffers() if b.is_floating_point()]
    model.to(torch.bfloat16)
    assert all(model.get_buffer(n).dtype is torch.float32 and torch.equal(model.get_buffer(n), b) for n, b in stays)
    assert name in ("gpt2", "bert", "t5") or any("inv_freq" in n for n, _ in stays)
    if FAMILIES[name].generates:
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == FAMILIES[name].is_tied
        table = model.get_input_embeddings().weight
        assert sum(p is table for group in optimizer.param_groups for p in group["params"]) == 1


@pytest.mark.parametrize("recipe", ["mxfp8", "narrow8"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.generates])
def test_generation_with_and_without_cache(name: str, recipe: str) -> None:
    model, _ = prepared(name, recipe)
    model.eval()
    prompt = {"input_ids": IDS[:2, :6], "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    cached, whole = (model.generate(**prompt, use_cache=use, **options) for use in (True, False))
    assert cached.shape == whole.shape == (2, 6 if name == "t5" else 11)
    assert not any(p.grad is not None for p in model.parameters())
    if recipe == "mxfp8":  # a token's scales are its own, whatever is computed beside it
        assert torch.equal(cached, whole)
    first = (cached[:, 1] if name == "t5" else cached[:, 6]).tolist()
    logits = model(**prompt, **({"decoder_input_ids": cached[:, :1]} if name == "t5" else {})).logits
    assert first == logits[:, -1].argmax(-1).tolist()


@pytest.mark.parametrize("recipe", ["fp8_delayed", "narrow8"])
@pytest.mark.parametrize(
    "name", sorted(FAMILIES.keys() - {"t5"})
)  # whose gradients torch adds in another order, in float32 too
def test_gradient_checkpointing_changes_no_bit(name: str, recipe: str) -> None:
    found = []
    for recompute in (False, True):
        model, optimizer = prepared(name, recipe, lr=0.01)
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch(name), **({} if name == "bert" else {"use_cache": False})).loss.backward()
            optimizer.step()
        found.append(
            model.state_dict() | {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        )
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.equal(plain(value), plain(found[1][key])), key
