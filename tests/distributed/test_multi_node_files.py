"""The scripts for several machines ask for what they start: nodes, processes, ports and layouts fit together."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from narrowgauge.cli.config import parse_arguments
from narrowgauge.observe import journal

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "examples" / "multi_node"
ECHO = '#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n'


@pytest.fixture
def stubs(tmp_path):
    """A folder with programs in place of torchrun and Slurm's: torchrun prints its arguments, a line each."""
    programs = {
        "torchrun": ECHO,
        "scontrol": "#!/usr/bin/env bash\nprintf 'node%d\\n' {7..20000}\n",  # more than a pipe holds
        "srun": '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(words: list[str], stubs: Path, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, env={"PATH": path, **environment})


def run_script(script: str, stubs: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(["bash", str(FILES / script), *words], stubs, **environment)


def check(words: list[str], nodes: int, per_node: int, endpoint: str):
    """Read torchrun's arguments by its own parser, and the program's by ours; both ask for as many processes."""
    asked = get_args_parser().parse_args(words)
    assert asked.module and asked.training_script == "narrowgauge"
    assert (asked.nnodes, asked.nproc_per_node) == (str(nodes), str(per_node))
    assert (asked.rdzv_backend, asked.rdzv_endpoint) == ("c10d", endpoint)
    command, *rest = asked.training_script_args
    assert command == "train"
    config = parse_arguments(rest).config
    config.check()
    assert config.parallel.ranks == nodes * per_node
    return asked, config


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_bash(script):
    done = subprocess.run(["bash", "-n", str(FILES / script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access(FILES / script, os.X_OK) == (script == "torchrun.sh")


def test_torchrun_is_started_with_what_the_machine_is_told(stubs):
    words = ("train", "--parallel.data", "2", "--parallel.shard", "2", "--recipe_fields", "{tf32: true}")
    done = run_script("torchrun.sh", stubs, *words, HEAD="node0", NODES="2", PER_NODE="2")
    assert done.stderr == ""
    asked, config = check(done.stdout.splitlines(), 2, 2, "node0:29400")
    assert asked.max_restarts == 3 and asked.local_addr is None and asked.rdzv_conf == ""
    assert config.recipe_fields == {"tf32": True}  # one word, blanks and all


@pytest.mark.parametrize("own, hosts", [("10.0.0.1", "true"), ("10.0.0.2", "false")])
def test_a_machine_with_an_address_of_its_own_says_whether_all_meet_there(stubs, own, hosts):
    done = run_script("torchrun.sh", stubs, "train", "--parallel.data", "2", HEAD="10.0.0.1", NODES="2", ADDRESS=own)
    asked, _ = check(done.stdout.splitlines(), 2, 1, "10.0.0.1:29400")
    assert asked.local_addr == own and asked.rdzv_conf == f"is_host={hosts}"


@pytest.mark.parametrize("given", [{"HEAD": "node0"}, {"NODES": "2"}])
def test_a_value_that_is_missing_is_named(stubs, given):
    done = run_script("torchrun.sh", stubs, "train", **given)
    assert done.returncode != 0 and done.stdout == ""
    assert {"HEAD", "NODES"} - set(given) == {name for name in ("HEAD", "NODES") if f" {name}:" in done.stderr}


def slurm_options() -> dict[str, str]:
    lines = (FILES / "slurm.sbatch").read_text().splitlines()
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))


def slurm(stubs: Path, folder: Path) -> list[str]:
    """What torchrun is told on a node, with the job's working directory `folder`."""
    (folder / "examples").symlink_to(ROOT / "examples")
    options = slurm_options()
    environment = {
        "SLURM_JOB_ID": "31337", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": options["nodes"],
        "SLURM_GPUS_ON_NODE": options["gpus-per-node"], "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
    }  # fmt: skip
    done = run(["bash", str(FILES / "slurm.sbatch")], stubs, folder, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_slurm_starts_one_torchrun_a_node_and_one_process_a_gpu(stubs, tmp_path):
    options = slurm_options()
    nodes, gpus = int(options["nodes"]), int(options["gpus-per-node"])
    assert options["ntasks-per-node"] == "1" and "requeue" in options
    asked, config = check(slurm(stubs, tmp_path), nodes, gpus, f"node7:{20000 + 31337 % 20000}")
    assert config.parallel.shard == gpus  # within a node: the fast links
    assert config.name == asked.rdzv_id == "slurm-31337"


def test_a_requeued_slurm_job_goes_on_with_its_run(stubs, tmp_path):
    (tmp_path / "runs" / "slurm-31337").mkdir(parents=True)
    (tmp_path / "runs" / "slurm-31337" / "config.yaml").touch()
    asked = get_args_parser().parse_args(slurm(stubs, tmp_path))
    assert asked.training_script_args == ["resume", "runs/slurm-31337"]


def kubernetes() -> tuple[dict, dict]:
    service, job = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    return service, job


def pod_says(stubs: Path, folder: Path) -> list[str]:
    """What torchrun is told in a pod whose volume is `folder`."""
    (container,) = kubernetes()[1]["spec"]["template"]["spec"]["containers"]
    words = [word.replace("/shared/", f"{folder}/") for word in (*container["command"], *container["args"])]
    done = run(words, stubs, folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_kubernetes_gives_every_pod_a_name_and_its_part(stubs, tmp_path):
    service, job = kubernetes()
    headless, spec = service["spec"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"]
    assert headless["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert spec["completionMode"] == "Indexed" and pod["restartPolicy"] == "OnFailure"
    assert pod["subdomain"] == service["metadata"]["name"]
    nodes, gpus = spec["completions"], container["resources"]["limits"]["nvidia.com/gpu"]
    assert spec["parallelism"] == nodes  # all pods at once
    port = headless["ports"][0]["port"]
    # what an indexed job calls its first pod, in the service's domain
    endpoint = f"{job['metadata']['name']}-0.{pod['subdomain']}:{port}"
    asked, config = check(pod_says(stubs, tmp_path), nodes, gpus, endpoint)
    # a decision between train and resume is one for all pods only where they all start anew
    assert asked.max_restarts == 0
    assert config.path == tmp_path / "runs" / "kubernetes"
    assert [p["containerPort"] for p in container["ports"]] == [port]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert mounts == {"shared": "/shared", "memory": "/dev/shm"}
    assert all(isinstance(variable["value"], str) for variable in container["env"])


def test_pods_that_are_started_again_go_on_with_their_run(stubs, tmp_path):
    run_folder = tmp_path / "runs" / "kubernetes"
    run_folder.mkdir(parents=True)
    (run_folder / "config.yaml").touch()
    asked = get_args_parser().parse_args(pod_says(stubs, tmp_path))
    assert asked.training_script_args == ["resume", str(run_folder)]


def two_nodes() -> Any:
    """`benchmarks/namespaces.py`, or a skip that says what this machine lacks."""
    namespaces = runpy.run_path(str(ROOT / "benchmarks" / "namespaces.py"))
    if reason := namespaces["missing"]():
        pytest.skip(f"no two nodes on this machine: {reason}")
    return namespaces["two_nodes"]("1gbit")


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_nodes_train_one_run(tmp_path):
    command = (
        "train --name both --device cpu --parallel.data 2 --steps 3 --model.layers 1 --model.width 64 --model.heads 2 "
        "--model.kv_heads 2 --model.context 64 --data.tokenizer bytes --data.max_bytes 100000 --batch_size 2 "
        "--eval_batches 1 --sample_tokens 0"
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with two_nodes() as nodes:
        processes = [
            subprocess.Popen(
                node.command([str(FILES / "torchrun.sh"), *command.split()]), cwd=tmp_path, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={
                    **node.environment(), "PATH": path, "HEAD": nodes[0].address, "ADDRESS": node.address,
                    "NODES": "2", "RESTARTS": "0", "OMP_NUM_THREADS": "1",
                },
            )
            for node in nodes
        ]  # fmt: skip
        told = [process.communicate(timeout=300)[0] for process in processes]
        sent = [node.sent_bytes() for node in nodes]
    assert [process.returncode for process in processes] == [0, 0], told
    steps = list(journal.read(tmp_path / "runs" / "both" / "journal.jsonl").of_kind("step"))
    assert [row["step"] for row in steps] == [1, 2, 3]
    parameters = 86_336
    assert all(3 * parameters < bytes_ for bytes_ in sent)  # gradients went over the link, in both directions
