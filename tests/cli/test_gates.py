"""`cdrmix gate` and `cdrmix evidence verify`: evidence of a run, results, custom gates, signatures, bad input."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import main
from safetensors.torch import load_file, save_file

from cdrmix.durable import sha256_file
from cdrmix.ladder.evidence import PREDICATE, STATEMENT
from cdrmix.ladder.facts import Facts
from cdrmix.ladder.judgement import decide, judge
from cdrmix.ladder.presets import preset
from cdrmix.ladder.verdict import Outcome

pytestmark = pytest.mark.usefixtures("own_settings")

ToyArguments = Callable[..., list[str]]


@pytest.fixture(scope="module")
def trained(arguments: ToyArguments, workspace: Path) -> Path:
    """A run of 80 toy steps, each recorded: copy it before a change."""
    steps = ("train.steps=80", "train.warmup_steps=5", "train.evaluate_every=80", "train.checkpoint_every=80")
    # Each token goes to both experts: with more experts the overflow of so few tokens is noise, which differs between
    # processors and leaves the gate undecided on some.
    batch = ("train.batch_rows=8", "train.micro_batch_rows=8", "model.feed_forward.experts=2", "run.seed=2")
    assert main(["train", *arguments(*steps, *batch)]) == 0
    (run,) = (workspace / "runs").iterdir()
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def gate(*words: str | Path) -> int:
    return main(["gate", *map(str, words)])


def verify(*words: str | Path) -> int:
    return main(["evidence", "verify", *map(str, words)])


def overwrite(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def doctor_rows(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps({**row, **change(row)}) + "\n" for row in rows))


def test_a_good_run_and_its_evidence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate("--model", run, "--preset", "standard", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["stopping"] == [], told["verdicts"]
    assert told["passed"] is True
    assert {verdict["outcome"] for verdict in told["verdicts"].values()} == {"PASS"}

    evidence = json.loads((run / "gates" / "standard.json").read_text())
    assert evidence["_type"] == "https://in-toto.io/Statement/v1"
    files = {path.name for path in (run / "export").iterdir()} - {"SHA256SUMS", "gates-standard.json"}
    assert {subject["name"] for subject in evidence["subject"]} == files
    model = next(each for each in evidence["subject"] if each["name"] == "model.safetensors")
    assert model["digest"]["sha256"] == hashlib.sha256((run / "export" / "model.safetensors").read_bytes()).hexdigest()
    predicate = evidence["predicate"]
    assert predicate["result"] == "PASSED"
    assert predicate["passedTests"] == list(told["verdicts"])
    assert (run / "export" / "gates-standard.json").read_bytes() == (run / "gates" / "standard.json").read_bytes()

    # The verdicts follow from the recorded facts alone.
    facts_file = run / "gates" / "standard.facts.json"
    assert predicate["configuration"][0]["digest"]["sha256"] == sha256_file(facts_file)
    again = decide("standard", preset("standard"), Facts.from_json(json.loads(facts_file.read_text())))
    recorded = {name: verdict["inputs_sha256"] for name, verdict in predicate["cdrmix"]["verdicts"].items()}
    assert {name: verdict.inputs_sha256 for name, verdict in again.verdicts.items()} == recorded

    # Figures have the units of the reasons, and strict thresholds their sign.
    assert gate("--model", run, "--preset", "standard") == 0
    table = capsys.readouterr().out
    assert all(len(line) <= 100 for line in table.splitlines() if str(run) not in line)
    shown = {line.split()[0]: " ".join(line.split()) for line in table.splitlines() if line}
    assert re.search(r"^falling PASS -[0-9.]+ % .*<= 2 %", shown["falling"]), shown["falling"]
    assert re.search(r"^memory PASS [0-9.]+ % < 90 %", shown["memory"]), shown["memory"]
    assert "< 5.704 nats" in shown["below-uniform"]  # ln 300
    assert "<= 2 " in shown["norm-growth"]
    assert "< 5 %" in shown["router-overflow"]
    assert "not finished" not in table

    assert gate("--model", run / "export", "--preset", "quick") == 0
    table = capsys.readouterr().out
    assert "quick: PASS\n" in table
    assert verify(run / "export") == 0
    assert capsys.readouterr().out.count("the files are those that were judged") == 2
    lines = [json.loads(line) for line in (run / "gates" / "history.jsonl").read_text().splitlines()]
    assert [(line["preset"], line["outcome"]) for line in lines] == [("standard", "PASS")] * 2 + [("quick", "PASS")]
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=run / "export", check=False).returncode == 0


@pytest.mark.slow  # 80 steps, and an engine for each of three trainings
def test_full_trains_steps_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without results and at the noise of this machine FULL is not passed; the bits are those of the run."""
    assert gate("--model", run, "--preset", "full", "--json") == 15
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert {name: verdicts[name]["outcome"] for name in ("determinism", "resume", "export", "tasks")} == {
        "determinism": "PASS",
        "resume": "PASS",
        "export": "PASS",
        "tasks": "NOT_MEASURED",
    }
    measured = json.loads((run / "gates" / "measured.json").read_text())
    assert measured["determinism"]["compared_with_the_run"] is True
    assert verify(run / "export") == 15
    capsys.readouterr()

    # What was measured is used again: a recorded step with other bits was found then, and stays found.
    (run / "gates" / "measured.json").unlink()
    doctor_rows(run, lambda row: {"loss": row["loss"] + 1e-6} if row["step"] == 2 else {})
    assert judge(run, "full").verdicts["determinism"].outcome is Outcome.FAIL
    reason = judge(run, "full", measure=False).verdicts["determinism"].reason
    assert "the run and its first steps again: loss first differs at step 2" in reason


