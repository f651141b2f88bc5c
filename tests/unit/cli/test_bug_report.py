"""`doctor --bug-report`: what helps is in it, and nothing private."""

from __future__ import annotations

import json
import socket

import pytest
import yaml

from narrowgauge.cli.bug_report import _leaves, _unless_ok, worst
from narrowgauge.cli.main import main
from narrowgauge.cli.privacy import Scrubber
from narrowgauge.integrations.finetune_config import SFTConfig
from narrowgauge.observe.journal_writer import JournalWriter
from narrowgauge.recipes.library import recipe
from narrowgauge.recipes.serialize import to_dict
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train.config import TrainConfig

USER, HOST = "gwendolyn", "pegasus-7.lab.example.org"
# everything that must not be found, however it is written
PRIVATE = (
    USER, "pegasus", "example.org", "confidential", "zebra", "herons", "10.20.30.40", "fe80", "sk-live", "hunter2",
    "/srv", "/home", "/tmp", "quarterly", "merger", "acquire", "GPU-1f2e",
)  # fmt: skip


@pytest.fixture
def secretive(monkeypatch, tmp_path):
    """A machine with a user, a host, and variables that must not be told."""
    monkeypatch.setenv("HOME", f"/home/{USER}")
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(name, USER)
    monkeypatch.setenv("API_KEY", "sk-live-hunter2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f2e3d4c")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    return tmp_path / f"{USER}-runs"


WARNINGS = (
    f"/home/{USER}/merger/step-000100 was removed: the run goes on from step 20",
    "no checkpoint at step 30: [Errno 28] No space left on device: '/srv/confidential/zebra.safetensors'",
    "'Acquire the herons before the quarterly report: expected fewer than 64 tokens",
    f"{USER}@example.org at 10.20.30.40:29500 and fe80::1c2d:3e4f, see https://pegasus.example.org/x?key=hunter2",
    f"no gradient in 'blocks.0.mlp.down' on {HOST}, share 0.5 of E4M3FN, folder C:\\Users\\{USER}\\confidential",
)


@pytest.fixture
def run(secretive):
    """A run of `train` whose configuration, journal and place are full of what must not be told."""
    config = TrainConfig(name=f"{USER}-merger", runs_dir=str(secretive.parent), sample_prompt="Acquire the herons")
    config.data.corpus = "/srv/confidential/*.txt"
    config.data.text_field = "zebra"
    config.optimizer.lr = 0.00321
    config.guard.mode = "warn"
    config.parallel.schedule = "gpipe"
    secretive.mkdir()
    (secretive / "config.yaml").write_text(config.to_yaml())
    header = {
        "versions": {"narrowgauge": "0.1.0"}, "device": "cpu", "threads": 2, "parameters": 25760,
        "recipe": to_dict(recipe("narrow8").replace(name=f"{USER}_recipe")),
        "environment": {"cpu": "AMD EPYC 7B13", "folder": f"/home/{USER}"},
        "conversion": [
            {"name": "blocks.0.mlp.down", "status": "converted", "reason": "", "backend": "emulated"},
            {"name": "lm_head", "status": "kept", "reason": "matches '*lm_head' of exclude", "backend": "native"},
        ],
    }  # fmt: skip
    journal = JournalWriter.create(secretive / "journal.jsonl", header)
    for step in range(1, 16):
        journal.write("step", step=step, loss=5.5 - step / 10, grad_norm=1.0, lr=0.00321, skipped=False)
    layers = {
        "blocks.0.mlp.down": {"input": {"sqnr_db": 31.5, "flushed": 0.25}},
        f"{USER}.up": {"input": {"sqnr_db": 12.5}},
    }
    journal.write("precision", step=15, layers=layers)
    for text in WARNINGS:
        journal.write("warning", step=15, message=text)
    journal.close()
    return secretive


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_nothing_private_is_in_a_report(run, form, capsys):
    assert main(["doctor", "--bug-report", "--run", str(run), *form]) == 0
    text = capsys.readouterr().out
    found = [secret for secret in PRIVATE if secret.casefold() in text.casefold()]
    assert not found


