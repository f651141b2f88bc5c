"""The command `narrowgauge`: finds the command's module, runs it, and turns what goes wrong into one line and a code.

Exit codes: 0 done; 2 bad arguments or configuration; 1 anything else that failed; 130 interrupted.
Modules of commands load on use, so that `--help` costs nothing beyond the import of torch.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import narrowgauge
from narrowgauge.errors import ConfigError, NarrowgaugeError, RecipeError, closest

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class Command(NamedTuple):
    """Where a command lives: `run(argv) -> int` in `narrowgauge.cli.MODULE`, by the name of FUNCTION."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "train": Command("train", "train", "train a language model; with no option: a small GPT in FP8"),
    "sft": Command("finetune", "sft", "fine-tune a Hugging Face model on examples"),
    "dpo": Command("finetune", "dpo", "fine-tune one on preferences"),
    "grpo": Command("finetune", "grpo", "fine-tune one on rewards, by groups of answers"),
    "ppo": Command("finetune", "ppo", "fine-tune one on rewards, by PPO"),
    "reward": Command("finetune", "reward", "train a reward model on preferences"),
    "resume": Command("train", "resume", "continue a run exactly where its last checkpoint stands"),
    "eval": Command("runs", "evaluate", "loss and perplexity of a run, or of a Hugging Face model"),
    "generate": Command("runs", "generate", "continue a prompt, or answer a file of questions"),
    "export": Command("runs", "export", "write a run's model as a Hugging Face directory"),
    "report": Command("report", "report", "one HTML file that shows what precision did in a run"),
    "plan": Command("plan", "plan", "what a model takes on N GPUs: bytes by role, layouts, what fits"),
    "tune": Command("tune", "tune", "choose a precision for each layer, within a budget: measured, solved, verified"),
    "chart": Command("chart", "chart", "the precision chart of recipes"),
    "doctor": Command("doctor", "doctor", "what this machine does natively, what it emulates, and why"),
    "bench": Command("bench", "bench", "measure this machine: one benchmark, or all of them as a page"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; `argv` without the program's name, `sys.argv[1:]` by default."""
    argv = list(sys.argv[1:] if argv is None else argv)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (Python's None where a shell closed it: `>&-`)
    for stream in (sys.stdout, sys.stderr):  # sampled text on a terminal that is not UTF-8 must not end the command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _dispatch(argv)
        sys.stdout.flush()  # here, where a reader that has gone is still handled
        return code
    except BrokenPipeError:
        # the interpreter flushes at exit and would complain once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except SystemExit as stop:  # argparse, after printing a help text
        return int(stop.code or EXIT_DONE)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (NarrowgaugeError, OSError) as error:
        if "--debug" in argv:
            traceback.print_exc()
        is_ours = isinstance(error, NarrowgaugeError)
        advice = "" if is_ours else ": expected files that can be read and written: make room, or look at the path"
        if not (is_ours and error.is_told_elsewhere):
            print(f"error: {error}{advice}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | RecipeError) else EXIT_FAILED
    except (MemoryError, RuntimeError) as error:
        if "--debug" in argv or not _is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else "no more to be had"
        print(
            f"error: expected enough memory, found: {reason}: lower batch_size or sequence_length, or take a smaller "
            "model",
            file=sys.stderr,
        )
        return EXIT_FAILED


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """True where memory ran out; torch's allocator for the CPU has no exception of its own for it."""
    said = ("DefaultCPUAllocator: can't allocate", "Storage size calculation overflowed")
    is_torch = type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in said)
    return is_torch or isinstance(error, MemoryError)


def _show_warning(message: Warning | str, *_where: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _dispatch(argv: list[str]) -> int:
    words = [word for word in argv if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        print(_overview(), end="")
        return EXIT_DONE
    name, rest = words[0], words[1:]
    if name == "--version":
        print(f"narrowgauge {narrowgauge.__version__}")
        return EXIT_DONE
    if name not in COMMANDS:
        from narrowgauge.cli.processes import told_once

        kind = "option" if name.startswith("-") else "command"
        with told_once():
            raise ConfigError(f"unknown {kind} '{name}'{closest(name, ['--help', '--version', *COMMANDS])}")
    command = COMMANDS[name]
    module = importlib.import_module(f"narrowgauge.cli.{command.module}")
    return getattr(module, command.function)(rest)


def _overview() -> str:
    rows = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return f"""usage: narrowgauge COMMAND [options]

Train neural networks in low precision: the same numbers on a CPU as on a GPU.

commands:
{rows}

options:
  -h, --help   this text; after a command: its options, with examples
  --version    the version
  --debug      after an error, the traceback too

examples:
  narrowgauge train
  narrowgauge train --recipe bf16 --steps 200
  narrowgauge sft --model my-model --data chats.jsonl --steps 200
  narrowgauge generate runs/NAME --prompt "def main("
  narrowgauge chart --markdown

exit codes: 0 done, 2 bad arguments or configuration, 1 failed, 130 interrupted (after a checkpoint)
"""


if __name__ == "__main__":
    raise SystemExit(main())
