"""`cdrmix ladder run`: order of the ledger, gates that stop, changes that are refused, bad input."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from in_process import main

import cdrmix
from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.errors import ConfigError, LedgerError, Preempted
from cdrmix.ladder import infrastructure
from cdrmix.ladder.ledger import FIRST, Ledger, locked
from cdrmix.ladder.verdict import Outcome
from cdrmix.model.feed_forward.moe import DenseFeedForward
from cdrmix.run_folder import RunFolder
from cdrmix.training.callbacks import Callback
from cdrmix.training.console import Console

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(climbed: Path, tmp_path: Path) -> Path:
    """A copy of the climbed ladder's folder: the ledger has relative paths."""
    return Path(shutil.copytree(climbed.parent / "ladder", tmp_path / "ladder"))


def run(file: Path, root: Path, *more: str) -> int:
    return main(["ladder", "run", "--config", str(file), f"ladder.root={root}", *more])


def run_of(root: Path, rung: str) -> Path:
    (path,) = (root / "runs" / rung / "seed-1").iterdir()
    return path


def kinds(root: Path) -> list[tuple[str, str]]:
    return [(entry.kind, entry.rung) for entry in Ledger(root).entries]


def test_a_climbed_ladder(climbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = climbed.parent / "ladder"
    of_a_rung = ("forecast", "trained", "judged", "promoted")
    assert kinds(root) == [
        ("ladder", ""),
        ("infrastructure", ""),
        *((kind, rung) for rung in ("toy-a", "toy-b") for kind in of_a_rung),
    ]
    entries = Ledger(root).entries
    assert {*entries[1].facts["checks"]} == {*infrastructure.CHECKS}
    assert {*entries[1].facts["checks"].values()} <= {"PASS", "NOT_MEASURED"}
    summary = RunFolder.open(run_of(root, "toy-a")).summary()
    trained = entries[3]
    assert trained.facts["loss"] == summary["held_out"]["loss_nats_per_token"]
    assert trained.facts["config_hash"] == summary["config_hash"]

    before = (root / "ledger.jsonl").read_bytes()
    assert run(climbed, root) == 0  # nothing is left to do
    assert (root / "ledger.jsonl").read_bytes() == before
    assert "toy-b is promoted already" in capsys.readouterr().out

    assert main(["ladder", "status", str(root), "--json"]) == 0
    states = json.loads(capsys.readouterr().out)
    assert [(state["name"], state["state"]) for state in states] == [("toy-a", "promoted"), ("toy-b", "promoted")]
    page = (root / "report.html").read_text()
    assert all(text in page for text in ("2 of 2", "toy-b", f"{trained.facts['loss']:.4f}", "bitwise repeat"))


@pytest.mark.slow
def test_the_third_rung_is_forecast_before_it_is_trained(
    climbed: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "ladder.rungs=[toy-a, toy-b, toy-c]"
    assert main(["ladder", "forecast", str(copy), "--rung", "b"]) == 1  # too few rungs below it
    assert run(climbed, copy, more) == 15  # on this text the loss falls faster than in the band: HOLD
    out = capsys.readouterr().out
    made, trained, judged = Ledger(copy).entries[-3:]
    assert [made.kind, trained.kind, judged.kind] == ["forecast", "trained", "judged"]
    losses = [entry.facts["loss"] for entry in Ledger(copy).entries if entry.kind == "trained"]
    assert [rung["losses"] for rung in made.facts["rungs"]] == [[losses[0]], [losses[1]]]
    assert losses[2] < made.facts["low"] < made.facts["loss"] < made.facts["high"]
    assert judged.facts["verdicts"] == {"finite": "PASS", "loss": "PASS", "band": "HOLD"}
    assert "toy-c is not promoted: HOLD by the gates of quick. band: the held-out loss is" in " ".join(out.split())
    assert (copy / "forecast.png").read_bytes()[1:4] == b"PNG"
    assert (copy / "forecasts" / "toy-c.png").is_file()

    lines = (copy / "ledger.jsonl").read_bytes()
    assert run(climbed, copy, more) == 15  # the same answer without training again
    assert (copy / "ledger.jsonl").read_bytes() == lines
    assert run(climbed, copy, more, "--lenient", "a toy") == 0
    assert Ledger(copy).entries[-1].facts["lenient"] == "a toy"
    assert main(["ladder", "forecast", str(copy)]) == 1
    assert "HOLD" in capsys.readouterr().out


def cut(root: Path, *numbers: int) -> None:
    lines = (root / "ledger.jsonl").read_text().splitlines(keepends=True)
    (root / "ledger.jsonl").write_text("".join(line for n, line in enumerate(lines, 1) if n not in numbers))


def edit(root: Path, number: int, before: str, after: str) -> None:
    lines = (root / "ledger.jsonl").read_text().splitlines(keepends=True)
    assert before in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(before, after, 1)
    (root / "ledger.jsonl").write_text("".join(lines))


def append(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b" ")


def cut_sums(path: Path) -> None:
    path.chmod(0o644)
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "README.md" not in line))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an edited line": (lambda root: edit(root, 5, "PASS", "FAIL"), "ledger.jsonl: line 5 was changed"),
    "an edited last line": (lambda root: edit(root, 10, '"PASS"', '"FAIL"'), "ledger.jsonl:10 was changed"),
    "an edited time": (lambda root: edit(root, 3, '"time": "2', '"time": "3'), "ledger.jsonl: line 3 was changed"),
    "a missing line": (lambda root: cut(root, 5), "line 5 is missing"),
    "missing lines": (lambda root: cut(root, 2, 3), "line 2 is missing"),
    "a missing last line": (lambda root: cut(root, 10), "was cut: it has 9 lines, and ledger.head says 10"),
    "a missing ledger": (lambda root: (root / "ledger.jsonl").unlink(), "was cut: it has 0 lines"),
    "a missing head": (lambda root: (root / "ledger.head").unlink(), "ledger.head is missing, and ledger.jsonl has 10"),
    "a head of other bytes": (
        lambda root: (root / "ledger.head").write_bytes(b"\xff\xfe"),
        "ledger.head was changed: it is not a file of UTF-8 text",
    ),
    "a head that is a folder": (
        lambda root: [(root / "ledger.head").unlink(), (root / "ledger.head").mkdir()],
        "ledger.head was changed: it is not a file of UTF-8 text",
    ),
    "a number without end": (
        lambda root: edit(root, 10, "{", "1" * 5000),
        "ledger.jsonl:10 was changed: it is not valid",
    ),
    "an added line": (lambda root: append(root / "ledger.jsonl"), "ledger.jsonl:11 was changed"),
    "edited weights": (
        lambda root: append(run_of(root, "toy-a") / "export" / "model.safetensors"),
        "export/model.safetensors was changed",
    ),
    "edited checksums": (
        lambda root: append(run_of(root, "toy-b") / "export" / "SHA256SUMS"),
        "export/SHA256SUMS:12: malformed; a line is a SHA-256",
    ),
    "a line less of checksums": (
        lambda root: cut_sums(run_of(root, "toy-b") / "export" / "SHA256SUMS"),
        "export/SHA256SUMS was changed: it does not list README.md as line 8",
    ),
    "an added file": (
        lambda root: (run_of(root, "toy-a") / "export" / "evil.py").write_text("print(1)"),
        "export/evil.py was added",
    ),
    "edited evidence": (
        lambda root: append(root / "judgements" / "toy-b" / "1" / "quick.json"),
        "toy-b/1/quick.json was changed",
    ),
    "edited facts of a judgement": (
        lambda root: append(root / "judgements" / "toy-b" / "1" / "quick.facts.json"),
        "toy-b/1/quick.facts.json was changed",
    ),
    "an edited loss": (
        lambda root: RunFolder.open(run_of(root, "toy-a")).update_summary({"held_out_step": 5}),
        "metrics.json was changed: step is 5",
    ),
    "edited metrics": (lambda root: append(run_of(root, "toy-a") / "metrics.jsonl"), "metrics.jsonl was changed"),
    "a removed run": (lambda root: shutil.rmtree(run_of(root, "toy-a")), "config_snapshot.yaml is missing"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named_and_refused(
    change: str, climbed: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    act, message = CHANGES[change]
    act(copy)
    for arguments in (["status", str(copy)], ["run", "--config", str(climbed), f"ladder.root={copy}"]):
        capsys.readouterr()
        assert main(["ladder", *arguments]) == LedgerError.exit_code
        assert message in capsys.readouterr().err


def test_a_kill_between_ledger_and_head(copy: Path) -> None:
    lines = (copy / "ledger.jsonl").read_text().splitlines()
    head = f"9 {json.loads(lines[9])['before']}\n"
    (copy / "ledger.head").write_text(head)
    ledger = Ledger(copy)  # one line ahead of its head is what a kill leaves
    ledger.append("ladder", "", ledger.entries[0].facts, {})
    assert len(Ledger(copy).entries) == 11
    (copy / "ledger.head").write_text(head)
    with pytest.raises(LedgerError, match="it says 9 lines"):  # two are not
        Ledger(copy)


def test_another_process_has_the_ladder(climbed: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (copy / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(climbed, copy) == ConfigError.exit_code
    assert "another process is working on this ladder" in capsys.readouterr().err
    with locked(copy):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--up-to", "toy-x"), "--up-to: there is no rung toy-x; there are toy-a, toy-b; did you mean toy-a?"),
        (("ladder.rungs=[toy-b, toy-a]",), "allowed: rungs in the order of their operations"),
        (("ladder.rungs=[toy-a, toy-a]",), "toy-a occurs twice"),
        (("ladder.rungs=[toy-z]",), "there is no toy-z.yaml in"),
        (("ladder.seeds={toy-z: 2}",), "ladder.seeds: there is no rung toy-z"),
        (("ladder.set=[train.steps=7]",), "toy-a is promoted in"),
        (("ladder.set=[train.stepz=7]",), "did you mean train.steps?"),
        (("ladder.strict=false",), "ladder.reason must say why"),
        (("ladder.gates=fulll",), "did you mean full?"),
        (("ladder.forecast.exponents=[0.3, 0.2]",), "the smaller one first"),
        (("--lenient", " "), "--lenient: give the reason"),
        (("--nproc", "0"), "--nproc"),
        (("--sign", "no-key"), "ssh"),  # there is no such file, or no ssh-keygen
        (("--sign", str(ROOT / "README.md")), "ssh-keygen"),  # it is no key, or there is no ssh-keygen
        (("--dry-run", "--sign", str(ROOT / "README.md")), "ssh-keygen"),
        (("ladder.suites=[cod]",), "ladder.suites: there is no suite 'cod'; did you mean 'code'?"),
        (("--dry-run", "ladder.suites=[cod]"), "ladder.suites: there is no suite 'cod'"),
        (("ladder.custom_gates=[nope]",), "there is no gate 'nope'"),
        (("--dry-run", "ladder.custom_gates=[nope]"), "there is no gate 'nope'"),
        (("train.steps=7",), "allowed: at the top: ladder"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], message: str, climbed: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (copy / "ledger.jsonl").read_bytes()
    assert run(climbed, copy, *arguments) == ConfigError.exit_code
    assert message in capsys.readouterr().err
    assert (copy / "ledger.jsonl").read_bytes() == before


def test_dry_run_writes_nothing(climbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(climbed, tmp_path / "none", "--dry-run", "--up-to", "a") == 0
    out = capsys.readouterr().out
    assert "planned" in out
    assert "toy-b" not in out
    assert not (tmp_path / "none").exists()
    assert main(["ladder", "run", "--family", "micro", "--dry-run", f"ladder.root={tmp_path / 'none'}"]) == 0
    assert "micro-10m" in capsys.readouterr().out
    assert main(["ladder", "status", str(tmp_path)]) == ConfigError.exit_code
    assert main(["ladder", "forecast", str(tmp_path)]) == ConfigError.exit_code


@pytest.mark.slow
def test_ctrl_c_and_a_changed_recipe(
    climbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted rung continues from its checkpoint; a rung that is not promoted may be begun again."""

    def interrupt(self: Callback, step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    root = Path(shutil.copytree(climbed.parent / "ladder", tmp_path / "ladder"))
    more = "ladder.rungs=[toy-a, toy-b, toy-c]"
    with monkeypatch.context() as patched:
        patched.setattr(Console, "on_step", interrupt)
        assert run(climbed, root, more) == Preempted.exit_code
    assert "the same command continues the ladder" in capsys.readouterr().err
    assert kinds(root)[-1] == ("forecast", "toy-c")
    assert main(["ladder", "status", str(root)]) == 0
    assert "toy-c, seed 1: step 4 of 10" in capsys.readouterr().out
    assert run(climbed, root, more) == 15
    assert "continuing from step-00000004" in capsys.readouterr().out
    changed = "ladder.set=[run.name=other]"  # does not change the results
    assert run(climbed, root, more, changed) == 15
    assert len(Ledger(root).of("judged", "toy-c")) == 1
    other = tmp_path / "toy-c.yaml"
    other.write_text((climbed.parent / "toy-c.yaml").read_text() + "  learning_rate: 1.0e-3\n")
    assert run(climbed, root, f"ladder.rungs=[toy-a, toy-b, {other}]") == 14  # too slow now: above the band
    capsys.readouterr()
    assert main(["ladder", "status", str(root), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)[-1]
    assert (state["name"], state["earlier_attempts"], state["judged"]["outcome"]) == ("toy-c", 1, "FAIL")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_suites_and_the_full_gates(climbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of the suites reach the gates, what is measured again too, and the evidence is signed."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    signers = tmp_path / "signers"
    signers.write_text(f"ladder@example.org {(tmp_path / 'key.pub').read_text()}")
    root = tmp_path / "own"
    more = ("ladder.gates=full", "ladder.suites=[domains, routing]", "--sign", str(tmp_path / "key"))
    assert run(climbed, root, "--up-to", "toy-a", *more) == 14  # six steps do not reach the loss that full demands
    judged = Ledger(root).of("judged", "toy-a")[0]
    verdicts = judged.facts["verdicts"]
    assert {verdicts[name] for name in ("finite", "determinism", "resume", "export")} == {"PASS"}
    assert verdicts["tasks"] == "NOT_MEASURED"  # no suite of choices
    path = run_of(root, "toy-a")
    kept = root / "judgements" / "toy-a"
    assert "judgements/toy-a/1/suites.json" in judged.record["files"]
    assert "judgements/toy-a/1/full.json.sig" in judged.record["files"]
    results = json.loads((kept / "1" / "suites.json").read_text())
    assert {result["suite"] for result in results} == {"domains", "routing"}
    capsys.readouterr()
    assert main(["evidence", "verify", str(path / "export"), "--allowed-signers", str(signers)]) == 14
    assert "ladder@example.org" in capsys.readouterr().out
    assert run(climbed, root, "--up-to", "toy-a", *more, "--lenient", "a toy") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "export: domains" not in out  # a suite is run once
    assert "export: routing" in out  # unless it has nothing to measure; this model has no routers
    assert json.loads((kept / "2" / "suites.json").read_text()) == results
    (kept / "2" / "suites.json").write_text("[]")
    assert main(["ladder", "status", str(root)]) == LedgerError.exit_code


@pytest.mark.slow
def test_the_python_interface(climbed: Path, tmp_path: Path) -> None:
    told: list[str] = []

    def model(config: Config) -> Model:
        section = config.cdrmix_model
        return section.model_copy(update={"norm": "rmsnorm"})

    runner = cdrmix.ladder.PipelineRunner(
        climbed,
        [f"ladder.root={tmp_path / 'own'}", "ladder.set=[train.steps=5]"],
        model_factory=model,
        data_factory=lambda config: config.data.model_copy(update={"row_length": 16}),
        say=told.append,
    )
    assert all(rung.config.model.norm == "rmsnorm" for rung in runner.rungs)  # type: ignore[union-attr]
    assert runner.rungs[0].config.data.row_length == 16
    result = runner.run_progressive("b", "b", validation_between_scales=False)
    assert result.passed
    assert [entry.kind for entry in runner.history] == [
        "ladder", "infrastructure", "forecast", "trained", "judged", "promoted"
    ]  # fmt: skip
    snapshot = Config.from_yaml(run_of(tmp_path / "own", "toy-b") / "config_snapshot.yaml")
    assert snapshot.cdrmix_model.norm == "rmsnorm"
    assert [state.status for state in runner.states()] == ["planned", "promoted"]
    with pytest.raises(ConfigError, match="comes before start"):
        runner.run_progressive("b", "a")
    with pytest.raises(ConfigError, match="model_factory must return the section `model`"):
        cdrmix.ladder.PipelineRunner(climbed, model_factory=lambda config: torch.nn.Linear(1, 1))  # type: ignore[arg-type, return-value]


def test_a_wrong_gradient_stops_the_ladder(
    climbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A product that float32 computes without one of 128 tokens."""
    right = DenseFeedForward.forward

    def wrong(self: DenseFeedForward, *arguments: torch.Tensor) -> object:
        x = arguments[0]
        if x.dtype == torch.float32:
            keep = torch.ones_like(x[..., :1])
            keep.view(-1)[5] = 0
            arguments = (x * keep, *arguments[1:])
        return right(self, *arguments)

    monkeypatch.setattr(DenseFeedForward, "forward", wrong)
    assert run(climbed, tmp_path / "own") == ConfigError.exit_code
    captured = capsys.readouterr()
    assert "this machine cannot train toy-a: gradient equality: relative difference" in captured.err
    assert f"{Outcome.NOT_MEASURED}" in captured.out  # the checks after it
    assert kinds(tmp_path / "own") == [("ladder", "")]
    assert json.loads((tmp_path / "own" / "ledger.jsonl").read_text())["before"] == FIRST
