"""What a ladder judges again, what another judgement or a kill may change, and lines that were added by hand."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import main

from cdrmix.errors import ConfigError, LedgerError, UndecidedGateError
from cdrmix.eval import data_sets
from cdrmix.eval.suites import SUITES, Measure, Subject, SuiteOptions, SuiteResult
from cdrmix.ladder import evidence, infrastructure
from cdrmix.ladder.ledger import Ledger


class KilledError(BaseException):
    """Stands for kill -9: nothing catches it."""


@pytest.fixture
def copy(climbed: Path, tmp_path: Path) -> Path:
    """A copy of the climbed ladder's folder: the ledger has relative paths."""
    return Path(shutil.copytree(climbed.parent / "ladder", tmp_path / "ladder"))


@pytest.fixture
def trained(copy: Path) -> Path:
    """The same ladder before the second rung was judged."""
    lines = (copy / "ledger.jsonl").read_text().splitlines(keepends=True)[:8]
    (copy / "ledger.jsonl").write_text("".join(lines))
    (copy / "ledger.head").write_text(f"8 {sha256(lines[-1])}\n")
    shutil.rmtree(copy / "judgements" / "toy-b")
    assert [entry.kind for entry in Ledger(copy).entries][-1] == "trained"
    return copy


def sha256(line: str) -> str:
    return hashlib.sha256(line.rstrip("\n").encode()).hexdigest()


def run(file: Path, root: Path, *more: str) -> int:
    return main(["ladder", "run", "--config", str(file), f"ladder.root={root}", *more])


def run_of(root: Path, rung: str) -> Path:
    (path,) = (root / "runs" / rung / "seed-1").iterdir()
    return path


def of_b(root: Path) -> list[str]:
    return [entry.kind for entry in Ledger(root).entries if entry.rung == "toy-b"]


STANDARD = "ladder.gates=standard"  # eight steps are too few for its gates


def test_any_judgement_of_a_run_leaves_the_ladder_whole(climbed: Path, copy: Path) -> None:
    before = (copy / "ledger.jsonl").read_bytes()
    path = run_of(copy, "toy-a")
    assert main(["gate", "--model", str(path), "--preset", "quick"]) == 0
    assert main(["gate", "--model", str(path), "--preset", "standard"]) == UndecidedGateError.exit_code
    assert (path / "export" / "gates-standard.json").is_file()
    assert main(["ladder", "status", str(copy)]) == 0
    assert run(climbed, copy) == 0
    assert (copy / "ledger.jsonl").read_bytes() == before


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    append, write = Ledger.append, evidence.write_atomically

    def appended(self: Ledger, kind: Any, *more: Any) -> object:
        if kind == "judged":
            raise KilledError
        return append(self, kind, *more)

    def written(path: Path, content: str | bytes) -> None:
        if path.name == "SHA256SUMS":
            path.with_name(path.name + ".tmp").touch()
            raise KilledError
        write(path, content)

    if moment == "before the line of the ledger":
        monkeypatch.setattr(Ledger, "append", appended)
    else:
        monkeypatch.setattr(evidence, "write_atomically", written)


@pytest.mark.parametrize("moment", ["before the line of the ledger", "before the checksums of the export"])
def test_a_kill_during_a_lenient_judgement(
    moment: str, climbed: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(climbed, trained, STANDARD) == UndecidedGateError.exit_code
    out = capsys.readouterr().out
    assert "toy-b is not promoted: HOLD by the gates of standard. falling: " in out
    assert "A change of train.log_every trains toy-b again" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines() if str(trained) not in line) <= 100
    assert main(["ladder", "status", str(trained)]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()[3:]) <= 100
    with monkeypatch.context() as patched:
        kill_at(patched, moment)
        with pytest.raises(KilledError):
            run(climbed, trained, STANDARD, "--lenient", "a toy")
    assert main(["ladder", "status", str(trained)]) == 0
    assert run(climbed, trained, STANDARD, "--lenient", "a toy") == 0
    assert of_b(trained) == ["forecast", "trained", "judged", "judged", "promoted"]
    export = run_of(trained, "toy-b") / "export"
    assert not (export / "SHA256SUMS.tmp").exists()
    assert main(["evidence", "verify", str(export)]) == 0


def test_other_settings_judge_a_stopped_rung_again(climbed: Path, trained: Path) -> None:
    assert run(climbed, trained, STANDARD) == UndecidedGateError.exit_code
    lines = (trained / "ledger.jsonl").read_bytes()
    assert run(climbed, trained, STANDARD) == UndecidedGateError.exit_code
    assert (trained / "ledger.jsonl").read_bytes() == lines
    wider = "ladder.forecast.slack=0.02"
    assert run(climbed, trained, STANDARD, wider) == UndecidedGateError.exit_code
    assert of_b(trained) == ["forecast", "trained", "judged", "forecast", "judged"]
    assert run(climbed, trained, wider) == 0  # the preset of the file is quick
    assert of_b(trained)[5:] == ["judged", "promoted"]
    judged = Ledger(trained).of("judged", "toy-b")
    assert [entry.facts["preset"] for entry in judged] == ["standard", "standard", "quick"]
    assert main(["ladder", "status", str(trained)]) == 0