def test_what_helps_is_in_a_report(run, capsys):
    assert main(["doctor", "--bug-report", "--run", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["OMP_NUM_THREADS"] == "7"
    assert report["machine"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert report["machine"]["CUDA_VISIBLE_DEVICES"] == "set"
    assert report["packages"]["torch"].startswith("2.")
    config, journal = report["run"]["config"], report["run"]["journal"]
    assert config == {
        "data.corpus": "<text>", "data.text_field": "<text>", "optimizer.lr": 0.00321, "name": "<text>",
        "runs_dir": "<text>", "sample_prompt": "<text>", "guard.mode": "warn", "parallel.schedule": "gpipe",
    }  # fmt: skip
    assert [row["step"] for row in journal["step"]] == list(range(6, 16))
    assert journal["step"][-1]["loss"] == 4.0
    assert "input E4M3FN, scale current, float32, per tensor" in journal["recipe"]
    usual = {" ".join(line.split()) for line in str(Recipe()).splitlines()}
    assert not usual & set(journal["recipe"])  # what is as in every recipe helps nobody
    assert journal["environment"]["cpu"] == "AMD EPYC 7B13"
    assert journal["layers"] == {"converted": 1, "kept: matches <text> of exclude": 1}
    assert journal["worst"]["input flushed"] == "0.25 in blocks.0.mlp.down"
    assert journal["worst"]["input sqnr_db"].startswith("12.5 in ")
    said = [row["message"] for row in journal["warning"]]
    assert said[0] == "<path> was removed: the run goes on from step 20"
    assert said[1].startswith("no checkpoint at step 30: [Errno 28] No space left on device: ")
    assert "'blocks.0.mlp.down'" in said[4] and "0.5 of E4M3FN" in said[4]


def test_a_report_is_written_once_and_is_readable(run, tmp_path, capsys):
    path = tmp_path / "report.md"
    assert main(["doctor", "--bug-report", str(path), "--run", str(run)]) == 0
    assert "look at it" in capsys.readouterr().out
    text = path.read_text()
    blocks = [part.split("```")[0] for part in text.split("```yaml")[1:]]
    assert set(yaml.safe_load(blocks[0])) == {"config", "journal"}
    assert set(yaml.safe_load(blocks[1])) == {"products", "kernels", "collectives", "programs"}
    assert main(["doctor", "--bug-report", str(path)]) == 2
    assert "choose another name" in capsys.readouterr().err
    assert path.read_text() == text


def test_a_fine_tuning_runs_model_and_data_are_not_told(secretive, capsys):
    secretive.mkdir()
    config = SFTConfig(
        model=f"{USER}/zebra-7b", data="/srv/confidential.jsonl", output=str(secretive), schedule="cosine"
    )
    (secretive / "config.yaml").write_text(config.to_yaml())
    assert main(["doctor", "--bug-report", "--run", str(secretive), "--json"]) == 0
    text = capsys.readouterr().out
    assert not [secret for secret in PRIVATE if secret.casefold() in text.casefold()]
    run = json.loads(text)["run"]
    assert run["config"]["schedule"] == "cosine" and run["config"]["model"] == "<text>"
    assert "expected a run" in run["journal"]  # there is none: said, and no reason to give up


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["doctor", "--run", "x"], "beside --bug-report"),
        (["doctor", "--bug-report", "--run", "no-such-folder"], "expected a run folder"),
        (["doctor", "--bug-report", "no-such-folder/report.md"], "expected a file that can be written"),
    ],
)
def test_wrong_words(words, expected, capsys):
    assert main(words) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("E4M3FN saturated 3 of 4 at 120 tokens/s", "E4M3FN saturated 3 of 4 at 120 tokens/s"),
        ("read data/part.txt", "read <path>"),
        ("the model's loss is not finite", "the model's loss is not finite"),
        ("expected 'narrow8', found \"herons fly\"", "expected 'narrow8', found <text>"),
        ("'cut off before its end", "<text>"),
        ("gloo at 127.0.0.1:29500", "gloo at <address>"),
        ("mail a.b@example.com", "… <address>"),
        ("ratio 16:9", "ratio 16:9"),
    ],
)
def test_what_is_left_of_a_message(text, expected):
    assert Scrubber({"narrow8"}).message(text) == expected


def test_the_worst_is_the_largest_share_and_the_smallest_ratio():
    row = {
        "step": 9,
        "layers": {
            "a": {"input": {"saturated": 0.1, "sqnr_db": 30.0}, "grad": {"zero": 0.5}},
            "b": {"input": {"saturated": 0.3, "sqnr_db": 20.0}, "grad": {"zero": float("nan")}},
            "c": {"param": {"lost": float("nan")}},
            "d": {"param": {"lost": 0.25}},
        },
    }
    assert worst(row) == {
        "step": 9, "input saturated": "0.3 in b", "input sqnr_db": "20 in b", "grad zero": "0.5 in a",
        "param lost": "0.25 in d",
    }  # fmt: skip


@pytest.fixture
def ann(monkeypatch, tmp_path):
    """A user of three letters, at a host whose first name tells it, in a folder that does."""
    for name in ("USER", "LOGNAME", "USERNAME", "COMPUTERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOGNAME", "ann")
    monkeypatch.setenv("HOSTNAME", "hippogriff")
    monkeypatch.setenv("HOME", "/home/root")
    monkeypatch.setattr(socket, "gethostname", lambda: "pegasus.lab")
    (tmp_path / "hedgehog").mkdir()
    monkeypatch.chdir(tmp_path / "hedgehog")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version 3 by ann, ANN and Ann", "version 3 by …, … and …"),
        ("annotated, Joann", "annotated, Joann"),  # three letters are in many words
        ("pegasus, PEGASUS-2 and xpegasusx", "…, …-2 and x…x"),
        ("hippogriff and hedgehog", "… and …"),
        ("root in the home of a user on localhost", "root in the home of a user on localhost"),  # finds nobody
        ("at fe80::1c2d:3e4f or 00:1b:44:11:3a:b7", "at <address> or <address>"),
    ],
)
def test_what_is_left_of_a_fact(ann, text, expected):
    assert Scrubber().fact(text) == expected


def test_texts_of_rows_are_scrubbed_keys_and_lists_among_them(ann):
    found = Scrubber({"blocks.zebra"}).values({"ann": [1, "at ann's", {"step": ("herons", 2.5)}], "zebra": None})
    assert found == {"…": [1, "at …'s", {"step": ["…", 2.5]}], "zebra": None}  # a part of a name that may stay


def test_lists_and_free_mappings_of_a_configuration_are_counted():
    values = {
        "a": {"lr": 0.5, "paths": ["/srv/zebra", "x"], "empty": ()},
        "recipe_fields": {"zebra": {"b": 1}},
        "c": None,
    }
    assert dict(_leaves(values)) == {"a.lr": 0.5, "a.paths": 2, "a.empty": 0, "recipe_fields": 1, "c": None}


def test_of_a_package_is_said_what_its_version_does_not() -> None:
    said = [_unless_ok(status) for status in ("ok", "not installed", "too old: 2.11 or newer is needed")]
    assert said == ["", "", "(too old: 2.11 or newer is needed)"]
