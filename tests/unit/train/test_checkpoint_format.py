"""docs/checkpoints.md describes the files: its reader, without this library, finds what was saved."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import narrowgauge as ng

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 96), nn.GELU(), nn.Linear(96, 200))
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "narrow8")
    for step in range(3):
        x = torch.randn(8, 200, generator=torch.Generator().manual_seed(step))
        (model(x).float() - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return ng.save(tmp_path_factory.mktemp("c") / "checkpoint", model, optimizer, step=3), model, optimizer


def test_the_reader_of_the_page_finds_all_digits_without_this_library(saved, tmp_path):  # case 71
    folder, model, optimizer = saved
    reader = re.search(r"### Read without this library.*?```py\n(.*?)```", PAGE, re.DOTALL)
    assert reader is not None
    ending = "import sys; assert not any(name.startswith('narrowgauge') for name in sys.modules)\n"
    ending += f"torch.save([values, moments], {str(tmp_path / 'found.pt')!r})\n"
    program = f"folder = {str(folder)!r}\n{reader[1]}\n{ending}"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    values, moments = torch.load(tmp_path / "found.pt", weights_only=True)
    for name, p in model.named_parameters():
        assert torch.equal(values[name], optimizer.full_values(p)), name
        moment = optimizer.state[p]["exp_avg"]
        expected = moment.dequantize() if isinstance(moment, ng.QuantizedTensor) else moment
        assert torch.equal(moments[name], expected), name


def test_the_page_lists_the_files_and_nodes_that_there_are(saved):
    folder, _, _ = saved
    for file in folder.iterdir():
        assert f"| `{file.name}` |" in PAGE
    state = (folder / "state.json").read_text()
    assert json.loads(state).keys() == {"versions", "model", "optimizer", "extra"}
    for node in set(re.findall(r'"(\$\w+)"', state)):
        assert f'{{"{node}":' in PAGE
    assert "state.state.0.exp_avg.codes" in load_file(folder / "optimizer.safetensors")


def test_packed_codes_are_two_a_byte_as_the_page_says(tmp_path):
    values = torch.linspace(-1, 1, 256).reshape(1, 256)
    spec = ng.recipe("narrow8", moment_bits=4).exp_avg
    from narrowgauge.tensors.packed import PackedTensor

    ng.save(tmp_path / "c", nn.Linear(1, 1), moment=PackedTensor.quantize(values, spec))
    tensors = load_file(tmp_path / "c" / "extra.safetensors")
    packed = tensors["moment.packed"].to(torch.int16)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(1, 256).float()
    codes = torch.where(codes > 7, codes - 16, codes)  # two's complement
    found = codes * codes.abs() * tensors["moment.dequant_scale"].repeat_interleave(128, -1)
    loaded = ng.load(tmp_path / "c", nn.Linear(1, 1))["moment"]
    assert torch.equal(found, loaded.dequantize()) and loaded.spec == spec
