"""Recipes from Accelerate: files as its wizard writes them (1.15), and its recipe objects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import narrowgauge as ng
from narrowgauge.recipes.compat import accelerate as compat

from_accelerate = ng.recipes.from_accelerate

# what `accelerate config` writes around the section, byte for byte
WIZARD = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: 'NO'
downcast_bf16: 'no'
enable_cpu_affinity: false
{section}gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: {precision}
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
TE_SECTION = """\
fp8_config:
  amax_compute_algorithm: most_recent
  amax_history_length: 16
  backend: TE
  fp8_format: HYBRID
  interval: 1
  margin: 1
  override_linear_precision:
  - false
  - false
  - true
  use_autocast_during_eval: false
"""
AO_SECTION = """\
fp8_config:
  backend: AO
  enable_fsdp_float8_all_gather: true
  pad_inner_dim: true
"""
MSAMP_SECTION = """\
fp8_config:
  backend: MSAMP
  optimization_level: O2
"""
AO = ng.recipe("fp8_current", exclude=(), first_last=(1, 1))


def delayed(evaluation: str = "compute", **options: Any) -> ng.Recipe:
    return ng.DelayedScaling(**{"amax_compute_algo": "most_recent", **options}).replace(evaluation=evaluation)


def written(folder: Path, precision: str, section: str = "") -> Path:
    path = folder / "default_config.yaml"
    path.write_text(WIZARD.format(precision=precision, section=section), encoding="utf-8")
    return path


# files


def test_the_wizards_transformer_engine_file(tmp_path: Path) -> None:
    path = written(tmp_path, "fp8", TE_SECTION)
    expected = delayed(margin=1, amax_history_len=16, override_linear_precision=(False, False, True))
    assert from_accelerate(path) == from_accelerate(str(path)) == expected
    whole = yaml.safe_load(path.read_text())
    assert from_accelerate(whole) == from_accelerate(whole["fp8_config"]) == expected
    as_json = tmp_path / "config.json"
    as_json.write_text(json.dumps(whole))
    assert from_accelerate(as_json) == expected


def test_the_recipe_of_a_file_trains(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ng.prepare(model, optimizer, from_accelerate(written(tmp_path, "fp8", TE_SECTION)))
    for _ in range(2):
        model(torch.ones(4, 32)).float().square().mean().backward()
        optimizer.step()
    for role in ("input", "weight", "grad_output"):
        history = model.get_buffer(f"1.{role}_amax_history")
        assert history.shape == (16,) and bool((history[-2:] > 0).all())


def test_the_wizards_torchao_file(tmp_path: Path) -> None:
    assert from_accelerate(written(tmp_path, "fp8", AO_SECTION)) == AO


def test_torchaos_layers_are_those_that_accelerate_converts(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("first", "second", "third", "lm_head")})
    ng.prepare(model, None, from_accelerate(written(tmp_path, "fp8", AO_SECTION)))
    assert [layer.quantized for layer in model.values()] == [False, True, True, False]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_wizards_msamp_file(tmp_path: Path, level: str) -> None:
    path = written(tmp_path, "fp8", MSAMP_SECTION.replace("O2", level))
    assert from_accelerate(path) == ng.recipe(f"fp8_lm_{level.lower()}")


@pytest.mark.parametrize(
    ("precision", "name"), [("bf16", "bf16"), ("fp16", "fp16"), ("'no'", "fp32"), ("no", "fp32"), ("BF16", "bf16")]
)
def test_files_without_fp8(tmp_path: Path, precision: str, name: str) -> None:
    assert from_accelerate(written(tmp_path, precision)) == ng.recipe(name)


def test_old_files_say_fp16_by_a_flag() -> None:
    assert from_accelerate({"distributed_type": "NO", "fp16": True}) == ng.recipe("fp16")
    assert from_accelerate({"distributed_type": "NO", "fp16": False}) == ng.recipe("fp32")
    assert from_accelerate({"distributed_type": "NO", "fp16": True, "mixed_precision": "bf16"}) == ng.recipe("bf16")


@pytest.mark.parametrize("key", compat.NOT_OURS)
def test_keys_of_the_launcher_are_left_to_it(key: str) -> None:
    assert from_accelerate({"mixed_precision": "bf16", key: 3}) == ng.recipe("bf16")


# sections: every option, by every name


@pytest.mark.parametrize("prefix", ["", "fp8_"])
@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("use_autocast_during_eval", True, delayed("same")),
        ("use_autocast_during_eval", False, delayed("compute")),
        ("margin", 3, delayed(margin=3)),
        ("interval", 2, delayed(interval=2)),
        ("format", "e4m3", delayed(fp8_format="E4M3")),
        ("amax_history_len", 8, delayed(amax_history_len=8)),
        ("amax_history_length", 8, delayed(amax_history_len=8)),
        ("amax_compute_algo", "max", delayed(amax_compute_algo="max")),
        ("amax_compute_algorithm", "MAX", delayed(amax_compute_algo="max")),
        ("override_linear_precision", [True, False, True], delayed(override_linear_precision=(True, False, True))),
        ("override_linear_precision", False, delayed()),
        ("use_mxfp8_block_scaling", True, ng.recipe("mxfp8", fp8_format="HYBRID", evaluation="compute")),
        ("use_mxfp8_block_scaling", False, delayed()),
    ],
)
def test_options_of_transformer_engine(prefix: str, option: str, value: Any, expected: ng.Recipe) -> None:
    assert from_accelerate({"backend": "TE", prefix + option: value}) == expected
    assert from_accelerate({prefix + option: value}) == expected  # only one backend has it


def test_every_name_of_every_option_was_tried() -> None:
    names = {name for options in compat.BACKENDS.values() for name in compat._names(options)}
    tried = {
        "use_autocast_during_eval", "margin", "interval", "amax_history_len", "amax_history_length",
        "amax_compute_algo", "amax_compute_algorithm", "override_linear_precision", "use_mxfp8_block_scaling",
        "pad_inner_dim", "enable_fsdp_float8_all_gather", "opt_level", "optimization_level",
    }  # fmt: skip
    objects_only = {"config", "module_filter_func"}
    assert names == tried | {f"fp8_{name}" for name in tried} | {"format", "fp8_format"} | objects_only


def test_mxfp8_with_the_other_options_that_go_with_it() -> None:
    recipe = from_accelerate(
        {"use_mxfp8_block_scaling": True, "fp8_format": "E4M3", "use_autocast_during_eval": True,
         "override_linear_precision": [False, False, True], "margin": 0, "amax_history_len": 1024}
    )  # fmt: skip
    assert recipe == ng.recipe("mxfp8", override_linear_precision=(False, False, True))


def test_a_gather_matters_where_parameters_are_sharded() -> None:
    section = {"backend": "ao", "pad_inner_dim": False}
    for given in (section, {**section, "fp8_enable_fsdp_float8_all_gather": True}):  # Accelerate's default is true
        with pytest.warns(UserWarning, match="shards no parameters"):
            assert from_accelerate(given) == AO
        file = {"mixed_precision": "fp8", "fp8_config": given}
        assert from_accelerate({**file, "distributed_type": "MULTI_GPU"}) == AO
        with pytest.raises(ng.RecipeError, match="enable_fsdp_float8_all_gather=True cannot .* set it to false"):
            from_accelerate({**file, "distributed_type": "FSDP"})
    section["enable_fsdp_float8_all_gather"] = False
    assert from_accelerate(section) == AO
    file = {"mixed_precision": "fp8", "fp8_config": section, "distributed_type": "FSDP"}
    assert from_accelerate(file) == AO


# objects, as Accelerate fills them in


@dataclass
class TERecipeKwargs:
    use_autocast_during_eval: bool | None = False
    margin: int | None = 0
    interval: int | None = 1
    fp8_format: str | None = "HYBRID"
    amax_history_len: int | None = 1024
    amax_compute_algo: str | None = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] | None = (False, False, False)
    use_mxfp8_block_scaling: bool | None = False

    def to_kwargs(self) -> dict[str, Any]:
        return {}  # leaves out what equals a default, which is how "most_recent" never arrives


@dataclass
class AORecipeKwargs:
    config: Any = None
    module_filter_func: Any = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None


@dataclass
class MSAMPRecipeKwargs:
    opt_level: str | None = "O2"


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    backend: str | None = "TE"


@pytest.mark.parametrize("kind", [TERecipeKwargs, FP8RecipeKwargs])
def test_objects_of_transformer_engine(kind: type) -> None:
    assert from_accelerate(kind()) == delayed()
    assert from_accelerate(kind(amax_compute_algo="max", margin=2)) == delayed(amax_compute_algo="max", margin=2)
    assert from_accelerate(kind(use_mxfp8_block_scaling=True, fp8_format="E4M3")) == ng.recipe(
        "mxfp8", evaluation="compute"
    )


def test_the_options_are_the_fields_of_the_objects() -> None:
    for backend, kind in (("TE", TERecipeKwargs), ("AO", AORecipeKwargs), ("MSAMP", MSAMPRecipeKwargs)):
        defaults = kind().__dict__
        assert set(compat.BACKENDS[backend]) == set(defaults)
        for name, default in defaults.items():
            assert default is None or compat.BACKENDS[backend][name].default == default


def test_objects_of_torchao() -> None:
    rows = AORecipeKwargs(config={"round_scales_to_power_of_2": True}, pad_inner_dim=True)
    casts = {role: ng.CastSpec(getattr(AO, role).format, scale=ng.CURRENT_POW2) for role in ("input", "weight")}
    expected = AO.replace(name="torchao", **casts, grad_output=ng.CastSpec(ng.formats.E5M2, scale=ng.CURRENT_POW2))
    assert from_accelerate(rows) == expected


@pytest.mark.parametrize(
    ("config", "level"),
    [
        ({"opt_level": "O1"}, 1),
        ({"fp8_opt_level": "O2"}, 2),
        ({"fp8_optimization_level": "O3"}, 3),
        ({"backend": "msamp"}, 2),
        (MSAMPRecipeKwargs(), 2),
        (MSAMPRecipeKwargs(opt_level="O3"), 3),
        (FP8RecipeKwargs(backend="MSAMP"), 2),
        (FP8RecipeKwargs(backend="MSAMP", opt_level="O1"), 1),
    ],
)
def test_levels_of_msamp(config: Any, level: int) -> None:
    assert from_accelerate(config) == ng.recipe(f"fp8_lm_o{level}")


# refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"margn": 1}, "fp8_config: unknown option 'margn'; did you mean 'margin'"),
        ({"backend": "TE", "amax_histroy_length": 1}, "unknown option 'amax_histroy_length'; did you mean 'amax_hist"),
        ({"backend": "AO", "pad_iner_dim": True}, "unknown option 'pad_iner_dim'; did you mean 'pad_inner_dim'"),
        ({"mixed_precison": "fp8"}, "unknown option 'mixed_precison'; did you mean 'mixed_precision'"),
        ({"mixed_precision": "bf16", "num_procesess": 2}, "no key 'num_procesess'; did you mean 'num_processes'"),
        ({"mixed_precision": "fp8", "fp8_confg": {}}, "no key 'fp8_confg'; did you mean 'fp8_config'"),
        ({"mixed_precision": "fp9"}, "mixed_precision='fp9' cannot be honoured"),
        ({"mixed_precision": "fp8"}, r"mixed_precision: fp8 without an fp8_config section: .* one of TE, AO, MSAMP"),
        ({"mixed_precision": "fp8", "fp8_config": {}}, "without an fp8_config section"),
        ({"mixed_precision": "bf16", "fp8_config": {"backend": "TE"}}, "would pass over the section; set mixed_prec"),
        ({"fp8_config": {"backend": "TE"}}, "fp8_config with mixed_precision=None"),
        ({"mixed_precision": "bf16", "downcast_bf16": "yes"}, "downcast_bf16='yes' cannot be honoured.* TPUs"),
        (
            {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "marign": 1}},
            "fp8_config: unknown option 'marign",
        ),
        ({"backend": "TEE"}, "backend='TEE' cannot be honoured: expected 'TE' or 'AO' or 'MSAMP'"),
        ({"backend": "NO"}, "backend='NO' cannot be honoured"),
        ({"backend": "TE", "opt_level": "O1"}, "'opt_level' is an option of backend MSAMP, and the backend is TE"),
        ({"backend": "AO", "margin": 1}, "'margin' is an option of backend TE, and the backend is AO"),
        ({"margin": 1, "pad_inner_dim": True}, "no backend has just these options: margin, pad_inner_dim; add backend"),
        ({}, "no backend has just these options: none"),
        ({"fp8_format": "E5M2"}, "fp8_format='E5M2' cannot .* refuses E5M2 in the forward pass"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo='mean' cannot be honoured: expected 'max' or 'most_recent'"),
        ({"amax_history_len": 16, "amax_history_length": 8}, "two names of one option, and differ: 16 and 8"),
        ({"override_linear_precision": "false,false,true"}, "expected three booleans"),
        ({"override_linear_precision": True, "backend": "TE"}, "expected three booleans"),
        ({"use_mxfp8_block_scaling": True, "amax_history_len": 16}, "amax_history_len=16 with use_mxfp8_block_scaling"),
        ({"use_mxfp8_block_scaling": True, "amax_compute_algo": "max"}, "blocks keep no history; leave it out"),
        ({"use_mxfp8_block_scaling": True, "margin": 1}, "margin=1 with use_mxfp8_block_scaling"),
        ({"use_mxfp8_block_scaling": True, "interval": 2}, "interval=2 with use_mxfp8_block_scaling"),
        ({"use_autocast_during_eval": "yes"}, "use_autocast_during_eval='yes' cannot be honoured"),
        ({"opt_level": "O4"}, "opt_level='O4' cannot be honoured: expected 'O1' or 'O2' or 'O3'"),
        (MSAMPRecipeKwargs(opt_level="O0"), "opt_level='O0' cannot be honoured: expected 'O1' or 'O2' or 'O3'"),
        (FP8RecipeKwargs(opt_level="O1"), "'opt_level' is an option of backend MSAMP, and the backend is TE"),
        (AORecipeKwargs(module_filter_func=print), "module_filter_func=.* name the layers"),
        (3, "expected a path, a mapping or one of its configurations, found int"),
        ({1: 2}, "expected names of options as keys, found 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ng.RecipeError, match=message):
        from_accelerate(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"mixed_precision: [fp8", "expected YAML as `accelerate config` writes it"),
        (b"\xff\xfe\x00", "expected YAML as `accelerate config` writes it"),
        (b"", "expected keys and values .* found None"),
        (b"- fp8\n", r"expected keys and values .* found \['fp8'\]"),
    ],
)
def test_files_that_hold_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ng.RecipeError, match=message):
        from_accelerate(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ng.RecipeError, match="nowhere.yaml: expected a file of `accelerate config`, found: No such"):
        from_accelerate(tmp_path / "nowhere.yaml")


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    path = written(tmp_path, "fp8", TE_SECTION.replace("margin", "margn"))
    with pytest.raises(ng.RecipeError, match=r"default_config.yaml: fp8_config: unknown option 'margn'; did you mean"):
        from_accelerate(path)


def test_a_path_that_no_file_can_have() -> None:
    with pytest.raises(ng.RecipeError, match="found: embedded null"):
        from_accelerate("config\0.yaml")
