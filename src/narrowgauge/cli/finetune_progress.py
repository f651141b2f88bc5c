"""Renders the events of a fine-tuning run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from narrowgauge.cli.console import print_json, print_table
from narrowgauge.cli.progress import TROUBLE_SHARE, Reporter, duration
from narrowgauge.integrations.finetune_events import Ended, HeldOut, Noted, Started, Stepped
from narrowgauge.train import events

# Figures worth a place on a line, what matters most first, and what they are called there.
_SHOWN = {
    "loss": "loss",
    "perplexity": "perplexity",
    "reward": "reward",
    "rewards/accuracies": "accuracy",
    "accuracy": "accuracy",
    "rewards/margins": "margin",
    "margin": "margin",
    "kl": "KL",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "completion_tokens": "length",
    "grad_norm": "norm",
    "lr": "lr",
}
_SHARES = ("saturated/", "flushed/")


class FinetuneReporter(Reporter):
    """As `Reporter`, for the events of `integrations.finetune`, too."""

    def __call__(self, event: events.Event) -> None:
        """Render one event."""
        renderer = _RENDERERS.get(type(event))
        if renderer is not None:
            renderer(self, event)
        else:
            super().__call__(event)

    def noted(self, event: Noted) -> None:
        """Say what a user is to know."""
        self.say(f"note     {event.message}")

    def began(self, event: Started) -> None:
        """Say what is trained, on what; start the live line."""
        config = event.config
        self.say(f"run      {event.run_dir}")
        self.say(
            f"model    {config.model}, {event.parameters:,} parameters, "
            f"recipe {config.build_recipe().name} on {event.device}"
        )
        held_out = f", {event.eval_examples:,} held out" if event.eval_examples else ""
        self.say(f"data     {config.data}, {event.examples:,} examples{held_out}")
        self._begin(event.step, event.steps, event.report, event.resumed_from)

    def went(self, event: Stepped) -> None:
        """Move the live line, or print a plain one at every `log_every`-th step, the first and the last."""
        self._trouble = worst_share(event.figures) or self._trouble
        left = f"{duration(self._left_s(event))} left"
        facts = "  ".join(filter(None, [facts_of(event.figures), left, self._trouble]))
        self._advance(event.step, event.steps, facts)

    def held_out(self, event: HeldOut) -> None:
        """Print the figures on held-out examples."""
        self.say(f"step {event.step}  held out: {facts_of(event.figures)}", "bold")

    def ended(self, event: Ended) -> None:
        """Print the closing tables."""
        self.take_down()
        if self.as_json:
            print_json(closing_figures(event))
            return
        self.say("")
        rows = [(f"{name}, last step", event.figures[key]) for key, name in _SHOWN.items() if key in event.figures]
        if event.held_out is not None:
            rows += [
                (f"{name}, held out", event.held_out[key]) for key, name in _SHOWN.items() if key in event.held_out
            ]
        print_table("result", ["", ""], [*rows, ("time", duration(event.seconds))])
        for name, ledger in event.ledgers.items():
            title = "memory" if len(event.ledgers) == 1 else f"memory, {name}"
            print_table(title, ["role", "bytes", "a parameter"], ledger.rows())
        run = shlex.quote(str(event.run_dir))
        if event.model is None:
            self.say(f"interrupted at step {event.step}; go on with: narrowgauge resume {run}", "yellow")
        else:
            self.say(
                f"model in {event.model}, which transformers loads; try: narrowgauge generate {run} --prompt '...'"
            )


def closing_figures(event: Ended) -> dict[str, Any]:
    """The tables at the end of a run, for programs."""
    return {
        "status": str(event.status),
        "run": str(event.run_dir),
        "model": event.model and str(event.model),
        "step": event.step,
        "steps": event.steps,
        "last_step": event.figures,
        "held_out": event.held_out,
        "seconds": event.seconds,
        "memory": {name: ledger.to_dict() for name, ledger in event.ledgers.items()},
    }


def facts_of(figures: dict[str, float]) -> str:
    """The figures that are shown, in order: `loss 1.2345  norm 0.5`."""
    return "  ".join(f"{name} {_number(figures[key])}" for key, name in _SHOWN.items() if key in figures)


def worst_share(figures: dict[str, float]) -> str:
    """The largest share of saturated or flushed values, where it is above TROUBLE_SHARE; else nothing."""
    shares = [(value, key) for key, value in figures.items() if key.startswith(_SHARES)]
    share, key = max(shares, default=(0.0, ""))
    kind, _, role = key.partition("/")
    return f"{role} {kind} {share:.1%}" if share > TROUBLE_SHARE else ""


def _number(value: float) -> str:
    return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:.4f}"


_RENDERERS: dict[type, Callable] = {
    Noted: FinetuneReporter.noted,
    Started: FinetuneReporter.began,
    Stepped: FinetuneReporter.went,
    HeldOut: FinetuneReporter.held_out,
    Ended: FinetuneReporter.ended,
}
