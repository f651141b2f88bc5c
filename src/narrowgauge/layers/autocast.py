"""Autocast by recipe: the dtype of everything that narrowgauge does not run itself.

bfloat16 and float16 regions are torch.autocast without its weight cache, which keeps stale copies when a weight changes
in place inside one region.

float16 on a CPU: torch's products in float16 are hundreds of times slower than float32 ones on most CPUs, so inside
the region they are emulated: operands rounded to float16, products and attention in float32, the result rounded to
float16 with IEEE overflow. This holds for the calls of this thread inside the region. Activation checkpointing restores
torch.autocast in its recomputation but not this, so what it recomputes runs in torch's own float16, in both passes
where it is non-reentrant, in the second where it is reentrant: the dtypes are the same, the order of summation is not.
Converted layers are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.formats import FP16, FP32
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import Recipe

# the products among the ops that torch.autocast runs in the low dtype
PRODUCTS = frozenset(
    {
        torch.matmul, torch.mm, torch.mv, torch.bmm, torch.addmm, torch.addbmm, torch.baddbmm, torch.chain_matmul,
        torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.mm,
        torch.Tensor.mv, torch.Tensor.bmm, torch.Tensor.addmm, torch.Tensor.addbmm, torch.Tensor.baddbmm,
        F.linear, F.bilinear, F.scaled_dot_product_attention, F.multi_head_attention_forward,
        F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        torch.conv1d, torch.conv2d, torch.conv3d,
    }
)  # fmt: skip


def autocast(recipe: str | Recipe, device: torch.device | str | None = None) -> Any:
    """A region (context manager or decorator) in which unconverted ops run in the recipe's compute dtype.

    A converted linear layer returns that dtype inside. device: where the model is; left out, CUDA where there is one,
    else the CPU. With compute FP32 the region turns an outer autocast off; a recipe's `tf32` concerns converted layers,
    and other products follow torch's own setting. Raises RecipeError for an unknown recipe, and for a schedule that
    changes the compute dtype.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    resolved = library.recipe(recipe).resolve(device)
    if len({each.compute for _, each in resolved.phases}) > 1:
        raise RecipeError(
            f"recipe '{resolved.name}' has a schedule that changes the compute dtype, and a region has one: use "
            "autocast(recipe.at(steps)), or prepare(..., autocast=True), which follows the schedule"
        )
    return (
        _emulated_region(resolved) if emulates_products(resolved, device.type) else torch_region(resolved, device.type)
    )


def torch_region(recipe: Recipe, device_type: str) -> torch.autocast:
    """The torch.autocast of a resolved recipe on a type of device."""
    if recipe.compute is FP32:
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=recipe.compute_dtype, cache_enabled=False)


def emulates_products(recipe: Recipe, device_type: str) -> bool:
    """True where `EmulatedProducts` belongs inside the torch.autocast of a resolved recipe."""
    return recipe.compute is FP16 and device_type == "cpu"


@contextmanager
def _emulated_region(recipe: Recipe) -> Iterator[None]:
    with torch_region(recipe, "cpu"), EmulatedProducts():
        yield


class EmulatedProducts(TorchFunctionMode):
    """Inside torch.autocast to float16 on the CPU: products in float32 of operands rounded to float16."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # inside a nested region of another dtype, and inside our own ops, which turn autocast off, this one is silent
        if func not in PRODUCTS or not _casts_to_float16() or _is_checkpointed():
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            result = func(*_carried(args), **_carried(kwargs or {}))
        return result.half() if isinstance(result, Tensor) else result


def _casts_to_float16() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16


def _is_checkpointed() -> bool:
    """True inside a non-reentrant activation checkpoint, and inside its recomputation: both must save the same."""
    if torch.compiler.is_compiling():
        return False  # recomputation is then a part of the compiled graph
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


def _carried(value: Any) -> Any:
    """Floating tensors rounded to float16 and carried in float32; containers likewise; all else as it is."""
    if isinstance(value, Tensor):
        return value.half().float() if value.is_floating_point() and value.device.type == "cpu" else value
    if isinstance(value, (list, tuple)):
        return type(value)(_carried(each) for each in value)
    if isinstance(value, dict):
        return {key: _carried(each) for key, each in value.items()}
    return value
