"""Renders the events of a training run: a live line on a terminal, plain lines elsewhere, and the closing table."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn

from narrowgauge.cli.console import messages, output, print_json, print_table
from narrowgauge.cli.live_line import LiveLine
from narrowgauge.cli.precision_view import LiveView
from narrowgauge.observe.ledger import KEYS as LEDGER_KEYS
from narrowgauge.train import events

if TYPE_CHECKING:
    from narrowgauge.integrations.finetune_events import Stepped
    from narrowgauge.layers.report import ConversionReport

# Above this share of saturated or flushed values a role is called out: GEMM errors grow visibly from about here.
TROUBLE_SHARE = 0.02
# Weight of the newest step in the smoothed speed that the remaining time is computed from.
SMOOTHING = 0.1


class Reporter(LiveLine[LiveView]):
    """A listener for `train.run`: call it with each event. Use as a context, so that the live line is taken down.

    `log_every` is the number of steps between plain lines; a terminal shows every step. `as_json`: standard output gets
    the closing figures as JSON and nothing else; progress goes to standard error.
    """

    def __init__(self, console: Console | None = None, log_every: int = 10, as_json: bool = False) -> None:
        self.console = console or (messages() if as_json else output())
        self.as_json = as_json
        self.log_every = max(1, log_every)
        self._step_s = 0.0
        self._steps_timed = 0
        self._trouble = ""

    def __call__(self, event: events.Event) -> None:
        """Render one event; unknown kinds are passed over."""
        renderer = _RENDERERS.get(type(event))
        if renderer is not None:
            renderer(self, event)

    def say(self, text: str, style: str = "") -> None:
        """Print one line above the live line."""
        console = self.console if self._live is None else self._live.console
        console.print(escape(text), style=style or None, soft_wrap=True)

    def preparing(self, event: events.Preparing) -> None:
        """Say what takes a while before the first step."""
        self.say(f"{event.what} ...", "dim")

    def started(self, event: events.RunStarted) -> None:
        """Say what is trained, where, in what; start the live line."""
        self.say(f"run      {event.run_dir}")
        self.say(
            f"model    {event.config.model.preset}, {event.parameters:,} parameters, "
            f"recipe {event.config.build_recipe().name} on {event.device}"
        )
        for switch in event.config.switches:
            self.say(f"         recipe {switch.recipe} after step {switch.after_step}")
        self.say(
            f"data     {event.config.data.corpus}, {event.train_tokens:,} tokens, {event.tokens_per_step:,} a step"
        )
        self._begin(event.step, event.steps, event.report, event.resumed_from)

    def _begin(self, step: int, steps: int, report: ConversionReport, resumed_from: Path | None) -> None:
        """Say how many layers run how, and from where the run goes on; start the live line."""
        self.say(f"layers   {_counts(report)}")
        if resumed_from is not None:
            end = ", the run's last: nothing is left to train" if step >= steps else ""
            self.say(f"resumed  from {resumed_from} at step {step}{end}")
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TextColumn("{task.fields[facts]}"))
            self._live = LiveView(*columns, console=self.console, transient=True)
            self._live.start()
            self._task = self._live.add_task(f"step {step}/{steps}", total=steps, completed=step, facts="")

    def stepped(self, event: events.StepDone) -> None:
        """Move the live line, or print a plain one at every `log_every`-th step, the first and the last."""
        if event.statistics is not None:
            self._trouble = trouble(event.statistics)
        if self._live is not None and event.precision is not None:
            self._live.show(event.step, event.precision, event.bytes_by_role or {})
        left_s = self._left_s(event)
        speed = event.tokens_per_s * event.seconds / self._step_s
        self._advance(event.step, event.steps, _facts(event, speed, left_s, self._trouble))

    def _left_s(self, event: events.StepDone | Stepped) -> float:
        """Seconds to the last step, by the smoothed time of a step: one that is sampled or disturbed says little."""
        self._steps_timed += 1
        is_new = self._steps_timed <= 2  # the first step of a process compiles kernels, and is forgotten
        self._step_s += (1.0 if is_new else SMOOTHING) * (event.seconds - self._step_s)
        return self._step_s * (event.steps - event.step)

    def _advance(self, step: int, steps: int, facts: str) -> None:
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=step, description=f"step {step}/{steps}", facts=escape(facts))
        elif step % self.log_every == 0 or step in (1, steps):
            self.say(f"step {step}/{steps}  {facts}")

    def recipe_changed(self, event: events.RecipeChanged) -> None:
        """Say by which recipe the run goes on, and how many layers are in what state then."""
        told = f"recipe {event.before} -> {event.after}: layers {_counts(event.report)}"
        self.say(f"step {event.step}  {told}", "bold")

    def skipped(self, event: events.Skipped) -> None:
        """Say which gradient was bad, and how near the limit of skips is."""
        self.say(
            f"step {event.step}  skipped: gradient of {event.parameter} is not finite; {event.consecutive} in a row, "
            f"{event.max_skips} stop the run; loss scale {event.loss_scale:g}",
            "yellow",
        )

    def guard_acted(self, event: events.GuardActed) -> None:
        """Say what the guard decided, and by which numbers."""
        self.say(f"step {event.step}  guard: {event.action}: {event.message}", "yellow")

    def evaluated(self, event: events.Evaluated) -> None:
        """Print the validation figures."""
        self.say(
            f"step {event.step}  validation loss {event.loss:.4f}  perplexity {event.perplexity:.2f}  "
            f"{event.bits_per_byte:.4f} bits per byte",
            "bold",
        )

    def saved(self, event: events.CheckpointSaved) -> None:
        """Print where the checkpoint is."""
        self.say(f"step {event.step}  saved {event.path} ({event.bytes / 1e6:.1f} MB, {event.seconds:.1f} s)", "dim")

    def warned(self, event: events.Warned) -> None:
        """Print the warning."""
        self.say(f"warning: {event.message}", "yellow")

    def interrupting(self, event: events.Interrupting) -> None:
        """Say that the step in hand is still finished and saved."""
        self.say(f"{event.signal}: finishing step {event.step + 1} and saving; once more to stop at once", "yellow")

    def sampled(self, event: events.Sampled) -> None:
        """Print the text that the model wrote."""
        self.take_down()
        self.say("\nsample", "bold")
        self.console.print(escape(event.prompt) + f"[green]{escape(event.text)}[/]", soft_wrap=True, highlight=False)

    def finished(self, event: events.Finished) -> None:
        """Print the closing table."""
        self.take_down()
        if self.as_json:
            print_json(closing_figures(event))
            return
        self.say("")
        print_table("result", ["", ""], closing_rows(event))
        if event.ledger is not None:
            print_table("memory", ["role", "bytes", "a parameter"], event.ledger.rows())
        run = shlex.quote(str(event.run_dir))
        if event.status is events.Status.INTERRUPTED:
            self.say(f"interrupted at step {event.step}; go on with: narrowgauge resume {run}", "yellow")
        else:
            self.say(f"run folder {event.run_dir}; try: narrowgauge generate {run} --prompt 'def '")


def _counts(report: ConversionReport) -> str:
    """How many layers are in what state: `30 converted, 2 kept`."""
    return ", ".join(f"{count} {status}" for status, count in report.counts().items() if count)


def closing_rows(event: events.Finished) -> list[tuple[str, str]]:
    """Rows of the table at the end of a run: losses and speed."""
    rows = [("training loss, last step", f"{event.last_loss:.4f} nats a token")]
    if event.evaluation is not None:
        rows.append(("validation loss", f"{event.evaluation.loss:.4f} nats a token"))
        rows.append(("validation bits per byte", f"{event.evaluation.bits_per_byte:.4f}"))
    if event.tokens:  # none where a finished run is resumed
        rows.append(("tokens", f"{event.tokens:,} in {duration(event.seconds)}"))
        rows.append(("tokens/s", f"{event.tokens_per_s:,.0f}"))
    if event.skipped_steps:
        rows.append(("skipped steps", f"{event.skipped_steps:,}"))
    return rows


def closing_figures(event: events.Finished) -> dict[str, Any]:
    """The tables at the end of a run, for programs. `validation` is null before the first.

    `bytes`, `bytes_per_parameter` and `bytes_by_device` are those of the ledger, null where no step was taken.
    """
    found, ledger = event.evaluation, event.ledger
    return {
        "status": str(event.status),
        "run": str(event.run_dir),
        "step": event.step,
        "loss": event.last_loss,
        "validation": found and {key: getattr(found, key) for key in ("step", "loss", "perplexity", "bits_per_byte")},
        "tokens": event.tokens,
        "seconds": event.seconds,
        "tokens_per_s": event.tokens_per_s,
        "skipped_steps": event.skipped_steps,
        **(ledger.to_dict() if ledger else dict.fromkeys(LEDGER_KEYS)),
    }


def trouble(statistics: dict[str, dict[str, float]]) -> str:
    """The worst role's share of saturated or flushed values, where it is above TROUBLE_SHARE; else nothing."""
    shares = [(share, role, kind) for role, kinds in statistics.items() for kind, share in kinds.items()]
    share, role, kind = max(shares, default=(0.0, "", ""))
    return f"{role} {kind} {share:.1%}" if share > TROUBLE_SHARE else ""


