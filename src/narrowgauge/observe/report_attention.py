"""What needs attention in a run, in plain words: rules with stated thresholds over its journal."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from narrowgauge.observe.report_rules import LOOK, NOTE, SERIOUS, SEVERITIES, Finding, cell_findings, thresholds
from narrowgauge.observe.report_run import RunReader

SKIPS_IN_A_ROW = 10  # at the smallest scale: what comes then is no search for a scale
SKIPPED_SHARE = 0.05
GAP_NATS = 0.03  # of validation losses, against the reference run


def attention(run: RunReader, reference: RunReader | None = None) -> list[Finding]:
    """The findings of a run, the most serious first. reference: the run whose validation loss it is held against."""
    specs = {cell: run.format_of(cell) for cell in run.precision.cells}
    found = [
        *_skips(run),
        *_losses(run),
        *cell_findings(run.precision, specs),
        *_guarded(run),
        *_conversion(run),
        *_against(run, reference),
        *_journal(run),
    ]
    return sorted(found, key=lambda each: SEVERITIES.index(each.severity))  # stable: the order above within each


def checked(run: RunReader) -> list[str]:
    """What was looked for, with thresholds, and how often the run was sampled."""
    window, spreads, floor = run.band
    return [
        sampling(run),
        f"skipped steps: {_too_many(run)} in a row or more with the loss scale at its smallest, or more than "
        f"{SKIPPED_SHARE:.0%} of all steps; each parameter whose gradient was not finite",
        f"loss spikes: a loss above the band, which ends at median + max({spreads:g} spreads, {floor:g} nats) of the "
        f"{window} best losses in a row; losses that are not finite",
        *thresholds(),
        "what the guard did; layers that could not be converted, and what is emulated on a GPU",
        f"validation loss more than {GAP_NATS} nats above the reference run's, where runs are compared",
        "the journal: lines cut off or damaged, and a run that ended before its last step",
    ]


def sampling(run: RunReader) -> str:
    """How often layers were measured, in words."""
    reader = run.precision
    bare = f"{reader.empty:,} sampled step{'s' if reader.empty > 1 else ''}"
    if not reader.samples and reader.empty:
        return f"no layer was measured: in {bare} nothing was cast"
    if not reader.samples:
        return "no layer was measured: the journal holds no sampled step (statistics_every in the configuration)"
    layers = len({cell.layer for cell in reader.cells})
    at = reader.steps_sampled
    every = ""
    if len(at) > 1:
        mean = (at[-1] - at[0]) / (reader.samples - 1)
        is_even = mean == at[-1] - at[-2]
        every = f", one in every {mean:,.0f}" if is_even else f", one in every {mean:,.1f} on average"
        every = ", one after the other" if mean == 1 else every
    times = f"{_counted(reader.samples, 'step', 'steps')}{every}"
    if not run.has_layers:
        return f"means over all layers in {times}: this older journal does not tell layers apart"
    bare = f"; in {bare} more nothing was cast" if reader.empty else ""
    return f"{layers:,} layers, {len(reader.cells):,} of their tensors, in {times}{bare}: between them nothing is known"


def _streaks(flags: np.ndarray) -> list[tuple[int, int]]:
    """(first, last) index of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _skips(run: RunReader) -> list[Finding]:
    columns = run.steps
    steps, skipped, scale = columns["step"], columns["skipped"], columns["loss_scale"]
    if not skipped.any():
        return []
    first, last = max(_streaks(skipped), key=lambda pair: pair[1] - pair[0])
    known = scale[np.isfinite(scale)]
    smallest = float(known.min()) if known.size else 1.0
    is_scaled = bool(known.size) and float(known.max()) > 1.0
    at_minimum = skipped & ~(scale > smallest)
    stuck_first, stuck_last = max(_streaks(at_minimum), key=lambda pair: pair[1] - pair[0], default=(0, -1))
    stuck = stuck_last - stuck_first + 1
    share, since = float(skipped.mean()), int(steps[np.argmax(skipped)])
    culprit, advice = _culprit(run)
    ended_so = stuck_last == len(steps) - 1 and _streaks(skipped)[-1][0] <= stuck_last + 1 - _too_many(run)
    if stuck >= _too_many(run) or (stuck and ended_so):
        until = "the end" if stuck_last == len(steps) - 1 else f"step {steps[stuck_last]:,}"
        scaled = f"the loss scale at its smallest, {smallest:g}" if is_scaled else "a loss scale of 1"
        text = (
            f"{stuck:,} steps in a row were skipped with {scaled}, from step {steps[stuck_first]:,} to {until}: "
            f"nothing was learned in them, and no smaller scale would help.{culprit}"
        )
        title = f"{stuck:,} steps in a row were skipped at the smallest loss scale"
        return [Finding(SERIOUS, "skipped steps", title, text, advice, int(steps[stuck_first]))]
    text = (
        f"{int(skipped.sum()):,} of {len(steps):,} steps ({share:.2g} of them) were skipped because a gradient was not "
        f"finite, the first at step {since:,}, at most {last - first + 1:,} in a row, from step {steps[first]:,}."
        f"{culprit}"
    )
    title = f"{_counted(int(skipped.sum()), 'step was', 'steps were')} skipped"
    if is_scaled and share <= SKIPPED_SHARE:
        return [
            Finding(NOTE, "skipped steps", title, f"{text} That is how a loss scale finds its size.", "Nothing to do.",
                    since)
        ]  # fmt: skip
    severity = SERIOUS if share > SKIPPED_SHARE else LOOK
    return [Finding(severity, "skipped steps", title, text, advice, since)]


