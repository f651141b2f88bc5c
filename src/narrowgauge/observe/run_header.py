"""What the first row of a journal says: where a run runs, how layers multiply, what each role is cast to."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.layers.gradient_hooks import KeptGradient
from narrowgauge.layers.kinds import root_of
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.layers.report import report
from narrowgauge.numerics.companding import LINEAR, limit_of, smallest_of
from narrowgauge.numerics.formats import Format, of_dtype
from narrowgauge.numerics.rounding import NEAREST_EVEN, STOCHASTIC
from narrowgauge.numerics.scaling import NONE, Delayed, ScaleRule
from narrowgauge.optim.parameters import FormattedOptimizer
from narrowgauge.optim.replace import current
from narrowgauge.recipes.spec import OPERAND_ROLES, CastSpec
from narrowgauge.tensors.cast import HALF
from narrowgauge.tensors.quantized import QuantizedTensor

_WEIGHT = ".weight"
_DESCRIBED = (*HALF, torch.float32)


def header(model: nn.Module, optimizer: Optimizer | None, recipe: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """The fields of a journal's first row that follow from a prepared model: where it runs, recipe, layers, formats.

    recipe: as `recipes.serialize.to_dict` writes it, or its name.
    """
    model = root_of(model)
    return {
        "device": str(_device_of(model) or "cpu"),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "environment": environment(model),
        "recipe": recipe,
        "conversion": conversion(model),
        "formats": formats(model, optimizer),
    }


def environment(model: nn.Module | None = None) -> dict[str, str]:
    """What a run's numbers and speed depend on, without anything private: no name of a user or host, and no path."""
    device = None if model is None else _device_of(model)
    found = {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }
    if device is not None and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found |= {"gpu": f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"}
        found |= {"cuda": str(torch.version.cuda)}
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found["processes"] = str(torch.distributed.get_world_size())
    return found


def _device_of(model: nn.Module) -> torch.device | None:
    """Of the first parameter; None: it has none."""
    return next((p.device for p in model.parameters()), None)


def conversion(model: nn.Module) -> list[dict[str, Any]]:
    """One entry a layer, see `narrowgauge.report`; casts: {role: short text}, {} for a layer that casts nothing."""
    modules = dict(model.named_modules())
    rows = []
    for row in report(model):
        casts = {role: spec.short for role, spec in _operands(modules[row.name]).items()}
        rows.append(
            {"name": row.name, "status": row.status, "reason": row.reason, "backend": row.backend, "casts": casts}
        )
    return rows


def formats(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """{layer: {role: {"format", "granularity", "scale", "max", "min"}}}: what is cast, and the range of its format.

    max, min: the largest and the smallest positive value that a code stands for, but for the scale. "rounding" and
    "companding": only where they are others than to the nearest, and none. Of parameters also "master": the format of
    what completes or replaces them at the update, where there is such a thing. Layers of parameters: see `layer_of`.
    Optimizer states: of narrowgauge.optim's.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, module in model.named_modules():
        for role, spec in _operands(module).items():
            found.setdefault(name, {})[role] = _described(spec)
    own = current(optimizer) if optimizer is not None else None
    own = own if isinstance(own, FormattedOptimizer) else None
    held = set(own.parameters()) if own is not None else set()
    for name, p in model.named_parameters():
        mine = own if p in held else None
        for role, spec in _kept(p, mine).items():
            found.setdefault(layer_of(name), {})[role] = _described(spec)
        master = None if mine is None else mine.formats_of(p).master
        if master is not None and (p.dtype in HALF or isinstance(p.data, QuantizedTensor)):
            found[layer_of(name)]["param"]["master"] = master.format.name
    return found


def layer_of(parameter: str) -> str:
    """The layer that a parameter's measures stand under: its name without a final ".weight"."""
    return parameter.removesuffix(_WEIGHT)


def _operands(module: nn.Module) -> dict[str, CastSpec]:
    if not (isinstance(module, RecipeLayer) and module.recipe is not None and module.quantized):
        return {}
    return {role: getattr(module.training_casts, role) for role in OPERAND_ROLES}


def _kept(p: Tensor, optimizer: FormattedOptimizer | None) -> dict[str, CastSpec]:
    """What a parameter, its gradient and its optimizer state are kept as."""
    if p.dtype not in _DESCRIBED:
        return {}
    found = {"param": p.data.spec if isinstance(p.data, QuantizedTensor) else CastSpec(of_dtype(p.dtype))}
    if not p.requires_grad:
        return found
    owner = KeptGradient.of(p)
    found["grad"] = CastSpec(of_dtype(p.grad_dtype or p.dtype)) if owner is None else owner.spec
    if optimizer is not None:
        kept, group = optimizer.formats_of(p), optimizer.place_of(p).group
        if kept.stochastic_rounding and kept.master is None and p.dtype is torch.bfloat16:
            found["param"] = dataclasses.replace(found["param"], rounding=STOCHASTIC)
        for name in optimizer.moment_names(group):
            role = optimizer.moments[name]
            found[role] = kept.of_moment(role, p.numel())
    return found


def _described(spec: CastSpec) -> dict[str, Any]:
    scale = "delayed" if isinstance(spec.scale, Delayed) else "none" if spec.scale is NONE else _name(spec.scale)
    fmt: Format = spec.format
    found = {
        "format": fmt.name,
        "granularity": str(spec.granularity),
        "scale": scale,
        "max": limit_of(fmt, spec.companding),
        "min": smallest_of(fmt, spec.companding),
    }
    curve = {} if spec.companding is LINEAR else {"companding": spec.companding.value}
    return found | curve | ({} if spec.rounding is NEAREST_EVEN else {"rounding": spec.rounding.value})


def _name(scale: Any) -> str:
    assert isinstance(scale, ScaleRule)
    return scale.value
