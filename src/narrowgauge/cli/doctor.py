"""`narrowgauge doctor`: what this machine does natively, what it emulates, and why."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from narrowgauge.cli.arguments import Parser

PACKAGES = (
    "narrowgauge", "torch", "numpy", "numba", "safetensors", "tokenizers",
    "transformers", "datasets", "pyarrow", "tensorboard", "torchao", "triton",
)  # fmt: skip
# what moves the speed or the reach of a run, by the environment
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
# the families of CPU features that products of narrow formats depend on
FEATURES = ("amx", "avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "bf16", "fp16", "i8mm", "sve")


def doctor(argv: Sequence[str]) -> int:
    """Print versions, devices, and for every pair of operands that a recipe multiplies: native or emulated, and why."""
    parser = Parser(
        "doctor",
        "What this machine does natively, what it emulates, and why.\n"
        "Emulated: the same codes and scales, multiplied in a wider format that holds them exactly.",
        ["narrowgauge doctor", "narrowgauge doctor --json"],
    )
    parser.add_json_option()
    arguments = parser.parse(argv)

    from narrowgauge.cli.console import print_json, print_table

    report = {"machine": _machine(), "packages": _packages(), "products": _products()}
    if arguments.json:
        print_json(report)
        return 0
    print_table("machine", ["", ""], list(report["machine"].items()))
    print_table("packages", ["", ""], list(report["packages"].items()))
    columns = ["device", "operands", "recipes", "runs", "why"]
    rows = [row | {"recipes": ", ".join(row["recipes"])} for row in report["products"]]
    print_table("products of linear layers", columns, [[row[c] for c in columns] for row in rows])
    return 0


def _machine() -> dict[str, Any]:
    import torch

    capabilities = torch.cpu.get_capabilities()
    features = [name for name, present in capabilities.items() if present is True and name.startswith(FEATURES)]
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "CPU features": " ".join(sorted(features)),
        "cores": os.cpu_count() or 0,
        "torch threads": torch.get_num_threads(),
        "torch inter-op threads": torch.get_num_interop_threads(),
        "numba threads": _numba_threads(),
    }
    if not torch.cuda.is_available():
        found["CUDA"] = "no device" if torch.version.cuda else "no device, and this torch is built without CUDA"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _numba_threads() -> int:
    from numba import get_num_threads

    return get_num_threads()


def _packages() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _products() -> list[dict[str, Any]]:
    """A row for every device and pair of operands that a named recipe multiplies there."""
    import torch

    from narrowgauge.ops.casts import LinearCasts
    from narrowgauge.ops.matmul import GEMMS
    from narrowgauge.recipes.library import recipe, recipe_names

    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for device in devices:
        for name in recipe_names():
            casts = LinearCasts.of(recipe(name).resolve(device), quantized=True)
            for gemm in GEMMS:
                backend = casts.backend(gemm, device)
                row = {
                    "device": str(device),
                    "operands": " x ".join(dict.fromkeys(spec.short for spec in casts.along_the_sum(gemm))),
                    "recipes": [],
                    "runs": "native" if backend.native else "emulated",
                    "why": backend.reason,
                }
                found = rows.setdefault((row["device"], row["operands"], row["why"]), row)["recipes"]
                if name not in found:
                    found.append(name)
    return list(rows.values())
