"""`cdrmix gate` and `cdrmix evidence` with hostile gates, damaged files, wrong arguments and unfinished runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import main

from cdrmix.durable import sha256_file

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(toy_run: Path, tmp_path: Path) -> Path:
    """A run of 4 steps, too short for the gate `loss`: quick is on HOLD, exit code 15."""
    return Path(shutil.copytree(toy_run, tmp_path / "run"))


def gate(run: Path, preset: str, *words: str | Path) -> int:
    return main(["gate", "--model", str(run), "--preset", preset, *map(str, words)])


def verify(*words: str | Path) -> int:
    return main(["evidence", "verify", *map(str, words)])


def verdicts(capsys: Capture) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["verdicts"]
    return found


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.chmod(0o644)
    path.write_text(text.replace(old, new))


GATES = """
import sys

import numpy as np

from cdrmix.ladder.verdict import Outcome, Verdict


def leaves(facts):
    sys.exit(0)


def writes(facts):
    facts.run["name"] = "another"
    for row in facts.rows:
        row["loss"] = 0.0
    return Verdict(Outcome.PASS, "rewritten")


def single(facts):
    return Verdict("PASS", "text", np.float32(0.5), threshold=np.int64(1), n=np.int64(3))


def unknown(facts):
    return Verdict("GOOD", "text")


def not_a_number(facts):
    return Verdict(Outcome.PASS, "text", float("nan"))


def chance(facts):
    return Verdict(Outcome.FAIL, "text", 1.0, p_value=float("nan"))


def likely(facts):
    return Verdict(Outcome.PASS, "text", 1.0, p_value=1.5)


def mute(facts):
    return Verdict(Outcome.PASS, None)


def crossed(facts):
    return Verdict(Outcome.PASS, "text", 1.0, low=2.0, high=1.0)


def few(facts):
    return Verdict(Outcome.PASS, "text", n=-1)


def sign(facts):
    return Verdict(Outcome.PASS, "text", comparison="about")


def text(facts):
    return Verdict(Outcome.PASS, "text", "0.5")


def huge(facts):
    return Verdict(Outcome.PASS, "text", 10**400)
