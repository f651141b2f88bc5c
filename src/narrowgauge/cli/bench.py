"""`narrowgauge bench`: runs a measuring script of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import narrowgauge
from narrowgauge.cli.arguments import Parser
from narrowgauge.errors import ConfigError

SCRIPTS = {
    "linear": "forward and backward of a linear layer by every recipe, against torch and torchao",
    "casts": "the casts of every recipe, against a copy of the same array",
    "sqnr": "signal to noise of a layer's products by every recipe, against its derivation",
    "optimizer": "optimizer steps with 8-bit state, against torch, torchao and bitsandbytes",
    "memory": "bytes of parameters, gradients and states, and a step's peak, by every recipe",
    "state_error": "signal to noise of optimizer states by every code",
    "training": "tokens/s of the default GPT by narrow8, against torch's bfloat16 autocast",
    "parity": "validation loss of a small GPT by every recipe, against float32 (hours)",
    "ablations": "validation loss of a small GPT, one narrow format at a time (an hour)",
}


def bench(argv: Sequence[str]) -> int:
    """Run `benchmarks/WHAT.py` with the options after it; return its exit code."""
    width = max(map(len, SCRIPTS))
    parser = Parser(
        "bench",
        "Measure this machine; ratios are taken within one run. The scripts are in the repository's benchmarks/.\n\n"
        + "\n".join(f"  {name:<{width}} {what}" for name, what in SCRIPTS.items()),
        ["narrowgauge bench casts", "narrowgauge bench linear --json"],
    )
    parser.add_argument("what", choices=SCRIPTS, help="what to measure")
    parser.add_json_option()
    arguments = parser.parse(argv)
    command = [sys.executable, str(_script(arguments.what))]
    return _print_result(command) if arguments.json else subprocess.run(command).returncode


def _print_result(command: list[str]) -> int:
    """Run a script that writes its result as a file, and print that file; its table goes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NARROWGAUGE_RESULTS": folder}
        code = subprocess.run([*command, "--json"], env=environment, stdout=2).returncode
        for path in Path(folder).glob("*.json"):
            print(path.read_text(encoding="utf-8"), end="")
    return code


def _script(name: str) -> Path:
    """The script's path in the checkout that this package is installed from, or below the working directory."""
    homes = [Path(narrowgauge.__file__).resolve().parents[2], Path.cwd()]
    for home in homes:
        if (script := home / "benchmarks" / f"{name}.py").is_file():
            return script
    raise ConfigError(
        f"expected benchmarks/{name}.py beside the package or in this folder, found neither: the measuring scripts are "
        "part of the repository, not of the installed package; run this command in a checkout"
    )
