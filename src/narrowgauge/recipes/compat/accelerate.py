"""Recipes from what Hugging Face Accelerate is configured with: its files, and its recipe objects.

Source: Accelerate 1.15, utils/dataclasses.py, commands/launch.py, and the wizard in commands/config/cluster.py, which
writes `amax_history_length`, `amax_compute_algorithm` and `optimization_level` where the launcher reads other names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecipeError, closest
from narrowgauge.recipes import library
from narrowgauge.recipes.compat.options import Option, Options, fields_of, plain, read, refusal, unknown_kind
from narrowgauge.recipes.compat.torchao import from_torchao
from narrowgauge.recipes.fields import Evaluation
from narrowgauge.recipes.spec import Recipe

BOTH = (False, True)
LEVELS = ("O1", "O2", "O3")

FILE = {
    "mixed_precision": Option(None, "no: `fp32`; bf16, fp16: the recipe of that name; fp8: what `fp8_config` says",
                              only=(None, False, "no", "fp16", "bf16", "fp8")),
    "fp8_config": Option(None, "see below"),
    "fp16": Option(None, "true, in old files without `mixed_precision`: `fp16`", only=(None, *BOTH)),
    "downcast_bf16": Option(False, "refused if true", only=(False, "no"), remedy="it is for TPUs: leave it out"),
}  # fmt: skip
# keys of a file that do not speak of precision: they belong to the launcher, and stay its matter
NOT_OURS = (
    "compute_environment", "distributed_type", "use_cpu", "debug", "num_processes", "machine_rank", "num_machines",
    "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "main_training_function",
    "enable_cpu_affinity", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config",
    "mpirun_config", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm",
    "tpu_env", "dynamo_config", "dynamo_backend", "ec2_instance_type", "iam_role_name", "image_uri", "profile",
    "region", "base_job_name", "pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file",
    "sagemaker_metrics_file", "additional_args",
)  # fmt: skip


def _with_prefix(options: Options) -> dict[str, Option]:
    """The options, each also by the name that the launcher gives it: the section of a file may write either."""
    prefixed = {}
    for name, option in options.items():
        extra = [f"fp8_{each}" for each in (name, *option.aliases) if not each.startswith("fp8_")]
        prefixed[name] = replace(option, aliases=(*option.aliases, *(each for each in extra if each != name)))
    return prefixed


TE = _with_prefix({
    "use_autocast_during_eval": Option(False, "`evaluation`: same where true, else compute", only=BOTH),
    "margin": Option(0, "`margin`"),
    "interval": Option(1, "`interval`"),
    "fp8_format": Option("HYBRID", "HYBRID: `grad_output` E5M2; E4M3: all E4M3", only=("HYBRID", "E4M3"),
                         remedy="TransformerEngine itself refuses E5M2 in the forward pass", aliases=("format",)),
    "amax_history_len": Option(1024, "`amax_history_len`", aliases=("amax_history_length",)),
    "amax_compute_algo": Option("most_recent", "`amax_compute_algo`", only=("max", "most_recent"),
                                aliases=("amax_compute_algorithm",)),
    "override_linear_precision": Option((False, False, False), "`override_linear_precision`"),
    "use_mxfp8_block_scaling": Option(False, "true: recipe `mxfp8`, without the amax options", only=BOTH),
})  # fmt: skip
AO = {
    "config": Option(None, "what `from_torchao` makes of it"),
    "module_filter_func": Option(None, "refused unless None", only=(None,),
                                 remedy="name the layers: recipe.replace(include=..., exclude=...)"),
    **_with_prefix({
        "pad_inner_dim": Option(True, "nothing: sizes of any kind are taken as they are", only=BOTH),
        "enable_fsdp_float8_all_gather": Option(
            True, "refused if true in a file with `distributed_type: FSDP`; a warning where the type is not known; "
            "nothing with other types, which gather nothing", only=BOTH,
            remedy="this version shards no parameters: set it to false"),
    }),
}  # fmt: skip
MSAMP = _with_prefix({
    "opt_level": Option("O2", "O1: `fp8_lm_o1`; O2: `fp8_lm_o2`; O3: `fp8_lm_o3`", only=LEVELS,
                        aliases=("optimization_level",)),
})  # fmt: skip
BACKENDS: dict[str, Options] = {"TE": TE, "AO": AO, "MSAMP": MSAMP}
BACKEND = Option(None, "which of the tables below applies", only=tuple(BACKENDS), aliases=("fp8_backend",))
# classes of Accelerate -> backend; FP8RecipeKwargs says its own
OBJECTS: dict[str, str | None] = {
    "TERecipeKwargs": "TE", "AORecipeKwargs": "AO", "MSAMPRecipeKwargs": "MSAMP", "FP8RecipeKwargs": None,
}  # fmt: skip
_UPPER = {"backend", "fp8_format"}  # as Accelerate reads them, in any case
_LOWER = {"mixed_precision", "amax_compute_algo"}


def from_accelerate(config: Any) -> Recipe:
    """The recipe of an Accelerate configuration.

    config: the path of a file that `accelerate config` wrote; what such a file holds, as a mapping, or its `fp8_config`
    section; a TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs or FP8RecipeKwargs, or a mapping of its fields. What is
    left out has the default that Accelerate documents. Keys of a file that do not speak of precision are the launcher's
    and are left to it; those that Accelerate does not know are refused.

    Raises RecipeError for a file that cannot be read, an unknown key, naming the closest, keys that contradict each
    other, and a value that cannot be honoured, with the remedy.
    """
    what = "fp8_config"
    if isinstance(config, str | os.PathLike):
        what, config = str(config), _load(Path(config))
    if not isinstance(config, Mapping):
        kind = type(config).__name__
        if kind not in OBJECTS:
            raise unknown_kind("Accelerate", config, OBJECTS, "a path, a mapping")
        return _from_section(kind, _given(config), OBJECTS[kind], None)
    given = _given(config)
    if any(key in FILE or key in NOT_OURS for key in given) or what != "fp8_config":
        return _from_file("accelerate config" if what == "fp8_config" else what, given)
    return _from_section(what, given, None, None)


def _given(config: Any) -> dict[str, Any]:
    """What is set; Accelerate writes None for what is not. Words in the case in which Accelerate compares them."""
    aliases = {alias: name for options in BACKENDS.values() for name, option in options.items()
               for alias in option.aliases} | {alias: "backend" for alias in BACKEND.aliases}  # fmt: skip
    given = {key: plain(value) for key, value in fields_of(config).items() if value is not None}
    for key, value in given.items():
        name = aliases.get(key, key)
        if isinstance(value, str) and name in _UPPER | _LOWER:
            given[key] = value.upper() if name in _UPPER else value.lower()
    return given


def _load(path: Path) -> Any:
    import yaml  # on first use: most recipes come from no file

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))  # a JSON file is YAML, too
    except OSError as error:
        raise RecipeError(f"{path}: expected a file of `accelerate config`, found: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no UTF-8, a path with a null character
        raise RecipeError(f"{path}: expected YAML as `accelerate config` writes it, found: {error}") from error
    if not isinstance(loaded, Mapping):
        raise RecipeError(f"{path}: expected keys and values as `accelerate config` writes them, found {loaded!r:.60}")
    return loaded


def _from_file(what: str, given: dict[str, Any]) -> Recipe:
    for key in given:
        if key not in FILE and key not in NOT_OURS:
            raise RecipeError(f"{what}: Accelerate has no key '{key}'{closest(key, [*FILE, *NOT_OURS])}")
    values = read(what, {key: value for key, value in given.items() if key in FILE}, FILE)
    precision = values["mixed_precision"]
    if precision is None and values["fp16"]:
        precision = "fp16"
    section = values["fp8_config"]
    if precision != "fp8":
        if section:
            raise RecipeError(
                f"{what}: fp8_config with mixed_precision={precision!r}: Accelerate would pass over the section; set "
                "mixed_precision: fp8, or leave fp8_config out"
            )
        return library.recipe(precision if precision in ("bf16", "fp16") else "fp32")
    if not isinstance(section, Mapping) or not section:
        raise RecipeError(
            f"{what}: mixed_precision: fp8 without an fp8_config section: Accelerate would take whichever library is "
            f"installed; say which, e.g. fp8_config: {{backend: TE}}, or one of {', '.join(BACKENDS)}"
        )
    return _from_section(f"{what}: fp8_config", _given(section), None, given.get("distributed_type"))


def _from_section(what: str, given: dict[str, Any], backend: str | None, distributed: str | None) -> Recipe:
    if backend is None:
        named = {key: given.pop(key) for key in ("backend", *BACKEND.aliases) if key in given}
        backend = str(read(what, named, {"backend": BACKEND})["backend"] or _backend_of(what, given))
    own = _names(BACKENDS[backend])
    for key, value in list(given.items()):
        others = [(other, options) for other, options in BACKENDS.items() if key in _names(options)]
        if key in own or not others:
            continue
        other, options = others[0]
        if what == "FP8RecipeKwargs" and value == options[key].default:
            del given[key]  # it has the options of both its backends, set or not
            continue
        raise RecipeError(
            f"{what}: '{key}' is an option of backend {other}, and the backend is {backend}: leave it out, or set "
            f"backend: {other}"
        )
    return _READERS[backend](what, read(what, given, BACKENDS[backend]), distributed)


_GATHER = "enable_fsdp_float8_all_gather"


def _names(options: Options) -> set[str]:
    return {name for option, entry in options.items() for name in (option, *entry.aliases)}


def _backend_of(what: str, given: Mapping[str, Any]) -> str:
    """The only backend that has all the given options."""
    known = {name for options in BACKENDS.values() for name in _names(options)}
    for key in given:
        if key not in known:
            raise RecipeError(f"{what}: unknown option '{key}'{closest(key, [*known, *FILE, 'backend'])}")
    having = [backend for backend, options in BACKENDS.items() if all(key in _names(options) for key in given)]
    if len(having) != 1:
        raise RecipeError(
            f"{what}: no backend has just these options: {', '.join(given) or 'none'}; add backend, one of "
            f"{', '.join(BACKENDS)}"
        )
    return having[0]


def _te(what: str, values: dict[str, Any], distributed: str | None) -> Recipe:
    evaluation = Evaluation.SAME if values["use_autocast_during_eval"] else Evaluation.COMPUTE
    override = values["override_linear_precision"]
    override = (False, False, False) if override is False else override  # older wizards: the question answered with no
    if not values["use_mxfp8_block_scaling"]:
        return library.fp8_delayed(
            margin=values["margin"],
            interval=values["interval"],
            fp8_format=values["fp8_format"],
            amax_history_len=values["amax_history_len"],
            amax_compute_algo=values["amax_compute_algo"],
            override_linear_precision=override,
        ).replace(evaluation=evaluation)
    for name in ("margin", "interval", "amax_history_len", "amax_compute_algo"):
        if values[name] != TE[name].default:
            raise RecipeError(
                f"{what}: {name}={values[name]!r} with use_mxfp8_block_scaling: blocks keep no history; leave it out"
            )
    return library.mxfp8(values["fp8_format"]).replace(override_linear_precision=override, evaluation=evaluation)


def _ao(what: str, values: dict[str, Any], distributed: str | None) -> Recipe:
    config = values["config"]
    if config is None:
        if values[_GATHER] and distributed == "FSDP":
            raise refusal(what, _GATHER, True, replace(AO[_GATHER], only=(False,)))
        # with a type that is known and no FSDP nothing is gathered, whatever the option says
        config = {"pad_inner_dim": values["pad_inner_dim"], _GATHER: values[_GATHER] and distributed is None}
    # Accelerate keeps the first and the last linear layer, the head among them
    return from_torchao(config).replace(exclude=(), first_last=(1, 1))


def _msamp(what: str, values: dict[str, Any], distributed: str | None) -> Recipe:
    return library.recipe(f"fp8_lm_{values['opt_level'].lower()}")


_READERS: dict[str, Callable[[str, dict[str, Any], str | None], Recipe]] = {"TE": _te, "AO": _ao, "MSAMP": _msamp}