def duration(seconds: float) -> str:
    """Seconds as a person writes them: 41 s, 3 min 05 s, 2 h 10 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _facts(event: events.StepDone, speed: float, left_s: float, trouble_text: str) -> str:
    # what matters most comes first: a narrow terminal cuts the end off
    facts = [f"loss {event.loss:.4f}", f"{speed:,.0f} tokens/s", f"{duration(left_s)} left"]
    if event.loss_scale != 1.0:
        facts.append(f"loss scale {event.loss_scale:g}")
    if event.skipped:
        facts.append("SKIPPED")
    if trouble_text:
        facts.append(trouble_text)
    facts += [f"norm {event.grad_norm:.3f}", f"lr {event.lr:.2e}"]
    return "  ".join(facts)


_RENDERERS: dict[type, Callable] = {
    events.Preparing: Reporter.preparing,
    events.RunStarted: Reporter.started,
    events.StepDone: Reporter.stepped,
    events.RecipeChanged: Reporter.recipe_changed,
    events.Skipped: Reporter.skipped,
    events.GuardActed: Reporter.guard_acted,
    events.Evaluated: Reporter.evaluated,
    events.CheckpointSaved: Reporter.saved,
    events.Warned: Reporter.warned,
    events.Interrupting: Reporter.interrupting,
    events.Sampled: Reporter.sampled,
    events.Finished: Reporter.finished,
}
