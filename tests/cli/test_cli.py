"""Tests of the command line: a whole run in-process, every command on it, and what a person sees when it fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cdrmix.cli import main
from cdrmix.errors import CheckpointError
from cdrmix.train import launch
from cdrmix.train.run import RunFolder, read_metrics

Arguments = Callable[..., list[str]]
ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "cdrmix-core-tiny.yaml"


@pytest.fixture(scope="module")
def finished(arguments: Arguments, place: Path) -> RunFolder:
    """A finished run, its console output in console.txt beside it."""
    with (place / "console.txt").open("w") as console, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", console)
        status = main(["train", *arguments()])
    assert status == 0
    (path,) = (place / "runs").iterdir()
    return RunFolder.open(path)


def test_a_run_folder_holds_everything_and_its_path_is_the_last_line(place: Path, finished: RunFolder) -> None:
    assert (place / "console.txt").read_text().splitlines()[-1] == str(finished.path)
    names = {path.name for path in finished.path.iterdir()}
    assert {"config_snapshot.yaml", "metrics.jsonl", "metrics.json", "train.log", "checkpoints"} <= names
    assert {"report.html", "loss.png", "export", "tokenizer.json"} <= names
    assert [row["step"] for row in read_metrics(finished.metrics_jsonl)] == [1, 2, 3, 4]
    summary = finished.summary()
    assert summary["finished"]
    assert summary["held_out"]["bits_per_byte"] > 0
    assert summary["corpus"]["documents"] == 24
    for line in ("gzip -9", "zstd -19", "unigram", "It writes:"):
        assert line in finished.log.read_text()


def test_the_report_needs_no_network_and_escapes_what_it_shows(
    finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    finished.update_summary({"sample": {"prompt": "<script>", "text": "a & b </pre>"}})
    assert main(["report", str(finished.path)]) == 0
    assert capsys.readouterr().out.strip() == str(finished.report)
    page = finished.report.read_text()
    assert "&lt;script&gt;" in page
    assert "a &amp; b &lt;/pre&gt;" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "data:image/png;base64," in page
    assert finished.plot.read_bytes().startswith(b"\x89PNG")
    assert f"{finished.summary()['held_out']['zstd19_bits_per_byte']:.3f}" in page


def test_eval_prints_the_run_s_own_figures(finished: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for model in (finished.path, finished.export):
        assert main(["eval", "--model", str(model), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == finished.summary()["held_out"]
    assert main(["eval", "--model", str(finished.path)]) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_eval_reads_other_text_with_the_model_s_tokenizer(
    arguments: Arguments, place: Path, finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    other = place / "other"
    other.mkdir()
    for number in range(12):
        (other / f"{number}.txt").write_text(f"Number {number} is not {number + 1}; äöü.\n" * 4)
    model = ["eval", "--model", str(finished.export), "--json"]
    assert main([*model, "--config", str(TINY), *arguments()[2:], f"data.source.paths=[{other}]"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["text_bytes"] != finished.summary()["held_out"]["text_bytes"]
    assert figures["bits_per_byte"] > 0


def test_generate_streams_and_repeats(finished: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for model in (finished.path, finished.export):
        assert main(["generate", "--model", str(model), "--prompt", "def ", "--max-new-tokens", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")
    assert main(["generate", "--model", str(finished.path), "--max-new-tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out
    assert main(["generate", "--model", str(finished.path), "--top-p", "1.5"]) == 2
    assert "--top-p must be above 0 and at most 1; found 1.5" in capsys.readouterr().err


def test_export_and_compare(place: Path, finished: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "exported"
    assert main(["export", "--model", str(finished.path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert main(["compare", str(finished.path), str(out)]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
    assert main(["export", "--model", str(finished.path)]) == 2  # its export/ is there already
    (first, *_) = sorted((finished.checkpoints).glob("step-*"))
    assert main(["compare", str(finished.path), str(first)]) == 1
    assert "steps differ" in capsys.readouterr().out
    assert main(["compare", str(finished.path), str(place)]) == CheckpointError.exit_code


def test_a_finished_training_goes_on_with_what_is_missing(
    arguments: Arguments, place: Path, finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.checkpoints.rglob("*")}
    summary = finished.summary()
    shutil.rmtree(finished.export)
    finished.report.unlink()
    finished.update_summary({"finished": False})
    with finished.held():  # another process works on it: not to be taken for unfinished
        assert main(["train", *arguments(), "--resume", str(finished.path)]) == 2
    assert "another process" in capsys.readouterr().err
    assert main(["train", *arguments(), "--resume", "auto"]) == 0
    out = capsys.readouterr().out
    assert "Stage A is finished: 4 steps" in out
    assert out.splitlines()[-1] == str(finished.path)
    assert finished.export.is_dir()
    assert finished.report.is_file()
    assert {path: path.stat().st_mtime_ns for path in finished.checkpoints.rglob("*")} == before
    assert finished.summary()["held_out"] == summary["held_out"]


def test_params_and_validate(arguments: Arguments, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params", "--config", str(ROOT / "configs" / "cdrmix-core-1b.yaml")]) == 0
    table = capsys.readouterr().out
    for part in ("embedding", "time-mix", "attention", "router", "experts", "norms", "head", "above the name 1b"):
        assert part in table
    assert main(["validate", *arguments()]) == 0
    snapshot = place / "snapshot.yaml"
    snapshot.write_text(capsys.readouterr().out)
    assert main(["validate", "--config", str(snapshot)]) == 0
    assert capsys.readouterr().out == snapshot.read_text()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["train", "--config", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["validate", "--config", str(TINY), "train.step=5"], 2, "train.steps"),
        (["validate", "--config", str(TINY), "--bogus"], 2, "'--bogus'"),
        (["validate", "--config", str(TINY), "steps"], 2, "'steps'"),
        (["compare", "a", "b", "c=d"], 2, "'c=d'"),
        (["eval", "--model", "nowhere"], 5, "nowhere does not exist"),
        (["report", "nowhere"], 2, "not a run folder"),
    ],
)
def test_mistakes_get_a_message_and_an_exit_code(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == status
    error = capsys.readouterr().err
    assert error.startswith("cdrmix: error: ")
    assert message in error
    assert "Traceback" not in error
    assert main([*words, "--traceback"]) == status
    assert "Traceback" in capsys.readouterr().err


def test_help_does_not_wait_for_pytorch() -> None:
    code = "import sys, cdrmix.cli; cdrmix.cli.parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_two_processes_end_and_explain_themselves_as_one(arguments: Arguments, place: Path) -> None:
    command = [sys.executable, "-m", "cdrmix.cli", "train", "--nproc", "2"]
    command += arguments(f"run.root={place / 'two'}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    (path,) = (place / "two").iterdir()
    assert done.stdout.splitlines()[-1] == str(path)
    assert done.stdout.count("Stage A: ") == 1
    # Found wrong by the workers, not by the launcher: one message, the exit code of its kind, no stack trace.
    bad = subprocess.run([*command, "--resume", "nowhere"], capture_output=True, text=True, check=False, timeout=200)
    assert bad.returncode == 2
    assert bad.stderr.count("cdrmix: error: nowhere is not a run folder") == 1
    assert "Traceback" not in bad.stderr
    assert main(["train", "--nproc", "2", *arguments("train.batch_rows=1")]) == 2


WORKER = """
import os, signal, sys, time
from pathlib import Path
from cdrmix.train import launch
launch.begin_work()
caught = []
signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
Path(sys.argv[1], f"ready-{os.getpid()}").touch()
while not caught:
    time.sleep(0.02)
time.sleep(0.3)
launch.report_failure(75, f"stopped by {len(caught)} signal")
"""


def test_a_signal_reaches_every_worker_once(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from cdrmix.train import launch\n"
        "real = subprocess.Popen\n"
        f"worker = [sys.executable, '-c', {WORKER!r}, {str(tmp_path)!r}]\n"
        "class Pair(real):\n"  # two workers, without torchrun between
        "    def __init__(self, command, env, start_new_session):\n"
        "        self.other = real(worker, env=env)\n"
        "        super().__init__(worker, env=env, start_new_session=start_new_session)\n"
        "    def wait(self):\n"
        "        return self.other.wait() or super().wait()\n"
        "launch.subprocess.Popen = Pair\n"
        "status, message = launch.launch(2, [])\n"
        "print(message); sys.exit(status)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.strip()) == (75, "stopped by 1 signal")


def test_the_first_failure_is_the_one_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.FOLDER, str(tmp_path))
    launch.report_failure(9, "the cause")
    launch.report_failure(1, "a consequence")
    assert json.loads((tmp_path / "failure.json").read_text()) == {"status": 9, "message": "the cause"}
    assert os.environ[launch.FOLDER] == str(tmp_path)
