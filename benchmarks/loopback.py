"""Bytes on the loopback interface, as the kernel counts them: headers of packets and acknowledgements included."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_ALONE = "NARROWGAUGE_OWN_LOOPBACK"


def sent_bytes() -> int:
    """What this network namespace's loopback interface has sent since it began, of all processes."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("/proc/self/net/dev lists no interface 'lo'")


def is_alone() -> bool:
    """True where no process but this benchmark's can use the interface."""
    return _ALONE in os.environ


def run_alone() -> None:
    """Begin this program anew in a network namespace of its own, so that nobody else's bytes are counted.

    Where that is not possible (it needs Linux, root, and `ip` of iproute2) it goes on as it is, and says so.
    """
    if is_alone():
        return
    begin = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    programs = [shutil.which(program) for program in ("unshare", "ip")]
    if None in programs or subprocess.run([*begin, "true"], capture_output=True, check=False).returncode:
        print("the loopback interface is shared with other programs, whose bytes are counted, too", file=sys.stderr)
        return
    os.environ[_ALONE] = "1"
    os.execvp(begin[0], [*begin, sys.executable, *sys.argv])
