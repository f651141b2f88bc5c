"""Runs the programs that need Triton in a state of its own, which is read when kernels are defined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def interpret(program: Path) -> None:
    """Run a program with Triton's interpreter in place of its compiler; an error of its own fails the test."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
