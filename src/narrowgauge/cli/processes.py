"""The processes that torchrun starts: who this one is, from its environment, and the group of all."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from narrowgauge.errors import ConfigError, NarrowgaugeError
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.restart import Launch


def rank() -> int:
    """This process's number as torchrun gave it; 0 where it was started otherwise."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's number on its machine; 0 where torchrun did not start it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Processes that torchrun started, on all machines; 1 where it started none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def told_once() -> Iterator[None]:
    """What goes wrong inside goes wrong on all processes alike: the first one of each machine tells it."""
    try:
        yield
    except NarrowgaugeError as error:
        error.is_told_elsewhere = local_rank() != 0
        raise


def launch() -> Launch | None:
    """The launch that this process belongs to, as torchrun tells it; None where it was started otherwise.

    Its name is torchrun's --rdzv-id, which is to be another one for each job; without one, torchrun's own process.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if restarts is None:
        return None
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # "none": torchrun was not given one
    return Launch(f"{socket.gethostname()}:{os.getppid()}" if job == "none" else job, int(restarts))


@contextmanager
def process_group(config: TrainConfig) -> Iterator[None]:
    """Inside, the processes that torchrun started are a group: gloo on CPUs, NCCL on GPUs, one GPU each.

    Raises ConfigError where their number is not what the configuration asks for.
    """
    found, wanted = world_size(), config.parallel.ranks
    if found != wanted:
        started = f"torchrun started {found}" if "WORLD_SIZE" in os.environ else "found one"
        with told_once():
            raise ConfigError(
                f"parallel {config.parallel}: expected {wanted} processes, {started}: start `torchrun --nproc-per-node "
                f"{wanted} -m narrowgauge` with this command, or change the sizes of `parallel`"
            )
    with group_of(wanted, config.torch_device(), config.parallel.timeout_s):
        yield


@contextmanager
def group_of(processes: int, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Inside, those that torchrun started are a group, by NCCL or gloo as `device` asks for; one process needs none."""
    if processes == 1:
        yield
        return
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(local_rank())
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from narrowgauge.distributed.rendezvous import fresh_store

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, processes, is_master=False, timeout=timeout)
        store = fresh_store(store, rank(), processes, timeout_s)
        dist.init_process_group(backend, store=store, rank=rank(), world_size=processes, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
