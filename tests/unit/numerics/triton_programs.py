"""Runs the programs that need Triton in a state of its own: interpreted, or with a cache of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(program: str, *arguments: str, **variables: str) -> None:
    """Run a program of this folder under extra environment variables; an error of its own fails the test."""
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
