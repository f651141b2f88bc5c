import json

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.models.config import Activation, GPTConfig, Norm, Positions

SMALL = dict(vocab_size=64, layers=2, width=32, heads=4, context=16)


def test_defaults_are_filled_in_from_other_fields():
    config = GPTConfig(**SMALL)
    assert (config.key_value_heads, config.head_width, config.hidden_width) == (4, 8, 128)  # 8/3 * 32 = 85.3 -> 128
    assert GPTConfig(**SMALL, activation="gelu").hidden_width == 128
    assert config.replace(width=96).hidden_width == 256  # exactly 8/3
    assert config.replace(ffn_width=100, kv_heads=2).hidden_width == 100


def test_names_become_enum_members():
    config = GPTConfig(**SMALL, activation="gelu", norm="layernorm", positions="learned")
    assert (config.activation, config.norm, config.positions) == (Activation.GELU, Norm.LAYERNORM, Positions.LEARNED)


def test_dict_round_trip_goes_through_json():
    config = GPTConfig(**SMALL, kv_heads=2, experts=4, tied_embeddings=True, rope_theta=5e5)
    assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 30}, r"width=30 is no multiple of heads=4.*width=32"),
        ({"kv_heads": 3}, r"kv_heads=3 does not divide heads=4: use one of \[1, 2, 4\]"),
        ({"width": 36}, r"width / heads = 9 is odd.*learned"),
        ({"layers": 0}, r"layers=0: expected a whole number, at least 1"),
        ({"context": 2.5}, r"context=2.5: expected a whole number"),
        ({"vocab_size": True}, r"vocab_size=True: expected a whole number"),
        ({"activation": "swigly"}, r"activation='swigly'.*did you mean 'swiglu'"),
        ({"norm": "rms"}, r"norm='rms'.*did you mean 'rmsnorm'"),
        ({"positions": "roped"}, r"did you mean 'rope'"),
        ({"experts": 2, "experts_per_token": 3}, r"experts_per_token=3 is more than experts=2"),
        ({"norm_bias": True}, r"RMSNorm has no bias.*layernorm"),
        ({"init_std": 0.0}, r"init_std=0.0: expected a finite number > 0"),
        ({"rope_theta": float("nan")}, r"rope_theta=nan"),
        ({"load_balancing": -1.0}, r"load_balancing=-1.0.*>= 0"),
        ({"swiglu_limit": 0.0}, r"swiglu_limit=0.0: expected a finite number > 0"),
        ({"swiglu_limit": 7.0, "activation": "gelu"}, r"swiglu_limit=7.0 with activation=gelu: leave it out"),
        ({"tied_embeddings": 1}, r"tied_embeddings=1: expected true or false"),
    ],
)
def test_values_out_of_range_are_refused_with_a_remedy(fields, message):
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**{**SMALL, **fields})


def test_unknown_and_missing_fields_are_named():
    with pytest.raises(ConfigError, match="unknown model field 'layer'; did you mean 'layers'"):
        GPTConfig.from_dict({**SMALL, "layer": 2})
    with pytest.raises(ConfigError, match="unknown model field 'kvheads'; did you mean 'kv_heads'"):
        GPTConfig(**SMALL).replace(kvheads=2)
    with pytest.raises(ConfigError, match="lacks heads, context"):
        GPTConfig.from_dict({"vocab_size": 8, "layers": 1, "width": 8})
