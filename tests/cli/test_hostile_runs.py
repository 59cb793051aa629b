"""Run folders that come from elsewhere or disappear: whatever their files hold, a command ends with a sentence."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main

from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.inference.checkpoints import read_manifest
from cdrmix.json_text import parse_json
from cdrmix.records import read_records
from cdrmix.run_folder import RunFolder
from cdrmix.training.checkpoint import read_progress

Arguments = Callable[..., list[str]]
Captured = pytest.CaptureFixture[str]
# No JSON, or JSON that is no record.
CONTENTS = {
    "nothing": b"",
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"step": 2, "files": ' + b'{"a":' * 2000 + b"1" + b"}" * 2001,
    "digits": b'{"step": ' + b"1" * 5000 + b"}",
    "no UTF-8": b"\xff\xfe\0",
    "infinite": b'{"step": Infinity, "format": 2, "files": {"a": {"bytes": NaN}}, "progress": {"tokens": 1e999}}',
    "others": b'{"step": [], "format": {}, "files": [1], "progress": [1], "config_hash": 7, "tokenizer": 1}',
    "a list": b"[[]]",
    "null": b"null",
}
CHECKPOINT = Path("checkpoints", "step-00000004")


@pytest.mark.parametrize("name", CONTENTS)
def test_any_json_of_a_run_is_data(name: str, toy_run: Path, tmp_path: Path, capsys: Captured) -> None:
    content = CONTENTS[name]
    run = Path(shutil.copytree(toy_run, tmp_path / "runs" / toy_run.name))
    for file in (
        "metrics.jsonl",
        "metrics.json",
        "faults.jsonl",
        CHECKPOINT / "state.json",
        CHECKPOINT / "manifest.json",
    ):
        (run / file).write_bytes(content)
        assert main(["checkpoints", "list", str(run)]) in (0, 2, 5)
    # What is no JSON is a last line that a kill cut off.
    if name in {"nothing", "nested lists", "nested objects", "digits", "no UTF-8"}:
        assert read_records(run / "metrics.jsonl").all == []
    else:
        with pytest.raises(ConfigError, match=r"metrics\.jsonl:1: .*; allowed|metrics\.jsonl:1: \w+: missing"):
            read_records(run / "metrics.jsonl")
    assert isinstance(RunFolder(run).summary(), dict)
    for read in (read_manifest, read_progress):
        with pytest.raises(CheckpointError, match=r"(manifest|state)\.json"):
            read(run / CHECKPOINT)
    assert main(["checkpoints", "verify", str(run)]) == 5
    capsys.readouterr()


@pytest.mark.parametrize("text", [b"[" * 100_000, b"1" * 5000, b"\xff", "[" * 100_000, "{", ""])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_a_run_that_is_removed_while_it_is_trained(
    arguments: Arguments, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    say = RunFolder.say

    def remove(self: RunFolder, text: str) -> None:
        if "checkpoint" not in text and self.metrics_jsonl.exists():
            shutil.rmtree(self.path)
        say(self, text)

    monkeypatch.setattr(RunFolder, "say", remove)
    assert main(["train", *arguments("run.seed=7")]) in (2, 5)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("cdrmix: error: ")
    assert str(workspace / "runs") in error


def test_a_working_folder_that_is_removed(
    toy_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    assert main(["checkpoints", "list", str(toy_run)]) == 2
    assert (
        capsys.readouterr().err
        == "cdrmix: error: the working folder of this process was removed; change to one that exists\n"
    )


def test_too_few_open_files(toy_run: Path, capsys: Captured) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    main(["checkpoints", "list", str(toy_run)])  # imports
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        status = main(["checkpoints", "list", str(toy_run)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert status == 2
    assert "may have 3 open files, which are too few; allow more: `ulimit -n 4096`" in capsys.readouterr().err
    assert os.path.isdir(toy_run)


def test_a_report_shows_what_a_run_holds_as_text(toy_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(toy_run, tmp_path / "runs" / toy_run.name))
    script = "<img src=x onerror=alert(1)>"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changed = [row | {"routers": [script for _ in row["routers"]]} if "routers" in row else row for row in rows]
    assert changed != rows
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    assert main(["report", str(run)]) == 0
    report = (run / "report.html").read_text()
    assert "&lt;img src=x onerror" in report
    assert "<img src=x" not in report