def _too_many(run: RunReader) -> int:
    """Skips in a row at the smallest scale that are serious; no more than stop the run."""
    most = run.config.get("max_skips")
    return min(SKIPS_IN_A_ROW, most) if isinstance(most, int) and most > 0 else SKIPS_IN_A_ROW


def _culprit(run: RunReader) -> tuple[str, str]:
    """(whose gradients were not finite, what to do about it)."""
    generic = "Look at the data and the loss of these steps: something there is infinite or NaN."
    if not run.bad_parameters:
        return " Which parameter was the first is not in the journal.", generic
    name, (first, _, times) = next(iter(run.bad_parameters.items()))
    others = len(run.bad_parameters) - 1
    more = f", later {others:,} other parameter{'s' if others > 1 else ''}" if others else ""
    said = f" The first parameter with a gradient that was not finite was {name}, at step {first:,}"
    return f"{said} ({times:,} times){more}.", (
        f"Look at the data of step {first:,}, and at what {name} works on: something there is infinite or NaN."
    )


def _losses(run: RunReader) -> list[Finding]:
    columns = run.steps
    steps, loss, skipped = columns["step"], columns["loss"], columns["skipped"]
    found = []
    is_bad = ~np.isfinite(loss)
    if is_bad.any():
        first, last = _streaks(is_bad)[0]
        severity = SERIOUS if is_bad[-1] or not skipped[is_bad].all() else LOOK
        text = (
            f"{_counted(int(is_bad.sum()), 'loss is', 'losses are')} infinite or NaN, first at step {steps[first]:,}"
            f"{', up to the end' if is_bad[-1] else ''}. "
            + ("Those steps were skipped." if skipped[is_bad].all() else "Not all of those steps were skipped.")
        )
        remedy = f"Look at the data of step {steps[first]:,}; then at the precision map just before it."
        found.append(Finding(severity, "loss", "The loss was not finite", text, remedy, int(steps[first])))
    ends = run.band_ends
    spikes = _streaks(np.isfinite(loss) & (loss > ends))
    if spikes:
        first, last = max(spikes, key=lambda pair: float((loss - ends)[pair[0] : pair[1] + 1].max()))
        at = first + int(np.argmax(loss[first : last + 1]))
        stays = spikes[-1][1] == len(loss) - 1
        text = (
            f"At step {steps[at]:,} the loss was {loss[at]:.3f}; the band ended at {ends[at]:.3f}. "
            f"{len(spikes):,} spike{'s' if len(spikes) > 1 else ''} in all, the first at step {steps[spikes[0][0]]:,}; "
            + ("the loss has not come back." if stays else "the loss came back.")
        )
        remedy = "Look what saturates or is flushed just before it; a lower learning rate or more warm-up helps most."
        title = f"The loss left its band at step {steps[spikes[0][0]]:,}"
        found.append(Finding(SERIOUS if stays else LOOK, "loss", title, text, remedy, int(steps[spikes[0][0]])))
    return found


def _guarded(run: RunReader) -> list[Finding]:
    rows = [row for row in run.events if row["kind"] == "guard"]
    if not rows:
        return []
    acted = [row for row in rows if row.get("action") not in ("warn", "wait")]
    warned = [row for row in rows if row.get("action") == "warn"]
    counts = Counter(str(row.get("action")) for row in rows)
    said = ", ".join(f"{times:,} x {action}" for action, times in counts.items())
    first = (acted or warned or rows)[0]
    where = ", ".join(str(part) for part in (first.get("layer"), first.get("role")) if part)
    text = f"{said}. First, at step {first['step']:,}: {first.get('message') or where}."
    title = f"The guard warned {len(warned):,} times" if warned else f"The guard took a closer look {len(rows):,} times"
    title = f"The guard acted {len(acted):,} times" if acted else title
    title = title.replace(" 1 times", " once")
    return [
        Finding(LOOK, "guard", title, text, "All of it stands under Guard, with its numbers.", first["step"],
                str(first.get("layer") or ""), str(first.get("role") or ""), str(first.get("measure") or ""))
    ]  # fmt: skip


