"""Weights from safetensors files that other programs wrote, in 8, 16 or 32 bits, into any model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from narrowgauge.errors import CheckpointError
from narrowgauge.tensors.cast import FLOATING
from narrowgauge.tensors.fp8_weights import BLOCK, dequantize_state

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # names the files of a model that is in several
CONFIG = "config.json"
# how files begin that torch.save or pickle wrote: a zip archive, and pickle's protocol mark
_PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

Source = str | os.PathLike[str] | Mapping[str, Tensor]


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_weights` did with names. ignored: left out, and why. missing, unexpected: as torch reports them."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)


def load_weights(
    source: Source, model: nn.Module, *, strict: bool = True, block: tuple[int, int] | None = None
) -> LoadedWeights:
    """Load weights, by their full values, into a plain or a prepared model, in place.

    source: a safetensors file, a folder as Hugging Face lays it out (`model.safetensors`, or an index and its files),
    or a state dict. Weights in FP8 are dequantized by the scales beside them, see `tensors.fp8_weights`; then each
    parameter is cast to what the model stores. An optimizer of ours notices, and takes masters anew from the
    parameters at its next step.

    strict: missing and unexpected names are errors; False reports them. A weight in FP8 without its scale is an error
    either way. block: (rows, columns) of FP8 blocks; None: `weight_block_size` of the folder's config.json, or 128x128.

    Raises CheckpointError for a source that does not fit, is damaged, or holds pickled code.
    """
    model = getattr(model, "_orig_mod", model)
    state, found_block, where = _read(source)
    own = model.state_dict()
    wide = dequantize_state(state, block or found_block, own)
    _check_codes(wide.state, own)
    try:
        result = model.load_state_dict(_with_ties(wide.state, model), strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"{where} does not fit the model: {error}; build the model with the same configuration"
            + ("" if "size mismatch" in str(error) else ", or pass strict=False to load what fits")
        ) from error
    return LoadedWeights(list(result.missing_keys), list(result.unexpected_keys), wide.ignored)


def is_weights(path: Path) -> bool:
    """True for a file, and for a folder of weights that is no checkpoint of ours."""
    return path.is_file() or (path / INDEX).is_file() or ((path / SINGLE).is_file() and (path / CONFIG).is_file())


def refuse_pickles(path: Path) -> None:
    """Raise CheckpointError for a file that torch.save or pickle wrote: reading it could run code."""
    with path.open("rb") as file:
        begins = file.read(4)
    if begins.startswith(_PICKLED):
        raise CheckpointError(
            f"{path}: expected safetensors, found pickled data, which can run code when it is read: convert it where "
            "you trust it, with safetensors.torch.save_file(torch.load(file, weights_only=True), new_file)"
        )


def _read(source: Source) -> tuple[dict[str, Tensor], tuple[int, int], str]:
    """(tensors, FP8 block, what to call the source)."""
    if isinstance(source, Mapping):
        return dict(source), BLOCK, "the state dict"
    path = Path(source)
    if not path.is_dir():
        return _read_file(path), BLOCK, str(path)
    block = _block_size(path)
    if (path / INDEX).is_file():
        state: dict[str, Tensor] = {}
        for file in _indexed(path):
            state |= _read_file(file)
        return state, block, str(path)
    if not (path / SINGLE).is_file():
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
        hint = f", but {', '.join(others)}, which may hold pickled code: convert that to safetensors" if others else ""
        raise CheckpointError(f"{path}: expected {SINGLE} or {INDEX}, found none{hint}")
    return _read_file(path / SINGLE), block, str(path)


def _read_file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a safetensors file, found none")
    refuse_pickles(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file, found {error}: is it whole?") from error


def _indexed(path: Path) -> list[Path]:
    try:
        names = set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        files = [path / name for name in sorted(names)]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX}: expected a weight_map of names to files, found {error!r}") from error
    outside = [file for file in files if file.parent != path]
    if outside:
        raise CheckpointError(f"{path / INDEX}: expected files of its own folder, found {outside[0]}")
    return files


def _block_size(path: Path) -> tuple[int, int]:
    """What config.json says of FP8 blocks. Raises CheckpointError where that is no pair of positive numbers."""
    if not (path / CONFIG).is_file():
        return BLOCK
    try:
        config: Any = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        size = (config.get("quantization_config") or {}).get("weight_block_size") or BLOCK
        rows, columns = (int(n) for n in size)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / CONFIG}: expected weight_block_size: [rows, columns], found {error}") from error
    if rows < 1 or columns < 1:
        raise CheckpointError(f"{path / CONFIG}: expected a weight_block_size of at least 1, found {size}")
    return rows, columns


def _check_codes(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError where codes of a format that is not known here would become a floating parameter."""
    for name, value in state.items():
        target = own.get(name)
        if isinstance(target, Tensor) and target.dtype in FLOATING and value.dtype not in FLOATING:
            raise CheckpointError(
                f"'{name}': expected floating values, or FP8 with a scale, found {value.dtype}, the codes of a format "
                "that is not known here: dequantize it first"
            )


def names_of_parameters(model: nn.Module) -> list[list[str]]:
    """Names of every parameter, tied ones together."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _with_ties(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The state with every name of a tied parameter, of which transformers keeps one."""
    for tied in names_of_parameters(model):
        held = next((name for name in tied if name in state), None)
        if held is not None:
            state |= {name: state[held] for name in tied if name not in state}
    return state
