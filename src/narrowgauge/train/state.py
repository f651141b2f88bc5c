"""Nested state (dicts, lists, numbers, tensors) as JSON beside named plain tensors, and back.

A tensor becomes {"$tensor": key}; tensors that are the same view of the same storage get one key, so that ties are
stored once. A QuantizedTensor becomes {"$quantized": ...}: keys of its codes, scale and amax, and what they mean; a
PackedTensor likewise {"$packed": ...}. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from narrowgauge.errors import CheckpointError
from narrowgauge.recipes.serialize import spec_from_dict, spec_to_dict
from narrowgauge.tensors.packed import PackedTensor
from narrowgauge.tensors.quantized import QuantizedTensor

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}


class Flattener:
    """Collects tensors under unique keys while it turns nested state into JSON.

    copies: True collects copies, which stay as they are when training goes on.
    """

    def __init__(self, *, copies: bool = False) -> None:
        self.copies = copies
        self.tensors: dict[str, torch.Tensor] = {}
        self._keys: dict[tuple, str] = {}
        self._seen: list[torch.Tensor] = []  # kept alive: another tensor at its address would be taken for a tie

    def flatten(self, value: Any, path: str) -> Any:
        """`value` as something JSON can hold. Raises CheckpointError, with the path, for what is not plain state."""
        if isinstance(value, QuantizedTensor):
            return {
                "$quantized": {
                    "codes": self._key(value.codes, f"{path}.codes"),
                    "dequant_scale": self._key(value.dequant_scale, f"{path}.dequant_scale"),
                    "amax": self._key(value.amax, f"{path}.amax"),
                    "spec": spec_to_dict(value.spec),
                    "dtype": str(value.dtype),
                }
            }
        if isinstance(value, PackedTensor):
            return {
                "$packed": {
                    "packed": self._key(value.packed, f"{path}.packed"),
                    "dequant_scale": self._key(value.dequant_scale, f"{path}.dequant_scale"),
                    "amax": self._key(value.amax, f"{path}.amax"),
                    "spec": spec_to_dict(value.spec),
                    "shape": list(value.shape),
                }
            }
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._key(value, path)}
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [self.flatten(item, f"{path}.{i}") for i, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"$tuple": [self.flatten(item, f"{path}.{i}") for i, item in enumerate(value)]}
        if isinstance(value, dict):
            return self._flatten_dict(value, path)
        if callable(getattr(value, "state_dict", None)):
            return self.flatten(value.state_dict(), path)
        raise CheckpointError(
            f"'{path}' is a {type(value).__name__}: expected tensors, numbers, strings, lists, dicts or an object with "
            "state_dict(): save what it holds as those"
        )

    def _flatten_dict(self, value: dict, path: str) -> Any:
        items = [(key, self.flatten(item, f"{path}.{key}" if path else str(key))) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(items)
        if all(isinstance(key, str | int) and not isinstance(key, bool) for key in value):
            return {"$items": [[key, item] for key, item in items]}  # JSON would turn the integers into strings
        raise CheckpointError(f"'{path}': expected keys that are strings or integers, found {list(value)[:3]}")

    def _key(self, tensor: torch.Tensor, path: str) -> str:
        if tensor.is_meta:
            raise CheckpointError(f"'{path}' is on the meta device: give it memory with to_empty(device=...) first")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise CheckpointError(f"'{path}' is a {type(tensor).__name__}: expected a plain tensor or QuantizedTensor")
        tensor = tensor.detach()
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and identity in self._keys:
            return self._keys[identity]
        if path in self.tensors:
            raise CheckpointError(f"two tensors would be stored as '{path}': rename one")
        self._keys[identity] = path
        self._seen.append(tensor)
        # a copy where the tensor is a view: safetensors refuses storages that overlap
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes and not self.copies
        self.tensors[path] = tensor.cpu() if whole else tensor.cpu().clone(memory_format=torch.contiguous_format)
        return path


def restore(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Rebuild what `Flattener.flatten` was given. Raises CheckpointError where JSON and tensors do not fit."""
    if isinstance(node, list):
        return [restore(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "$tensor" in node:
        return _tensor(node["$tensor"], tensors)
    if "$quantized" in node:
        parts = node["$quantized"]
        return QuantizedTensor(
            _tensor(parts["codes"], tensors),
            _tensor(parts["dequant_scale"], tensors),
            spec_from_dict(parts["spec"]),
            _DTYPES[parts["dtype"]],
            _tensor(parts["amax"], tensors),
        )
    if "$packed" in node:
        parts = node["$packed"]
        packed, dequant_scale, amax = (_tensor(parts[name], tensors) for name in ("packed", "dequant_scale", "amax"))
        return PackedTensor(packed, dequant_scale, amax, spec_from_dict(parts["spec"]), parts["shape"])
    if "$float" in node:
        return _FLOATS[node["$float"]]
    if "$tuple" in node:
        return tuple(restore(item, tensors) for item in node["$tuple"])
    if "$items" in node:
        return {key: restore(item, tensors) for key, item in node["$items"]}
    return {key: restore(item, tensors) for key, item in node.items()}


def _tensor(key: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    if key not in tensors:
        raise CheckpointError(f"tensor '{key}' is missing from the checkpoint")
    return tensors[key]