def test_doctored_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor_rows(run, lambda row: {"loss": None} if row["step"] == 9 else {})
    assert gate("--model", run, "--preset", "quick") == 14
    shown = capsys.readouterr().out
    assert "finite: FAIL: step 9: loss is not a finite number" in shown
    assert "quick: FAIL, because of finite" in shown
    assert gate("--model", run, "--preset", "quick", "--lenient", "a test of the pipeline") == 0
    assert "passes leniently: a test of the pipeline" in capsys.readouterr().out
    predicate = json.loads((run / "gates" / "quick.json").read_text())["predicate"]
    assert (predicate["result"], predicate["cdrmix"]["lenient"]) == ("WARNED", "a test of the pipeline")
    assert verify(run / "export") == 0


def test_a_weight_that_is_not_finite(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step-00000080"
    weights = load_file(checkpoint / "model.safetensors")
    name = "embedding.weight"
    weights[name].view(-1)[0] = torch.nan
    save_file(weights, checkpoint / "model.safetensors")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    file = checkpoint / "model.safetensors"
    manifest["files"]["model.safetensors"] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    judgement = judge(run, "full", measure=False)
    assert judgement.verdicts["finite"].outcome is Outcome.FAIL
    assert (
        f"1 of 26,916 weights of step-00000080 are not finite, the first in {name}"
        in judgement.verdicts["finite"].reason
    )
    assert judgement.verdicts["export"].outcome is Outcome.FAIL
    assert "other logits than the checkpoint of step 80" in judgement.verdicts["export"].reason


def test_a_changed_missing_or_added_file_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate("--model", run, "--preset", "quick") == 0
    export = run / "export"
    capsys.readouterr()
    content = (export / "model.safetensors").read_bytes()
    overwrite(export / "model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    (export / "README.md").unlink()
    (export / "more.txt").write_text("more")
    assert verify(export) == 5
    error = capsys.readouterr().err
    assert "model.safetensors was changed" in error
    assert "README.md is missing" in error
    assert "more.txt was added" in error
    judgement = judge(run, "full", measure=False)
    assert judgement.verdicts["export"].outcome is Outcome.FAIL
    assert "model.safetensors was changed" in judgement.verdicts["export"].reason
    assert judgement.exported_evidence is None


def test_other_files_than_those_judged_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SHA256SUMS can be written again with the changed file; the evidence cannot."""
    assert gate("--model", run, "--preset", "quick") == 0
    export = run / "export"
    overwrite(export / "README.md", b"another model\n")
    lines = (export / "SHA256SUMS").read_text().splitlines()
    lines = [
        f"{sha256_file(export / 'README.md')}  README.md" if line.endswith("README.md") else line for line in lines
    ]
    overwrite(export / "SHA256SUMS", ("\n".join(lines) + "\n").encode())
    capsys.readouterr()
    assert verify(export) == 10
    assert "README.md was changed after the judgement" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_signatures(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("key", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
        public = (tmp_path / f"{name}.pub").read_text()
        (tmp_path / f"allowed_{name}").write_text(f'{name}@example.com namespaces="cdrmix-ladder" {public}')
    assert gate("--model", run, "--preset", "quick", "--sign", tmp_path / "key") == 0
    export = run / "export"
    capsys.readouterr()
    assert verify(export, "--allowed-signers", tmp_path / "allowed_key") == 0
    assert "signed by key@example.com" in capsys.readouterr().out
    assert verify(export, "--allowed-signers", tmp_path / "allowed_other") == 5
    assert "gates-quick.json is not signed by an allowed signer" in capsys.readouterr().err

    # Evidence that was written again, with sums that fit, has no valid signature.
    content = (export / "gates-quick.json").read_bytes().replace(b'"outcome": "PASS"', b'"outcome": "PASs"')
    content = content.replace(b'"outcome": "PASs"', b'"outcome":  "PASS"')
    overwrite(export / "gates-quick.json", content)
    sums = (export / "SHA256SUMS").read_text().splitlines()
    digest = hashlib.sha256(content).hexdigest()
    sums = [f"{digest}  gates-quick.json" if line.endswith("  gates-quick.json") else line for line in sums]
    overwrite(export / "SHA256SUMS", ("\n".join(sums) + "\n").encode())
    assert verify(export) == 0
    assert verify(export, "--allowed-signers", tmp_path / "allowed_key") == 5
    capsys.readouterr()

    assert gate("--model", run, "--preset", "quick") == 0  # without a signature: the old one is removed
    assert verify(export, "--allowed-signers", tmp_path / "allowed_key") == 5
    assert "has no signature" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_an_unfavourable_judgement_cannot_be_taken_away(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signed evidence names what was signed before it, and what is relied on can be required by preset and time."""
    key, signers = tmp_path / "key", tmp_path / "signers"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signers.write_text(f"me@example.com {(tmp_path / 'key.pub').read_text()}")
    export, kept = run / "export", tmp_path / "kept"

    def judged(name: str, code: int, *words: str) -> None:
        assert gate("--model", run, "--preset", name, "--sign", key, *words) == code

    def verified(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        return verify(export, "--allowed-signers", signers, *words), capsys.readouterr().err

    judged("quick", 0)
    assert verified("--require-preset", "quick")[0] == 0
    code, error = verified("--require-preset", "standard", "--require-preset", "quick")
    assert (code, "has no evidence of standard, which --require-preset requires; it has that of quick" in error) == (
        5,
        True,
    )
    assert verified("--not-before", "2020-01-01T00:00Z")[0] == 0
    code, error = verified("--not-before", "2100-01-01T00:00+01:00")
    assert (code, "--not-before requires 2099-12-31T23:00:00Z or later" in error) == (5, True)
    with pytest.raises(SystemExit, match="2"):
        verified("--not-before", "2100-01-01")
    assert "must be a time with a zone" in capsys.readouterr().err

    shutil.copytree(export, kept)  # with the favourable one alone
    judged("full", 15, "--no-measure")
    judged("quick", 0)
    assert verified()[0] == 15
    before = json.loads((export / "gates-quick.json").read_text())["predicate"]["cdrmix"]["before"]
    assert list(before["signed"]) == ["gates-full.json"]
    lines = (run / "gates" / "history.jsonl").read_bytes().splitlines(keepends=True)
    assert before["history"] == {"lines": 2, "sha256": hashlib.sha256(b"".join(lines[:2])).hexdigest()}
    assert main(["evidence", "remove", str(export), "--preset", "full"]) == 0  # writes SHA256SUMS again
    code, error = verified()
    assert (code, "gates-full.json is missing, and gates-quick.json of " in error) == (5, True)

    for name in (
        "gates-quick.json",
        "gates-quick.json.sig",
    ):  # another preset's evidence under the name that is required
        shutil.copy(kept / name, export / name.replace("quick", "full"))
    lines = [f"{sha256_file(path)}  {path.name}\n".encode() for path in export.glob("gates-full*")]
    overwrite(export / "SHA256SUMS", (export / "SHA256SUMS").read_bytes() + b"".join(lines))
    code, error = verified("--require-preset", "full")
    assert (code, "gates-full.json is not an in-toto statement on a test result of the preset" in error) == (
        5,
        True,
    )


@pytest.mark.parametrize("change", ["time", "run", "stopping", "before", "lenient", "outcome", "preset"])
@pytest.mark.parametrize("value", [None, 7, "text", [1], {"signed": 1, "finished": False}])
def test_evidence_is_data(run: Path, change: str, value: object) -> None:
    """Of whatever kind the values are: an exit code, and no traceback."""
    path = run / "export" / "gates-quick.json"
    subjects = [
        {"name": each.name, "digest": {"sha256": sha256_file(each)}}
        for each in (run / "export").iterdir()
        if each.name != "SHA256SUMS"
    ]
    predicate = {"preset": "quick", "time": "2026-01-01T00:00:00Z", "outcome": "PASS", "stopping": [], "lenient": None}
    content = {"_type": STATEMENT, "predicateType": PREDICATE, "subject": subjects}
    path.write_text(json.dumps(content | {"predicate": {"cdrmix": predicate | {change: value}}}))
    sums = run / "export" / "SHA256SUMS"
    overwrite(sums, sums.read_bytes() + f"{sha256_file(path)}  {path.name}\n".encode())
    assert verify(run / "export") in (0, 5, 14, 15)


CUSTOM = """
from cdrmix.ladder.facts import Facts
from cdrmix.ladder.verdict import Outcome, Verdict


def chemistry(facts: Facts) -> Verdict:
    return Verdict(Outcome.PASS, f"{len(facts.rows)} rows", len(facts.rows), n=len(facts.rows))


def broken(facts: Facts) -> Verdict:
    raise ZeroDivisionError("no solvent")


def nothing() -> None:
    pass
"""


def test_custom_gates(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only those that are named are imported: another module of the distribution fails when it is."""
    information = tmp_path / "toy_gates-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-gates\nVersion: 1.2\n")
    names = ("chemistry", "broken", "nothing")
    lines = [f"{name} = toy_gates:{name}" for name in names] + ["finite = toy_gates:chemistry", "absent = toy_absent:x"]
    (information / "entry_points.txt").write_text("[cdrmix.gates]\n" + "\n".join(lines) + "\n")
    (tmp_path / "toy_gates.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    common = ("--model", run, "--preset", "quick")
    assert gate(*common, "--gate", "chemistry") == 0
    origin = json.loads((run / "gates" / "quick.json").read_text())["predicate"]["cdrmix"]["custom_gates"]["chemistry"]
    assert origin == {
        "distribution": "toy-gates",
        "version": "1.2",
        "entry_point": "toy_gates:chemistry",
        "file": "toy_gates.py",
        "sha256": sha256_file(tmp_path / "toy_gates.py"),
    }
    capsys.readouterr()
    assert gate(*common, "--gate", "chemistry", "--gate", "broken") == 14
    assert "broken: FAIL: the gate raised ZeroDivisionError: no solvent" in capsys.readouterr().out
    for name, code, message in (
        (
            "chemistri",
            2,
            "there is no gate 'chemistri' of the group cdrmix.gates; installed are: absent, broken, chemistry",
        ),
        ("finite", 2, "'finite' has the name of a gate of the preset"),
        ("nothing", 12, "must be a function of one argument, the facts"),
        ("absent", 12, "failed with ModuleNotFoundError"),
    ):
        assert gate(*common, "--gate", name) == code
        assert message in capsys.readouterr().err


def test_results_count_for_their_model_only(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "--suite", "code", "--limit", "5", "--max-new-tokens", "8", "--json", "--allow-unsafe-execution"]
    assert main([*command, "--model", str(run)]) == 0
    told = capsys.readouterr().out
    model = json.loads(told)[0]["facts"]["model"]
    assert model["step"] == 80
    assert model["weights"] == {"model.safetensors": sha256_file(run / "checkpoints/step-00000080/model.safetensors")}
    file = tmp_path / "code.json"
    file.write_text(told)
    common = ("--model", run, "--preset", "production", "--no-measure", "--results", file)
    assert gate(*common, "--json") in (14, 15)
    verdict = json.loads(capsys.readouterr().out)["verdicts"]["compile-rate"]
    assert verdict["n"] > 0
    assert verdict["outcome"] in ("FAIL", "HOLD")
    file.write_text(told.replace(model["weights"]["model.safetensors"], 64 * "0"))
    assert gate(*common) in (14, 15)
    text = " ".join(capsys.readouterr().out.split())
    assert "compile-rate: NOT_MEASURED" in text
    assert "code.json: the result of code is of another model" in text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--preset", "quick", "--lenient", " "], 2, "--lenient needs a reason"),
        (["--preset", "quick", "--sign", "/nowhere/key"], 2, "--sign /nowhere/key: there is no such file"),
        (
            ["--preset", "quick", "--results", "/nowhere.json"],
            2,
            "--results /nowhere.json: cannot be read: No such file",
        ),
        (["--preset", "quick", "--results", "FILE"], 2, "is not JSON"),
        (["--preset", "quick", "--export", "/nowhere"], 2, "/nowhere is not an exported model"),
        (["--preset", "full", "--no-measure", "--forecast", "FILE"], 2, "--forecast"),
    ],
)
def test_wrong_arguments(
    words: list[str], code: int, message: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").write_text("{")
    assert gate("--model", trained, *(str(tmp_path / "bad") if word == "FILE" else word for word in words)) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected a list of at least one result; found an empty list"),
        ([{"suite": 1}], "expected result 1 to have a suite"),
        ([{"suite": "code"}], "expected result 1 (code) to have measures and facts"),
        (
            [{"suite": "code", "facts": {}, "measures": [{"name": "x"}]}],
            "expected each measure of code to have name, value",
        ),
    ],
)
def test_files_that_are_no_results(
    content: Any, message: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content))
    assert gate("--model", trained, "--preset", "quick", "--results", file) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_judged_or_verified(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = Path(shutil.copytree(trained / "export", tmp_path / "export"))
    assert gate("--model", export, "--preset", "quick") == 2
    assert "is an exported model without its run" in capsys.readouterr().err
    assert gate("--model", tmp_path / "nothing", "--preset", "quick") == 5
    assert "does not exist" in capsys.readouterr().err
    assert verify(tmp_path / "nothing") == 5
    assert "is not an exported model: it has no SHA256SUMS" in capsys.readouterr().err
    for path in export.glob("gates-*"):
        path.unlink()
    sums = [line for line in (export / "SHA256SUMS").read_text().splitlines() if "  gates-" not in line]
    overwrite(export / "SHA256SUMS", ("\n".join(sums) + "\n").encode())
    assert verify(export) == 5
    assert "has no evidence: judge its run with cdrmix gate" in capsys.readouterr().err
    assert verify(export, "--allowed-signers", tmp_path / "none") == 2