"""
ODD = {
    "unknown": "outcome is 'GOOD'; allowed: one of PASS, FAIL, HOLD, NOT_MEASURED",
    "not_a_number": "value is nan; allowed: a finite number or None",
    "chance": "p_value is nan; allowed: a finite number or None",
    "likely": "p_value is 1.5; allowed: a number from 0 to 1",
    "mute": "reason is None; allowed: text",
    "crossed": "low is 2.0; allowed: at most high, 1.0",
    "few": "n is -1; allowed: an integer of at least 0",
    "sign": "comparison is 'about'; allowed: one of at most, below, at least",
    "text": "value is '0.5'; allowed: a finite number or None",
    "huge": "allowed: a finite number or None",
}


@pytest.fixture
def custom_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with the functions of GATES, and a module that ends the process."""
    information = tmp_path / "odd_gates-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-gates\nVersion: 1\n")
    lines = [f"{name} = odd_gates:{name}" for name in ("leaves", "writes", "single", *ODD)]
    (information / "entry_points.txt").write_text("\n".join(["[cdrmix.gates]", *lines, "early = odd_early:gate"]))
    (tmp_path / "odd_gates.py").write_text(GATES)
    (tmp_path / "odd_early.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("custom_gates")
def test_a_gate_cannot_end_the_command(run: Path, capsys: Capture) -> None:
    assert gate(run, "quick", "--gate", "leaves") == 14
    assert "leaves: FAIL: the gate raised SystemExit: 0" in capsys.readouterr().out
    assert json.loads((run / "gates" / "quick.json").read_text())["predicate"]["failedTests"] == ["leaves"]
    assert gate(run, "quick", "--gate", "early") == 12
    assert "failed with SystemExit: 0" in capsys.readouterr().err


@pytest.mark.usefixtures("custom_gates")
def test_a_gate_cannot_change_the_facts(run: Path, capsys: Capture) -> None:
    assert gate(run, "quick", "--gate", "writes", "--json") == 15
    assert verdicts(capsys)["writes"]["outcome"] == "PASS"
    facts = json.loads((run / "gates" / "quick.facts.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in facts["rows"]] == [row["loss"] for row in rows]
    assert facts["run"]["name"] != "another"


@pytest.mark.usefixtures("custom_gates")
def test_odd_verdicts(run: Path, capsys: Capture) -> None:
    """A verdict with a field of another type or range is a FAIL with the reason; NumPy's numbers are numbers."""
    words = [word for name in ("single", *ODD) for word in ("--gate", name)]
    assert gate(run, "quick", *words, "--json") == 14
    found = verdicts(capsys)
    for name, reason in ODD.items():
        assert found[name]["outcome"] == "FAIL"
        assert reason in found[name]["reason"], found[name]["reason"]
    single = found["single"]
    assert (single["outcome"], single["value"], single["threshold"], single["n"]) == ("PASS", 0.5, 1, 3)


def test_nan_never_passes(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """NaN in metrics.jsonl, metrics.json and a file of results is what null is there: not finite, or not measured."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"loss": float("nan"), "next_token_loss": float("nan")}
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    summary = json.loads((run / "metrics.json").read_text())
    summary["held_out"]["perplexity"] = float("nan")
    (run / "metrics.json").write_text(json.dumps(summary))
    file = results_file(run, tmp_path, suite="reasoning", measures={"gsm8k exact_match": float("nan")})
    assert gate(run, "production", "--no-measure", "--json", "--results", file) == 14
    found = verdicts(capsys)
    assert found["finite"]["reason"] == "step 4: loss is not a finite number"
    assert found["loss"]["value"] is not None  # the others; with NaN among them the median is no figure
    assert found["loss"]["outcome"] != "PASS"
    assert found["perplexity"]["outcome"] == "FAIL"
    assert found["gsm8k"]["outcome"] == "NOT_MEASURED"


def results_file(
    run: Path, folder: Path, suite: str, measures: dict[str, float | None], facts: dict[str, Any] | None = None
) -> Path:
    """A file of results of the model of a run."""
    weights = {"model.safetensors": sha256_file(run / "export" / "model.safetensors")}
    shown = [
        {"name": name, "value": value, "low": None, "high": None, "count": 500, "problem": None if value else "no set"}
        for name, value in measures.items()
    ]
    result = {"suite": suite, "measures": shown, "facts": {"model": {"weights": weights}, **(facts or {})}, "notes": []}
    path = folder / f"{suite}.json"
    path.write_text(json.dumps([result]))
    return path


def test_tasks_need_all_sets(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """A set that is missing would raise the mean of the others. BoolQ is not asked for."""
    figures: dict[str, float | None] = {"arc_easy accuracy": 0.6, "piqa accuracy": None, "boolq accuracy": None}
    facts = {"chance": {"arc_easy": 0.25}}
    file = results_file(run, tmp_path, "choices", figures, facts)
    assert gate(run, "full", "--no-measure", "--json", "--results", file) in (14, 15)
    found = verdicts(capsys)["tasks"]
    assert found["outcome"] == "NOT_MEASURED"
    assert found["reason"].startswith("choices: piqa was not measured: no set")
    facts["chance"]["piqa"] = 0.5
    file = results_file(run, tmp_path, "choices", figures | {"piqa accuracy": 0.8}, facts)
    assert gate(run, "full", "--no-measure", "--json", "--results", file) in (14, 15)
    found = verdicts(capsys)["tasks"]
    assert found["outcome"] == "PASS"
    assert "arc_easy 0.350, piqa 0.300" in found["reason"]


def test_steps_are_trained_again_apart_from_the_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """They reach neither the mirror of the run nor its evaluations. Of 4 steps one is trained again, and the second
    training ends with it, so that the checkpoint of step 1 is continued."""
    edit(run / "config_snapshot.yaml", "mirror: null", f"mirror: {tmp_path / 'mirror'}")
    edit(run / "config_snapshot.yaml", "suites: []", "suites: [domains]")
    started: list[object] = []
    monkeypatch.setattr("cdrmix.watch.attached.AttachedWatcher._start", started.append)
    assert gate(run, "full", "--json") in (14, 15)
    assert not started
    found = verdicts(capsys)
    for name in ("determinism", "resume"):
        assert found[name]["outcome"] == "PASS", found[name]["reason"]
        assert found[name]["n"] == 1
    assert not (tmp_path / "mirror").exists()
    measured = json.loads((run / "gates" / "measured.json").read_text())
    assert measured["determinism"]["compared_with_the_run"] is True


@pytest.mark.parametrize("preset", ["quick", "standard"])
def test_a_changed_export_is_refused(run: Path, preset: str, capsys: Capture) -> None:
    """Presets without the gate `export` refuse it. Evidence that a kill left half-written is written again."""
    edit(run / "export" / "README.md", "#", "##")
    assert gate(run, preset) == 5
    error = capsys.readouterr().err
    assert "README.md was changed" in error
    assert "export the run again" in error
    assert not (run / "gates").exists()
    edit(run / "export" / "README.md", "##", "#")
    (run / "export" / f"gates-{preset}.json").write_text("{")
    assert gate(run, preset) == 15
    assert verify(run / "export") == 15


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--results", [], "expected a list of at least one result; found an empty list"),
        ("--results", {"a": 1}, "expected result 1 to have a suite"),
        ("--forecast", [], "expected an object with rungs, low, high, loss, notes; found an empty list"),
        ("--forecast", {"low": 1}, "expected an object with rungs, low, high, loss, notes; found an object with low"),
        ("--forecast", {"low": "x"}, "expected low to be a finite number or null; found 'x'"),
        ("--forecast", {"low": float("nan")}, "expected low to be a finite number or null; found nan"),
        ("--forecast", {"low": 4.0}, "expected low <= loss <= high, or null for all three; found [4.0, 2.5, 3.0]"),
        ("--forecast", {"rungs": [1]}, "expected rungs to be a list of objects, each with fitted"),
        ("--forecast", {"notes": "x"}, "expected notes to be a list of texts"),
    ],
)
def test_files_are_read_before_anything_is_computed(
    run: Path, tmp_path: Path, capsys: Capture, option: str, content: Any, message: str
) -> None:
    right = {"rungs": [{"fitted": True}], "low": 2.0, "loss": 2.5, "high": 3.0, "notes": []}
    if option == "--forecast" and content and content != {"low": 1}:
        content = right | content
    file = tmp_path / "given.json"
    file.write_text(json.dumps(content))
    assert gate(run, "full", option, file) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Training" not in told
    assert not (run / "gates").exists()


def test_a_run_that_is_not_finished_is_told(run: Path, capsys: Capture) -> None:
    summary = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps(summary | {"finished": False}))
    edit(run / "config_snapshot.yaml", "  steps: 4\n", "  steps: 100\n")
    assert gate(run, "quick") == 15
    assert "the run is not finished: step 4 of 100" in capsys.readouterr().out
    assert verify(run / "export") == 15
    assert "the run is not finished: step 4 of 100" in capsys.readouterr().out
    assert gate(run, "quick", "--json") == 15
    assert json.loads(capsys.readouterr().out)["unfinished"] == "step 4 of 100"


def damage_summary(run: Path) -> None:
    (run / "metrics.json").unlink()


def damage_encoding(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(lines[0] + lines[1].replace(b"loss", b"lo\xffs") + b"".join(lines[2:]))


def damage_line(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "{", lines[2][:-5], lines[3]]) + "\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_summary, "metrics.json is missing or damaged"),
        (damage_encoding, "metrics.jsonl:2: is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (damage_line, "metrics.jsonl:2: is not JSON: Expecting property name"),
    ],
)
def test_a_damaged_run(run: Path, damage: Callable[[Path], None], message: str, capsys: Capture) -> None:
    damage(run)
    assert gate(run, "standard") == 2
    assert message in capsys.readouterr().err


def test_the_output_fits_100_columns(run: Path, capsys: Capture) -> None:
    """Names of files are not broken. The error names three gates, and the table all."""
    assert gate(run, "production", "--no-measure", "--tokens-per-second", "1") in (14, 15)
    told = capsys.readouterr()
    lines = [line for line in told.out.splitlines() if str(run) not in line]
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    (error,) = [line for line in told.err.splitlines() if "stop the run" in line]
    assert "more" in error
    assert len(error) <= 120
    assert " ".join(told.out.split()).count("production: ") == 1


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_evidence_without_a_signature(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """A signature that fails leaves no evidence. Old evidence without one is named, with the way to remove it."""
    export = run / "export"
    before = sorted(path.name for path in export.iterdir())
    wrong = tmp_path / "README.md"
    wrong.write_text("no key\n")
    assert gate(run, "quick", "--sign", wrong) == 2
    assert sorted(path.name for path in export.iterdir()) == before
    assert not (run / "gates" / "quick.json").exists()
    assert not (run / "gates" / "history.jsonl").exists()

    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    (tmp_path / "allowed").write_text(f"me@example.com {(tmp_path / 'key.pub').read_text()}")
    assert gate(run, "standard") == 15
    assert gate(run, "quick", "--sign", tmp_path / "key") == 15
    capsys.readouterr()
    assert verify(export, "--allowed-signers", tmp_path / "allowed") == 5
    error = capsys.readouterr().err
    assert "gates-standard.json has no signature" in error
    assert "judge the run with --preset standard --sign KEY" in error
    assert f"cdrmix evidence remove {export} --preset standard" in error
    remove = ["evidence", "remove", str(export), "--preset", "standard"]
    assert main(remove) == 0
    assert verify(export, "--allowed-signers", tmp_path / "allowed") == 15
    capsys.readouterr()
    assert main(remove) == 5
    assert "has no evidence of standard; it has that of quick" in capsys.readouterr().err
    assert main(["evidence", "remove", str(tmp_path), "--preset", "quick"]) == 5
