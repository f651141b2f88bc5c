"""What this machine, its packages and its devices can do for a run: the facts behind `narrowgauge doctor`."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import ModuleType
from typing import Any

Facts = dict[str, Any]

# of those that no extra names: libraries that the package works beside, or is measured against
BESIDE = ("lightning", "gguf", "triton", "torchao", "bitsandbytes", "trackio", "wandb")
EXTRAS = ("core", "hf", "report", "tune", "beside")  # the order of the table
# what moves the speed or the reach of a run, by the environment
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
# the families of CPU features that products of narrow formats depend on
FEATURES = ("amx", "avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "bf16", "fp16", "i8mm", "sve")
PROGRAMS = {  # name: (names that it goes by, what for)
    "C++ compiler": (("g++", "c++", "clang++"), "torch.compile on a CPU"),
    "Chromium": (("chromium", "chromium-browser", "google-chrome"), "pictures of pages as PNG"),
}
TWIN = "torch operations"


def machine() -> Facts:
    """System, CPU, threads and GPUs."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    features = [name for name, present in capabilities.items() if present is True and name.startswith(FEATURES)]
    found: Facts = {
        "system": f"{platform.system()} {platform.machine()}",
        "CPU": cpu_name(),
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
        found[f"cuda:{index}"] = _gpu(index)
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def cpu_name() -> str:
    """As the maker calls it, where the system says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def _gpu(index: int) -> str:
    import torch

    try:
        properties = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, a device that is taken
        return f"does not start: {_first_line(error)}"
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, compute capability {capability}, {properties.total_memory / 2**30:.0f} GiB"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def packages() -> dict[str, Facts]:
    """Each package with the version found, what is needed of it and by which extra, and whether that holds."""
    found: dict[str, Facts] = {
        "python": _package(platform.python_version(), version_needed(), "core"),
        "narrowgauge": _package(version("narrowgauge"), "", "core"),
    }
    for name, (needed, extra) in requirements().items():
        found[name] = _package(_version(name), needed, extra)
    order = {extra: at for at, extra in enumerate(EXTRAS)}
    return dict(sorted(found.items(), key=lambda item: order[item[1]["extra"]]))


def requirements() -> dict[str, tuple[str, str]]:
    """{package: (versions needed, extra)} of this package's own declaration, without its tools for development."""
    needed: dict[str, tuple[str, str]] = dict.fromkeys(BESIDE, ("", "beside"))
    for line in requires("narrowgauge") or ():
        match = re.match(r"([\w.-]+)(?:\[[\w,]*\])?\s*([^;]*)", line)
        extra = re.search(r'extra == "([\w-]+)"', line)
        assert match is not None, line
        name, versions = match[1], match[2].strip()
        if extra is None or extra[1] in EXTRAS:
            needed[name] = versions, extra[1] if extra else "core"
        elif name in BESIDE:
            needed[name] = versions, "beside"
    return needed


def version_needed() -> str:
    """The versions of Python."""
    from importlib.metadata import metadata

    found = metadata("narrowgauge")
    return found["Requires-Python"] if "Requires-Python" in found else ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _package(found: str, needed: str, extra: str) -> Facts:
    return {"found": found or "not installed", "needs": needed, "extra": extra, "status": status_of(found, needed)}


def status_of(found: str, needed: str) -> str:
    """ "ok", "not installed", or what is wrong with a version: `needed` as pip writes it, e.g. "<2.15,>=2.11"."""
    if not found:
        return "not installed"
    from narrowgauge.integrations.requirements import numbers

    for bound in filter(None, needed.split(",")):
        sign, limit = bound[: len(bound) - len(bound.lstrip("<>=!~"))], bound.lstrip("<>=!~")
        if sign == ">=" and numbers(found) < numbers(limit):
            return f"too old: {limit} or newer is needed"
        if sign == "<" and numbers(found) >= numbers(limit):
            return f"too new: older than {limit} is needed"
    return "ok"


def devices() -> list[Any]:
    """The CPU, and every GPU."""
    import torch

    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def products() -> list[Facts]:
    """A row for every device and pair of operands that a named recipe multiplies there, with the GEMMs that do."""
    from narrowgauge.ops.casts import LinearCasts
    from narrowgauge.ops.matmul import GEMMS
    from narrowgauge.recipes.library import recipe, recipe_names

    rows: dict[tuple[str, str, str], Facts] = {}
    for device in devices():
        for name in recipe_names():
            casts = LinearCasts.of(recipe(name).resolve(device), quantized=True)
            for gemm in GEMMS:
                backend = casts.backend(gemm, device)
                row = {
                    "device": str(device),
                    "operands": " x ".join(dict.fromkeys(spec.short for spec in casts.along_the_sum(gemm))),
                    "gemms": [],
                    "recipes": [],
                    "runs": "native" if backend.native else "emulated",
                    "why": backend.reason,
                }
                found = rows.setdefault((row["device"], row["operands"], row["why"]), row)
                for key, value in (("gemms", gemm.name), ("recipes", name)):
                    if value not in found[key]:
                        found[key].append(value)
    return list(rows.values())


def kernels() -> list[Facts]:
    """Which kernels take what, on every device: Numba's on CPUs, Triton's on GPUs; each has a twin in torch operations,
    equal in bits, that takes what they do not."""
    import torch

    rows: list[Facts] = []
    for device in devices():
        found: Facts = {"device": str(device), "kernels": "all", "used": "none", "twin": TWIN, "why": ""}
        try:
            sample = torch.zeros(1 << 16, device=device)
        except (RuntimeError, AssertionError) as error:
            rows.append(found | {"why": f"the device does not start: {_first_line(error)}"})
            continue
        for what, path in _paths().items():
            used = _name_of(path(sample))
            why = "" if used != TWIN else "Triton is not installed" if device.type == "cuda" else "no kernel for it"
            rows.append(found | {"kernels": what, "used": used, "why": why})
    return rows


def _paths() -> dict[str, Callable[[Any], ModuleType | None]]:
    """{what: the function that chooses, as casts and steps themselves choose}."""
    from narrowgauge.numerics.companding import LINEAR
    from narrowgauge.numerics.formats import E4M3FN
    from narrowgauge.numerics.kernels import paths, wire

    return {
        "casts of whole tensors": lambda x: paths.fast_module(x, True),
        "casts in tiles": lambda x: paths.tile_module(x, True, E4M3FN, LINEAR, False),
        "Hadamard transform": lambda x: paths.hadamard_module(x, True),
        "rows on the wire": wire.module_for,
        "optimizer steps": _steps,
    }


def _steps(parameter: Any) -> ModuleType | None:
    """The kernels of optimizer steps on the parameter's device, as `optim.kernels.Plan` takes them."""
    from narrowgauge.numerics.kernels.paths import has_gpu_kernels

    if parameter.is_cpu:
        from narrowgauge.optim.kernels import cpu

        return cpu
    if has_gpu_kernels(parameter):
        from narrowgauge.optim.kernels import cuda

        return cuda
    return None


def _name_of(module: ModuleType | None) -> str:
    name = "" if module is None else module.__name__.rpartition(".")[2]
    if module is None or name.startswith("twin"):
        return TWIN
    return "Triton" if name.startswith("triton") or name == "cuda" else "Numba"


def collectives() -> list[Facts]:
    """The backends of torch.distributed, and which of them runs use."""
    import torch.distributed as dist

    if not dist.is_available():
        return [{"backend": "none", "available": False, "used": "", "why": "this torch is built without distributed"}]
    used = {"gloo": "ranks on CPUs", "nccl": "ranks on GPUs"}
    rows = []
    for name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
        here = dist.is_backend_available(name)
        why = "" if here else "this torch is built without it"
        rows.append({"backend": name, "available": here, "used": used.get(name, "never"), "why": why})
    return rows


def programs() -> list[Facts]:
    """Programs that some of the commands call."""
    return [
        {"program": name, "found": any(map(shutil.which, names)), "for": what}
        for name, (names, what) in PROGRAMS.items()
    ]


def everything() -> Facts:
    """All of it, as `doctor --json` prints it."""
    return {
        "machine": machine(),
        "packages": packages(),
        "products": products(),
        "kernels": kernels(),
        "collectives": collectives(),
        "programs": programs(),
    }


def _numba_threads() -> int:
    from numba import get_num_threads

    return get_num_threads()
