"""The live report answers this machine alone, reads no more than it is asked for, follows the run, and ends with it."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any

import pytest

from narrowgauge.cli.live import LiveReport, LiveRun
from narrowgauge.errors import ConfigError
from narrowgauge.observe.report_run import RunReader
from synthetic_run import write_run


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data is made whenever it is asked for."""
    monkeypatch.setattr("narrowgauge.cli.live.MOST_SHARE", 1.0)


def get(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_page_and_data_are_served_and_only_what_changed_is_sent_again(tmp_path):
    folder = write_run(tmp_path / "mine", steps=40)
    with LiveReport([RunReader(folder)]) as live:
        status, headers, body = get(live.port)
        assert status == 200 and b'data-live="5"' in body and b"connect-src 'self'" in body
        assert headers["Cache-Control"] == "no-store" and "ETag" not in headers
        status, headers, body = get(live.port, "/data.json")
        tag = headers["ETag"]
        assert status == 200 and json.loads(body)["runs"][0]["facts"]["last_step"] == 40
        assert get(live.port, "/data.json", If_None_Match=tag)[::2] == (304, b"")
        with (folder / "journal.jsonl").open("a") as file:
            file.write('{"kind": "step", "step": 41, "loss": 2.0}\n')
        status, headers, body = get(live.port, "/data.json", If_None_Match=tag)
        assert status == 200 and headers["ETag"] != tag and json.loads(body)["runs"][0]["facts"]["last_step"] == 41
        assert get(live.port, "/data.json", "HEAD")[::2] == (200, b"")
        assert get(live.port, "/etc/passwd")[0] == 404 and get(live.port, method="POST")[0] == 501


def test_the_data_is_made_once_for_a_journal_that_does_not_grow(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("narrowgauge.cli.live.report_data", lambda *words: made.append(words) or {"runs": []})
    with LiveReport([RunReader(write_run(tmp_path / "mine", steps=10, layers=1))]) as live:
        assert not made  # nothing is read before somebody looks
        for _ in range(3):
            assert get(live.port, "/data.json")[0] == 200
    assert len(made) == 1


def test_making_the_data_takes_a_small_part_of_the_time(tmp_path, monkeypatch):
    """It took a second by the clock: at most a part in 20 means that the next 19 seconds are the data of before."""
    clock = [100.0]

    def made(*words):
        clock[0] += 1.0
        return {"runs": [], "at": clock[0]}

    monkeypatch.setattr("narrowgauge.cli.live.MOST_SHARE", 0.05)
    monkeypatch.setattr("narrowgauge.cli.live.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("narrowgauge.cli.live.report_data", made)
    folder = write_run(tmp_path / "mine", steps=10, layers=1)
    live = LiveReport([RunReader(folder)])
    found = []
    for later in (0.0, 18.9, 0.2):
        clock[0] += later
        with (folder / "journal.jsonl").open("a") as file:
            file.write('{"kind": "step", "step": 11, "loss": 2.0}\n')
        found.append(live.data()[1]["at"])
    live.close()
    assert found == pytest.approx([101.0, 101.0, 121.1])


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""])
def test_other_hosts_are_refused(tmp_path, name):
    """A page of another site whose name was made to point here (DNS rebinding) sends its own name."""
    with LiveReport([RunReader(write_run(tmp_path / "mine", steps=10, layers=1))]) as live:
        status, _, body = get(live.port, "/data.json", Host=name.format(port=live.port))
        assert status == 421 and b"loss" not in body
        assert get(live.port, Host=f"localhost:{live.port}")[0] == 200
        assert get(live.port, Origin="http://evil.example")[0] == 421


def test_it_listens_on_the_loopback_address_alone_and_ends(tmp_path):
    before = threading.active_count()
    live = LiveReport([RunReader(write_run(tmp_path / "mine", steps=10, layers=1))])
    assert live._server.server_address[0] == "127.0.0.1" and live.url == f"http://127.0.0.1:{live.port}/"
    with pytest.raises(ConfigError, match="expected a port that is free"):
        LiveReport((), port=live.port)
    port = live.port
    live.close()
    live.close()
    with pytest.raises(ConnectionRefusedError):
        get(port)
    assert threading.active_count() == before


def test_before_the_run_and_after_its_folder_went_it_says_so(tmp_path):
    folder = write_run(tmp_path / "mine", steps=10, layers=1)
    with LiveReport(()) as live:
        status, _, body = get(live.port)
        assert status == 503 and b"none yet" in body
        live.follow([folder])
        assert get(live.port)[0] == 200
        (folder / "journal.jsonl").unlink()
        assert get(live.port)[0] == 503


def test_a_port_of_no_kind_is_refused():
    with pytest.raises(ConfigError, match="0 for any"):
        LiveRun(None, 70_000)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_training_is_the_same_run_in_bits_while_it_is_watched(tmp_path, corpus):
    from narrowgauge.train.config import TrainConfig
    from narrowgauge.train.events import RunStarted, StepDone
    from narrowgauge.train.loop import run

    class Listener:
        def __init__(self) -> None:
            self.steps: list[tuple[float, ...]] = []
            self.urls: list[str] = []
            self.seen: list[int] = []

        def say(self, text: str) -> None:
            self.urls.append(text.split()[1])

        def __call__(self, event: Any) -> None:
            if isinstance(event, StepDone):
                self.steps.append((event.loss, event.grad_norm))
                if self.urls:  # asked for at every step, from the thread that trains
                    port = int(self.urls[0].split(":")[2].strip("/"))
                    self.seen.append(json.loads(get(port, "/data.json")[2])["runs"][0]["facts"]["last_step"])
            assert not isinstance(event, RunStarted) or not self.urls

    found = []
    for name, port in (("alone", None), ("watched", 0)):
        config = TrainConfig.from_dict(
            {"model": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 64, "context": 32},
             "data": {"corpus": str(corpus / "*.txt"), "tokenizer": "bytes", "validation_fraction": 0.2},
             "batch_size": 2, "steps": 4, "eval_every": 0, "save_every": 0, "statistics_every": 2, "sample_tokens": 0,
             "threads": 1, "cache_dir": str(tmp_path / "cache"), "runs_dir": str(tmp_path / "runs"), "name": name}
        )  # fmt: skip
        listener = Listener()
        with LiveRun(listener, port) as live:  # pyright: ignore[reportArgumentType]
            run(config, live)
        found.append(listener)
    assert found[0].steps == found[1].steps and len(found[0].steps) == 4
    assert found[0].urls == [] and found[1].seen == [1, 2, 3, 4]
