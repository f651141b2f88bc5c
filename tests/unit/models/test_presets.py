import pytest
import torch

from narrowgauge.errors import ConfigError
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import DEFAULT_PRESET, preset, preset_names


def gpt3_count(layers: int, width: int) -> int:
    """Parameters by hand: a block has 12 width^2 weights, 9 width biases and 4 width in norms; tables are tied."""
    return layers * (12 * width**2 + 13 * width) + (50257 + 2048) * width + 2 * width


def llama3_count(layers: int, width: int, kv_width: int, ffn: int) -> int:
    block = 2 * width**2 + 2 * width * kv_width + 3 * width * ffn + 2 * width
    return layers * block + 2 * 128256 * width + width


COUNTS = {
    "gpt-125m": gpt3_count(12, 768),
    "gpt-350m": gpt3_count(24, 1024),
    "gpt-760m": gpt3_count(24, 1536),
    "gpt-1.3b": gpt3_count(24, 2048),
    "gpt-2.7b": gpt3_count(32, 2560),
    "gpt-6.7b": gpt3_count(32, 4096),
    "gpt-7b": gpt3_count(32, 4096) - 2048 * 4096,  # no table of positions
    "gpt-13b": gpt3_count(40, 5120),
    "gpt-175b": gpt3_count(96, 12288),
    "llama3-8b": llama3_count(32, 4096, 1024, 14336),
    "llama3-70b": llama3_count(80, 8192, 1024, 28672),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_on_the_meta_device(name):
    model = GPT(preset(name), device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert model.parameter_count() == COUNTS[name]


def test_counts_published_for_llama_3():
    assert COUNTS["llama3-8b"] == 8_030_261_248
    assert COUNTS["llama3-70b"] == 70_553_706_496


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_what_the_names_say(name):
    number = name.split("-")[1]
    claimed = float(number[:-1]) * {"m": 1e6, "b": 1e9}[number[-1]]
    # GPT-3's "7B" is 6.7 billion: names round by up to 6 %
    assert COUNTS[name] == pytest.approx(claimed, rel=0.06)


def test_the_default_is_small_and_exportable():
    config = preset(DEFAULT_PRESET)
    assert DEFAULT_PRESET in preset_names()
    assert GPT(config, device="meta").parameter_count() < 10e6
    assert (config.activation, config.norm, config.positions) == ("swiglu", "rmsnorm", "rope")


def test_fields_can_be_changed_and_derived_widths_follow():
    config = preset("gpt-125m", width=1536, vocab_size=100)
    assert (config.width, config.hidden_width, config.vocab_size) == (1536, 6144, 100)
    assert preset("LLAMA3-8B").width == 4096


def test_unknown_names_and_fields_name_the_closest():
    with pytest.raises(ConfigError, match="unknown model 'gpt-125'; did you mean 'gpt-125m'"):
        preset("gpt-125")
    with pytest.raises(ConfigError, match="unknown model 'llama-8b'; did you mean 'llama3-8b'"):
        preset("llama-8b")
    with pytest.raises(ConfigError, match="unknown model field 'widht'; did you mean 'width'"):
        preset("tiny", widht=64)


def test_building_a_large_shape_on_meta_is_without_memory():
    with torch.device("meta"):
        model = GPT(preset("gpt-175b"))
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