def _conversion(run: RunReader) -> list[Finding]:
    rows = run.conversion
    found = []
    said = {
        "skipped": (LOOK, "layer could not be converted", "layers could not be converted"),
        "kept": (NOTE, "layer stayed as it was", "layers stayed as they were"),
    }
    for status, (severity, one, several) in said.items():
        chosen = [row for row in rows if row.get("status") == status]
        by_reason = itertools.groupby(sorted(chosen, key=_reason), key=_reason)
        reasons = [
            f"{len(names := [str(r.get('name')) for r in group]):,} ({_some(names)}): {why}" for why, group in by_reason
        ]
        if chosen:
            remedy = "Nothing to do where that is meant; else change include, exclude or min_size of the recipe."
            if any("quantizes no GEMM operand" in _reason(row) for row in chosen):  # as recipes/select.py says it
                remedy = "Nothing to do: this recipe casts no operand, its products are those of its compute dtype."
            title = _counted(len(chosen), one, several)
            found.append(Finding(severity, "conversion", title, "; ".join(reasons) + ".", remedy))
    emulated = [str(row.get("name")) for row in rows if "emulated" in str(row.get("backend"))]
    if emulated:
        device = str(run.header.get("device") or "")
        is_gpu = device.startswith("cuda")
        why = "." if not device else ": a CPU has no narrow arithmetic."
        text = (
            f"{len(emulated):,} layers ({_some(emulated)}) compute the recipe's numbers by emulation"
            + (" although this run is on a GPU: they are slower than in bf16." if is_gpu
               else f"{why} The numbers are right; the speed is not that of native narrow arithmetic.")
            + _of_converted(rows, len(emulated))
        )  # fmt: skip
        remedy = "`narrowgauge doctor` says what this GPU does natively, and why not." if is_gpu else "Nothing to do."
        title = f"{_counted(len(emulated), 'layer is', 'layers are')} emulated"
        found.append(Finding(LOOK if is_gpu else NOTE, "conversion", title, text, remedy))
    return found


def _of_converted(rows: Sequence[dict[str, Any]], emulated: int) -> str:
    """Which of the converted layers the emulated ones are."""
    converted = [row for row in rows if row.get("status") == "converted"]
    others = len(converted) - emulated
    if others <= 0:
        return ""
    idle = sum(not row.get("casts") for row in converted)
    what = "cast nothing in a product (such as norms)" if idle == others else "need no emulation"
    return f" The other {others:,} of {len(converted):,} converted layers {what}."


def _reason(row: dict[str, Any]) -> str:
    return str(row.get("reason") or "no reason given")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _against(run: RunReader, reference: RunReader | None) -> list[Finding]:
    if reference is None or reference is run:
        return []
    theirs = {row["step"]: row["loss"] for row in reference.evaluations}
    shared = [(row["step"], row["loss"] - theirs[row["step"]]) for row in run.evaluations if row["step"] in theirs]
    if not shared or not shared[-1][1] > GAP_NATS:
        return []
    step, gap = shared[-1]
    beyond = list(itertools.takewhile(lambda pair: pair[1] > GAP_NATS, reversed(shared)))
    text = (
        f"At step {step:,.0f} its validation loss is {gap:.3f} nats above that of {reference.name}; above by more than "
        f"{GAP_NATS} since step {beyond[-1][0]:,.0f}."
    )
    remedy = "Look for what came before in the precision map; `narrowgauge tune` finds which layers need more bits."
    return [Finding(LOOK, "reference", f"Validation loss above {reference.name}", text, remedy, int(beyond[-1][0]))]


def _journal(run: RunReader) -> list[Finding]:
    found = []
    if run.all_problems:
        count = run.damaged
        title = (
            f"The journal has {_counted(count, 'damaged line', 'damaged lines')}"
            if count
            else "The journal's last line is cut off"
        )
        found.append(Finding(LOOK if count else NOTE, "journal", title, " ".join(run.all_problems[:3]),
                             "What was left out is in no picture; all other lines are."))  # fmt: skip
    steps = run.steps["step"]
    if not len(steps):
        found.append(Finding(NOTE, "journal", "No step yet", "The journal holds no step.", "Come back when it does."))
    elif run.planned_steps is not None and steps[-1] < run.planned_steps:
        text = f"The last step in the journal is {steps[-1]:,}, of {run.planned_steps:,} in the configuration."
        remedy = "Where it does not run any more: `narrowgauge resume` goes on from its last checkpoint."
        found.append(Finding(NOTE, "journal", "The run is not at its end", text, remedy, int(steps[-1])))
    if run.events_left_out:
        found.append(Finding(NOTE, "journal", f"{run.events_left_out:,} events are left out",
                             f"Only the first {len(run.events):,} are shown.", "All are in the journal."))  # fmt: skip
    return found


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
