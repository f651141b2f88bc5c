"""A store without the traces of processes that died, for processes that were started again.

torchrun's agent keeps one store for all attempts, where the addresses of the last attempt's processes still are: a rank
that reads them before the new ones are written tries to reach the dead (pytorch/pytorch#135712). Its count of restarts
cannot tell attempts apart, since each machine has a count of its own.
"""

from __future__ import annotations

import secrets
import time

import torch.distributed as dist

from narrowgauge.errors import ProcessError

_POLL_S = 0.02
_CALL, _HELLO, _HEARD = "narrowgauge/attempt/call", "narrowgauge/attempt/hello", "narrowgauge/attempt/heard"


def fresh_store(store: dist.Store, rank: int, ranks: int, timeout_s: float) -> dist.Store:
    """A part of `store` that only the processes now calling this use: the same on all ranks.

    Each rank says a random word; rank 0 repeats all of them beside its own, until every rank has found its word among
    them, and taken up rank 0's. No trace of an earlier attempt has the words of this one. Raises ProcessError where
    that takes longer than `timeout_s`.
    """
    word, end_s = secrets.token_hex(8), time.monotonic() + timeout_s
    store.set(f"{_HELLO}/{rank}", word)
    everyone = range(ranks)
    while time.monotonic() < end_s:
        if rank == 0:
            hellos = _all_of(store, [f"{_HELLO}/{r}" for r in everyone])
            if hellos:
                store.set(_CALL, " ".join(hellos))
        call = _all_of(store, [_CALL])
        words = call[0].split() if call else []
        if len(words) == ranks and words[rank] == word:
            store.set(f"{_HEARD}/{rank}", words[0])
            if rank or set(_all_of(store, [f"{_HEARD}/{r}" for r in everyone])) == {word}:
                return dist.PrefixStore(f"narrowgauge/{words[0]}", store)
        time.sleep(_POLL_S)
    raise ProcessError(
        f"rank {rank} found no other {ranks - 1} ranks within {timeout_s:g} s: expected all that torchrun started; "
        "look for errors of the others, or raise parallel.timeout_s"
    )


def _all_of(store: dist.Store, keys: list[str]) -> list[str]:
    """The values of all keys; none where one is not there."""
    return [value.decode() for value in store.multi_get(keys)] if store.check(keys) else []