@pytest.mark.filterwarnings("always::cdrmix.errors.CdrmixWarning")
def test_suites_run_again_only_where_something_was_not_measured(
    climbed: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    installed = False

    def missing(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
        calls.append("missing")
        if not installed:
            raise ConfigError("the data set is missing")
        return SuiteResult("toy-missing", (Measure("x", 0.5, 0.4, 0.6, 10),))

    def there(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
        calls.append("there")
        return SuiteResult("toy-there", (Measure("x", 0.5, 0.4, 0.6, 10),))

    for name, suite in (("toy-missing", missing), ("toy-there", there)):
        monkeypatch.setitem(SUITES._entries, name, suite)
    monkeypatch.setitem(data_sets.PACKAGES, "toy-missing", (("no-such-package", "1.0"),))
    assert run(climbed, trained, STANDARD, "ladder.suites=[toy-missing, toy-there]") == 15
    assert "`pip install --no-deps no-such-package==1.0` installs it" in capsys.readouterr().err
    assert calls == ["missing", "there"]
    installed = True
    monkeypatch.delitem(data_sets.PACKAGES, "toy-missing")
    assert run(climbed, trained, STANDARD, "ladder.suites=[toy-there, toy-missing]", "--lenient", "a toy") == 0
    assert calls == ["missing", "there", "missing"]
    found = json.loads((trained / "judgements" / "toy-b" / "2" / "suites.json").read_text())
    assert [result["suite"] for result in found] == ["toy-there", "toy-missing"]
    assert all(result["measures"][0]["value"] == 0.5 for result in found)


def add(root: Path, kind: str, rung: str, facts: dict[str, Any], record: dict[str, Any]) -> None:
    """Adds a line with the right hash, and leaves ledger.head as a kill does."""
    lines = (root / "ledger.jsonl").read_text().splitlines()
    values = {"number": len(lines) + 1, "before": sha256(lines[-1]), "kind": kind, "rung": rung}
    with (root / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(values | {"facts": facts, "record": {"time": "now"} | record}) + "\n")


PROMOTED: dict[str, Any] = {"outcome": "PASS", "lenient": None, "attempt": 1}
JUDGED: dict[str, Any] = {
    "preset": "quick", "outcome": "PASS", "exit_code": 0, "lenient": None, "stopping": [],
    "verdicts": {"finite": "PASS"}, "required": ["finite"],
}  # fmt: skip
RECORD: dict[str, Any] = {"reasons": {}, "files": {}}
ADDED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a promotion without a judgement": ("promoted", PROMOTED, {}, "no judgement before it lets toy-b pass"),
    "without an identity": ("promoted", {"identity": None}, {}, "facts.identity of a line of the kind promoted"),
    "of another configuration": ("promoted", PROMOTED | {"identity": "0"}, {}, "is in no plan before it"),
    "a verdict that was changed": (
        "judged",
        JUDGED | {"verdicts": {"finite": "FAIL"}},
        RECORD,
        "its outcome does not follow from its verdicts",
    ),
    "an exit code that was changed": ("judged", JUDGED | {"exit_code": 14}, RECORD, "its exit code does not follow"),
    "a judgement without reasons": ("judged", JUDGED, {"files": {}}, "record.reasons of a line of the kind judged"),
}


@pytest.mark.parametrize("case", ADDED)
def test_a_line_that_was_added_by_hand(
    case: str, climbed: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, facts, record, message = ADDED[case]
    identity = Ledger(trained).entries[-1].facts["identity"]
    add(trained, kind, "toy-b", {"identity": identity} | facts, record)
    for arguments in (["status", str(trained)], ["run", "--config", str(climbed), f"ladder.root={trained}"]):
        assert main(["ladder", *arguments]) == LedgerError.exit_code
        assert message in capsys.readouterr().err


def test_a_promotion_added_to_a_stopped_rung(climbed: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(climbed, trained, STANDARD) == UndecidedGateError.exit_code
    facts = PROMOTED | {"identity": Ledger(trained).entries[-1].facts["identity"]}
    add(trained, "promoted", "toy-b", facts, {})
    assert main(["ladder", "status", str(trained)]) == LedgerError.exit_code
    assert "no judgement before it lets toy-b pass" in capsys.readouterr().err


def test_the_file_of_a_rung_is_no_ladder_file(climbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", "run", "--config", str(climbed.parent / "toy-a.yaml")]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert "is the configuration of one model, a rung, and no ladder file" in error
    assert "unknown key" not in error


def test_ctrl_c_in_the_checks_of_the_machine(
    climbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(subject: object) -> str:
        signal.raise_signal(signal.SIGINT)
        return ""

    monkeypatch.setattr(infrastructure, "CHECKS", {"device": interrupted})
    assert run(climbed, tmp_path / "own") == 130
    assert "the same command continues the ladder" in capsys.readouterr().err


def test_a_rung_without_a_forecast(climbed: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no verdict on a band, in no preset."""
    assert main(["ladder", "status", str(copy)]) == 0
    table = capsys.readouterr().out
    assert "in band" in table
    assert "NOT_MEASURED" not in table
    assert all("band" not in entry.facts["verdicts"] for entry in Ledger(copy).entries if entry.kind == "judged")
