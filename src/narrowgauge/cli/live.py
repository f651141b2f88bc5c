"""The report of a run under way, served on this machine alone: nothing is read before a browser asks for it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.observe.report_data import report_data
from narrowgauge.observe.report_page import page
from narrowgauge.observe.report_run import RunReader
from narrowgauge.train import events

if TYPE_CHECKING:
    from narrowgauge.cli.progress import Reporter

LOOPBACK = "127.0.0.1"
EVERY_S = 5.0  # between two looks of the page
MOST_SHARE = 0.05  # of the time goes into making the data, however large it is: training shares the process


class LiveReport(AbstractContextManager["LiveReport"]):
    """Serves the report of `runs` from a thread of its own; `url` says where. As a context it ends with it.

    Only requests that name this machine as their host are answered, so that no page of another site can read it.
    """

    def __init__(self, runs: Sequence[RunReader], reference: int = 0, port: int = 0) -> None:
        """runs: none yet, where `follow` names them. port: 0 for any that is free.

        Raises ConfigError for a port that cannot be had.
        """
        self._runs, self._reference = list(runs), reference
        self._folders: list[Path] = []
        self._lock = threading.Lock()
        self._held: tuple[str, dict[str, Any]] | None = None
        self._rests_until_s = 0.0
        if not 0 <= port <= 65535:
            raise ConfigError(f"live_port={port}: expected 0 for any that is free, or 1 to 65535: change it")
        try:
            self._server = _Server((LOOPBACK, port), self)
        except OSError as error:
            raise ConfigError(
                f"live_port={port}: expected a port that is free, found: {error.strerror}: take another, or 0 for any"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="report", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        """For a browser on this machine."""
        return f"http://{LOOPBACK}:{self.port}/"

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def follow(self, folders: Sequence[Path]) -> None:
        """Serve these runs: their journals are opened when a browser asks first, so that training does not wait."""
        self._folders = list(folders)

    def data(self) -> tuple[str, dict[str, Any]]:
        """(a tag that changes with the journals, the report's data), made anew where a journal has grown.

        Not more often than `MOST_SHARE` of the time allows: until then the data of before.
        """
        with self._lock:
            begin_s = time.monotonic()
            if self._held is not None and begin_s < self._rests_until_s:
                return self._held
            if not self._runs:
                self._runs = [RunReader(folder) for folder in self._folders]
            if not self._runs:
                raise ConfigError("expected a run that has begun, found none yet: come back in a moment")
            changed = [run.update() for run in self._runs]  # all of them, not up to the first
            if self._held is None or any(changed):
                tag = "-".join(run.tag for run in self._runs)
                self._held = f'"{tag}"', report_data(self._runs, self._reference)
                end_s = time.monotonic()
                self._rests_until_s = end_s + (end_s - begin_s) * (1 / MOST_SHARE - 1)
            return self._held


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], report: LiveReport) -> None:
        self.report = report
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no news; anything else has a line, and training goes on."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"warning: the live report could not answer: {error!r}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10
    server_version, sys_version = "narrowgauge", ""

    def do_GET(self) -> None:
        if not self._is_for_us():
            return
        name = self.path.partition("?")[0]
        if name not in ("/", "/data.json"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"expected / or /data.json\n")
            return
        try:
            tag, data = self.server.report.data()
        except (CheckpointError, ConfigError, OSError) as error:  # the folder is gone, or the journal is begun anew
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", f"{error}\n".encode())
            return
        if self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, "", b"", tag)
        elif name == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page(data, live_every_s=EVERY_S).encode())
        else:
            body = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
            self._answer(HTTPStatus.OK, "application/json", body, tag)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal is the run's."""

    def _is_for_us(self) -> bool:
        """False, and answered, where the request names another host: a page of another site would (DNS rebinding)."""
        port = self.server.server_address[1]
        ours = {f"{name}:{port}" for name in (LOOPBACK, "localhost")}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") in ours and origin in (None, *(f"http://{each}" for each in ours)):
            return True
        self._answer(
            HTTPStatus.MISDIRECTED_REQUEST, "text/plain; charset=utf-8",
            f"expected the host {LOOPBACK}:{port}: open the address that the run printed\n".encode(),
        )  # fmt: skip
        return False

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, tag: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind, "Content-Length": str(len(body)), "ETag": tag, "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
            "Content-Security-Policy": "frame-ancestors 'none'",
        }  # fmt: skip
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class LiveRun(AbstractContextManager["LiveRun"]):
    """A listener for `train.run` that passes events on to a reporter, and serves the run's report from its start on."""

    def __init__(self, reporter: Reporter, port: int | None) -> None:
        """port: 0 for any that is free; None: nothing is served. Raises ConfigError for one that cannot be had."""
        self.reporter = reporter
        self._live = None if port is None else LiveReport((), port=port)

    def __call__(self, event: events.Event) -> None:
        """Pass an event on; where the run has begun, say where its report is."""
        self.reporter(event)
        if self._live is not None and isinstance(event, events.RunStarted):
            self._live.follow([event.run_dir])
            self.reporter.say(f"report   {self._live.url}")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving."""
        if self._live is not None:
            self._live.close()


def serve(runs: Sequence[RunReader], reference: int, port: int) -> int:
    """Serve the report until interrupted."""
    with LiveReport(runs, reference, port) as live:
        print(f"report   {live.url} (Ctrl-C ends it)", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("stopped")
    return 0
