"""`accelerate launch` with a file of `accelerate config`, and what such files say about FP8."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import accelerate_script as script
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState

from narrowgauge.integrations.accelerate import Accelerator

NAMES = ("fp32", "fp8_delayed", "narrow8", "shard-fp32", "shard-narrow8", "shard-fp8_lm_o3")
# as `accelerate config` writes it for one machine. Of several processes accelerate starts on CPUs only those of MPI, so
# the file speaks of GPUs, and the script says cpu=True
LAUNCH = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no", "enable_cpu_affinity": False, "gpu_ids": "all", "machine_rank": 0,
    "main_training_function": "main", "mixed_precision": "no", "num_machines": 1, "num_processes": 2,
    "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False,
    "use_cpu": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_state() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_processes_that_accelerate_launches_train_as_one(tmp_path: Path) -> None:
    config = tmp_path / "default_config.yaml"
    config.write_text(yaml.safe_dump(LAUNCH | {"main_process_port": free_port()}))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), script.__file__]
    started = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning:narrowgauge"}
    done = subprocess.run([*command, str(tmp_path), *NAMES], env=started, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in NAMES:
        recipe = name.removeprefix(script.SHARD)
        first, second = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in (0, 1))
        assert first == second and first["processes"] == 2
        whole = script.train(name, tmp_path / "whole")
        assert whole["processes"] == 1
        assert len(first["losses"]) == len(whole["losses"]) == script.STEPS * script.ACCUMULATION
        progress = whole["losses"][0] - whole["losses"][-1]
        assert progress > 0.1
        # sums in another order; or other roundings of each gradient, at most by 1/16 of it: scales go by half a batch
        allowed = 1e-5 if recipe == "fp32" else progress / 16
        assert first["losses"] == pytest.approx(whole["losses"], abs=allowed), name
        assert first["norms"] == pytest.approx(whole["norms"], rel=1e-4 if recipe == "fp32" else 1 / 16), name
        kept = 64 * 64 + 96 * 64 * 2  # values of the weights that are large enough for 8 bits
        if name == "narrow8":
            narrow = sum(size for dtype, size in first["sent"].items() if "float8" in dtype or "int8" in dtype)
            assert kept * script.STEPS <= narrow <= 1.05 * kept * script.STEPS * 129 / 128
        resume_alone(recipe, tmp_path / name, first["bits"])


def resume_alone(recipe: str, folder: Path, bits: list[int]) -> None:
    """What two processes have saved is loaded by one."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, recipe=recipe)
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, 64), torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.GELU(),
        torch.nn.Linear(96, 64),
    )  # fmt: skip
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.load_state(str(folder))
    state = accelerator.get_state_dict(prepared)
    assert [int(value.view(torch.int32).sum(dtype=torch.int64)) for value in state.values()] == bits
