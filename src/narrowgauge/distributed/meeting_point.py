"""The store through which processes find each other: a second way to talk that works when collectives do not."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from narrowgauge.errors import ProcessError

SIMULATED = "fake"  # torch's process group that sends nothing: one process stands for all ranks


def has_peers() -> bool:
    """True where this process is one of several real ones."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != SIMULATED


def meeting_point(purpose: str, timeout_s: float) -> dist.Store:
    """A connection of its own to the run's store, with keys of its own.

    A connection that waits for a key serves nobody else meanwhile, so each thread takes one. timeout_s: how long a
    request may wait. Raises ProcessError where this torch does not give the store away.
    """
    from torch.distributed import distributed_c10d

    default_store = getattr(distributed_c10d, "_get_default_store", None)  # private: torch has no public way to it
    if default_store is None:
        raise ProcessError(
            f"torch {torch.__version__} has no _get_default_store: expected torch 2.11 to 2.14, through whose store "
            "processes compare notes; install one of these"
        )
    store = dist.PrefixStore(f"narrowgauge/{purpose}", default_store().clone())
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
