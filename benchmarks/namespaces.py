"""Two "nodes" on one machine: network namespaces joined by a veth pair whose both ends are shaped to a rate.

Needs Linux, root (CAP_NET_ADMIN and CAP_SYS_ADMIN), and `ip` and `tc` of iproute2; `missing` says which of them lacks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# a bucket that lets through a quarter of a megabyte at once, and a queue of 50 ms
SHAPE = ("tbf", "burst", "256kb", "latency", "50ms", "rate")
NETWORK = "10.213.7"


@dataclass(frozen=True)
class Node:
    """A namespace with one interface and address of its own."""

    namespace: str
    interface: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` on this node."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def sent_bytes(self) -> int:
        """What has left the interface, headers of packets included."""
        path = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        found = subprocess.run(self.command(["cat", path]), capture_output=True, text=True, check=True)
        return int(found.stdout)

    def environment(self) -> dict[str, str]:
        """This process's environment, with gloo bound to the interface; names are looked up in vain for a second."""
        return {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "RES_OPTIONS": "timeout:1 attempts:1"}


def missing() -> str | None:
    """Why this machine cannot have two nodes; None: it can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"`{program}` is not installed: expected iproute2"
    try:
        with two_nodes("100mbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}; expected root on a Linux with veth and tbf"


@contextmanager
def two_nodes(rate: str) -> Iterator[tuple[Node, Node]]:
    """Two nodes, each sending at most `rate` (as tc writes it: "200mbit") to the other; removed at the end."""
    label = f"ng{os.getpid()}"
    nodes = tuple(Node(f"{label}-{n}", f"{label}v{n}", f"{NETWORK}.{n + 1}") for n in range(2))
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.namespace)
        first, second = nodes
        _run(
            "ip", "link", "add", first.interface, "netns", first.namespace,
            "type", "veth", "peer", "name", second.interface, "netns", second.namespace,
        )  # fmt: skip
        for node in nodes:
            inside = ("ip", "-n", node.namespace)
            _run(*inside, "addr", "add", f"{node.address}/24", "dev", node.interface)
            _run(*inside, "link", "set", node.interface, "up")
            _run(*inside, "link", "set", "lo", "up")
            _run(*node.command(["tc", "qdisc", "add", "dev", node.interface, "root", *SHAPE, rate]))
        yield nodes  # type: ignore[misc]
    finally:
        for node in nodes:  # the interfaces go with their namespaces
            subprocess.run(["ip", "netns", "del", node.namespace], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
