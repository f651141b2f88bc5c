"""What the processes of a run must agree on, compared before the first step.

Ranks that run by different recipes, models or versions do not fail by themselves: they hang in a collective that the
others never join, or sum gradients that mean different things. Each rank writes digests of its facts to the store; the
facts themselves are sent only where digests differ, so that a thousand ranks cost a hundred bytes each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed.layout import layout_of
from narrowgauge.distributed.meeting_point import has_peers, meeting_point
from narrowgauge.errors import ProcessError
from narrowgauge.recipes.spec import FIELDS, Recipe

START_S = 600.0  # a rank may still read data or build its model when the first one is there; NCCL waits as long
EVERYONE = ""
MOST_NAMED = 8  # fields that differ, in one message
_POLL_S = 0.02

Facts = Mapping[str, Mapping[str, Any]]  # scope -> field -> value, fit for JSON
Groups = dict[str, dict[str, list[int]]]  # scope -> digest -> the ranks that have it


def check_prepared(
    model: nn.Module, recipe: Recipe, group: dist.ProcessGroup | None = None, timeout_s: float = START_S
) -> None:
    """Raise ProcessError where the ranks of a group prepare by different recipes, models, layouts or versions.

    Called by all of them alike; None: by all processes. Parameters and buffers are compared by name, shape, dtype and
    whether they are trained, among the ranks of one pipeline stage; all else among all ranks.
    """
    found = layout_of(model)
    common = {
        "version of narrowgauge": version("narrowgauge"),
        "version of torch": torch.__version__,
        "layout": "none" if found is None else str(found),
        **{f"recipe.{field}": str(getattr(recipe, field)) for field in FIELDS},
    }
    stage = 0 if found is None else found.rank("pipeline")
    check({EVERYONE: common, f"stage {stage}": _facts_of(model)}, group, timeout_s)


def check(facts: Facts, group: dist.ProcessGroup | None = None, timeout_s: float = START_S) -> None:
    """Raise one ProcessError on every rank where facts differ, with fields, values and ranks, or a rank is missing.

    facts: fields and their values by scope. A scope is compared among the ranks that have it: EVERYONE, or e.g. a
    pipeline stage. group: whose ranks compare; None: all processes. A collective call, on every rank of the group in
    the same order; within one process, or where one stands for many (torch's "fake" backend), it does nothing.
    timeout_s: how long the others may take to come.
    """
    if not has_peers():
        return
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group or dist.group.WORLD)
    first = rank == ranks[0]
    # the others wait for the first while it waits twice: for digests, and for facts
    store = meeting_point(f"agreement/{'everyone' if group is None else group.group_name}", 3 * timeout_s)
    # every rank makes the same calls in the same order: each has keys of its own
    store = dist.PrefixStore(str(store.add(f"calls/{rank}", 1)), store)
    plain = {scope: dict(fields) for scope, fields in facts.items()}
    digests = {scope: hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16] for scope, fields in plain.items()}
    store.set(f"digests/{rank}", json.dumps(digests))
    groups: Groups = {}
    verdict = ""
    if first:
        verdict = _missing(store, "digests", ranks, timeout_s)
        groups = {} if verdict else _groups(_read(store, "digests", ranks))
        # one rank speaks for all with its digest
        store.set("asked", json.dumps([members[0] for scope in groups.values() for members in scope.values()]))
    asked = set(json.loads(store.get("asked")))
    if rank in asked:
        store.set(f"facts/{rank}", json.dumps(plain))
    if first:
        verdict = verdict or _missing(store, "facts", asked, timeout_s)
        verdict = verdict or _differences(groups, _read(store, "facts", asked))
        store.set("verdict", verdict)
    if verdict := store.get("verdict").decode():
        raise ProcessError(verdict)


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 2", or with runs of them "ranks 0-6, 8"."""
    parts: list[str] = []
    in_order = sorted(ranks)
    for _, run in itertools.groupby(enumerate(in_order), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts += [f"{members[0]}-{members[-1]}"] if len(members) > 2 else [str(rank) for rank in members]
    return f"rank{'s' if len(in_order) > 1 else ''} {', '.join(parts)}"


def _facts_of(model: nn.Module) -> dict[str, str]:
    def text(tensor: Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

    trained = {True: "", False: ", not trained"}
    found = {f"parameter {name}": text(p) + trained[p.requires_grad] for name, p in model.named_parameters()}
    return found | {f"buffer {name}": text(b) for name, b in model.named_buffers()}


def _missing(store: dist.Store, key: str, ranks: Iterable[int], timeout_s: float) -> str:
    """Wait until those ranks have written under `key`; a message that names those that have not, or nothing."""
    end_s = time.monotonic() + timeout_s
    waiting = list(ranks)
    while waiting := [rank for rank in waiting if not store.check([f"{key}/{rank}"])]:
        if time.monotonic() > end_s:
            return (
                f"expected all processes within {timeout_s:g} s to compare what they run, {ranks_text(waiting)} of "
                f"{dist.get_world_size()} did not come: look into the log of {'it' if len(waiting) == 1 else 'each'}, "
                "and see that every process was started with the same command"
            )
        time.sleep(_POLL_S)
    return ""


def _read(store: dist.Store, key: str, ranks: Iterable[int]) -> dict[int, Any]:
    return {rank: json.loads(store.get(f"{key}/{rank}")) for rank in ranks}


def _groups(digests: dict[int, dict[str, str]]) -> Groups:
    """The scopes in which digests differ."""
    found: Groups = {}
    for rank, by_scope in digests.items():
        for scope, digest in by_scope.items():
            found.setdefault(scope, {}).setdefault(digest, []).append(rank)
    return {scope: groups for scope, groups in found.items() if len(groups) > 1}


def _differences(groups: Groups, facts: dict[int, Facts]) -> str:
    """A message that names fields, values and ranks, or nothing."""
    lines = []
    for scope, by_digest in groups.items():
        told = [(members, facts[members[0]][scope]) for members in by_digest.values()]
        for field in dict.fromkeys(field for _, fields in told for field in fields):
            ranks_of: dict[str, list[int]] = {}
            for members, fields in told:
                ranks_of.setdefault(str(fields.get(field, "absent")), []).extend(members)
            if len(ranks_of) > 1:
                values = "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_of.items())
                lines.append(f"  {field}{scope and f' of {scope}'}: {values}")
    if not lines:
        return ""
    hidden = len(lines) - MOST_NAMED
    more = [f"  and {hidden} more"] if hidden > 0 else []
    return "\n".join(
        [
            "the processes of this run disagree: start all of them with the same command, files and versions",
            *lines[:MOST_NAMED],
            *more,
        ]
    )
