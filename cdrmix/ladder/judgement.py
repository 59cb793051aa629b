"""The judgement of a run by the gates of a preset: its verdicts, what they add up to, and the evidence it leaves."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.durable import sha256_file, write_atomically
from cdrmix.errors import CheckpointError, ConfigError, GateError
from cdrmix.inference.load import SUMS, run_of
from cdrmix.ladder import bounds
from cdrmix.ladder.collect import collect
from cdrmix.ladder.custom_gates import load_gates
from cdrmix.ladder.evidence import (
    SIGNATURE,
    check_key,
    copy_to_export,
    evidence_names,
    file_problems,
    progress,
    sign,
    signed_evidence,
    statement,
)
from cdrmix.ladder.facts import Facts
from cdrmix.ladder.forecast import Forecast
from cdrmix.ladder.gates import Gate
from cdrmix.ladder.presets import TRAINS_AGAIN, Check, preset
from cdrmix.ladder.verdict import Outcome, Verdict, checked, exit_code
from cdrmix.run_folder import RunFolder, environment
from cdrmix.units import utc_now

FOLDER = "gates"
HISTORY = "history.jsonl"
TESTS = {Outcome.PASS: "passedTests", Outcome.FAIL: "failedTests"}  # others: warnedTests


@dataclass(frozen=True)
class Judgement:
    """What the gates of a preset answer about a run.

    verdicts: by gate. required: the gates without which a run does not pass. outcome: PASS; FAIL where a required gate
    failed; otherwise HOLD or NOT_MEASURED. lenient: the reason for which the run passes nevertheless; None: strict.
    progress: how far a run was that is not finished, such as "step 50 of 100"; "" for a finished one.
    evidence: gates/<preset>.json of the run; None before it is written. exported_evidence: its copy in the export; None
    without an export, and for one that SHA256SUMS does not fit.
    """

    preset: str
    verdicts: Mapping[str, Verdict]
    required: frozenset[str]
    outcome: Outcome
    lenient: str | None
    progress: str
    evidence: Path | None
    exported_evidence: Path | None

    @property
    def passed(self) -> bool:
        """Whether the run may be used for what the preset is for."""
        return self.outcome is Outcome.PASS or self.lenient is not None

    @property
    def stopping(self) -> tuple[str, ...]:
        """The required gates that did not pass."""
        return tuple(
            name
            for name, verdict in self.verdicts.items()
            if name in self.required and verdict.outcome is not Outcome.PASS
        )

    @property
    def exit_code(self) -> int:
        """0; that of GateError where a required gate failed; that of UndecidedGateError where one is undecided."""
        return exit_code(self.outcome, self.lenient)


def judge(
    run: str | Path,
    preset_name: str,
    *,
    export: Path | None = None,
    results: Sequence[Path] = (),
    forecast: Forecast | Path | None = None,
    tokens_per_second: float | None = None,
    custom_gates: Sequence[str] = (),
    lenient: str | None = None,
    measure: bool | None = None,
    sign_with: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Judgement:
    """Judges a run by the gates of a preset, and writes the evidence.

    The run gets gates/<preset>.json (the evidence), gates/<preset>.facts.json (what the gates read) and a line of
    gates/history.jsonl; the export gets a copy of the evidence, gates-<preset>.json.

    Args:
        run: the run folder, a checkpoint of it, or its export/.
        preset_name: quick, standard, full or production.
        export: the exported model. Default: export/ of the run, if there is one.
        results: files of `cdrmix eval --suite A --json`, of this model.
        forecast: of this run's held-out loss, or a file of `cdrmix ladder forecast --json`. Without one, or with too
            few smaller rungs, the gate `band` is not required.
        tokens_per_second: of the plan, of all processes. Default: that of `cdrmix plan` on a known GPU; otherwise that
            of the steps that are trained again.
        custom_gates: entry points of the group cdrmix.gates. Only these are imported. They are required.
        lenient: the reason why the run passes whatever the gates say. It is recorded. None: strict.
        measure: whether to train 20 steps again, and 20 from a checkpoint, where that is not measured yet. Default: for
            full and production.
        sign_with: a private key of ssh, which signs the evidence.
        say: receives progress messages.

    Raises:
        ConfigError: there is no such preset or gate, the run cannot be judged, or a file of results is not one.
        PluginError: a custom gate cannot be imported.
        CheckpointError: `run` is no run; SHA256SUMS of the export is missing or malformed; or a file of the export was
            changed, added or removed, unless the preset has the gate `export`, which fails then.
    """
    checks = preset(preset_name)
    if lenient is not None and not lenient.strip():
        raise ConfigError("--lenient needs a reason, which is recorded")
    if sign_with is not None:
        check_key(sign_with)
    custom = load_gates(custom_gates)
    checks += [_custom(name, gate, checks) for name, (gate, _) in custom.items()]
    folder, export = _run_and_export(Path(run), export)
    compares_logits = any(check.name == "export" for check in checks)
    if export is not None and not compares_logits and (problems := file_problems(export, evidence_names(preset_name))):
        raise CheckpointError(
            f"{'; '.join(problems)}. Restore the files, or remove {export} and export the run again with cdrmix export"
        )
    facts = collect(
        folder,
        export=export,
        results=results,
        forecast=forecast,
        tokens_per_second=tokens_per_second,
        compares_logits=compares_logits,
        trains_again=preset_name in TRAINS_AGAIN if measure is None else measure,
        rewritten=evidence_names(preset_name),
        say=say or (lambda _: None),
    )
    judgement = decide(preset_name, checks, facts, lenient)
    origins = {name: origin for name, (_, origin) in custom.items()}
    return _write(judgement, checks, facts, folder, export, origins, sign_with)


def decide(preset_name: str, checks: Iterable[Check], facts: Facts, lenient: str | None = None) -> Judgement:
    """The verdicts of gates on facts, and what they add up to. It reads and writes no file."""
    applicable = [check for check in checks if check.applies(facts)]
    verdicts = _corrected({check.name: ask(check, facts) for check in applicable})
    required = frozenset(check.name for check in applicable if check.required(facts))
    outcomes = {verdicts[name].outcome for name in required}
    worst = next(
        (outcome for outcome in (Outcome.FAIL, Outcome.HOLD, Outcome.NOT_MEASURED) if outcome in outcomes), Outcome.PASS
    )
    return Judgement(preset_name, verdicts, required, worst, lenient, progress(facts.run), None, None)


def ask(check: Check, facts: Facts) -> Verdict:
    """The verdict of one gate. A gate that raises, or that returns no verdict, fails."""
    try:
        verdict = _answer(check, facts)
    except GateError as error:
        verdict = Verdict(Outcome.FAIL, str(error))
    return dataclasses.replace(verdict, inputs_sha256=facts.digest(*check.reads))


def _answer(check: Check, facts: Facts) -> Verdict:
    """Raises GateError for any error of a gate: it is anybody's code, and no error of it may let a run pass."""
    try:
        answer: object = check.gate(facts)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: no gate may end the command without a judgement
        raise GateError(f"the gate raised {type(error).__name__}: {error}") from error
    try:
        return checked(answer)
    except ValueError as error:
        raise GateError(f"the gate returned {error}") from error


def _corrected(verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """The verdicts after Holm's correction: what fails by a chance that so many gates have, is undecided."""
    p_values = {name: verdict.p_value for name, verdict in verdicts.items() if verdict.p_value is not None}
    certain = bounds.holm(p_values)
    return {
        name: dataclasses.replace(
            verdict,
            outcome=Outcome.HOLD,
            reason=f"{verdict.reason}; among {len(p_values)} gates it can be chance (Holm, p = {verdict.p_value:.2g})",
        )
        if verdict.outcome is Outcome.FAIL and verdict.p_value is not None and name not in certain
        else verdict
        for name, verdict in verdicts.items()
    }


def _custom(name: str, gate: Gate, checks: Sequence[Check]) -> Check:
    if any(check.name == name for check in checks):
        raise ConfigError(f"the custom gate {name!r} has the name of a gate of the preset; rename its entry point")
    return Check(name, "custom", lambda facts: gate(facts.copy()), (), "a gate of a plugin")


def _run_and_export(path: Path, export: Path | None) -> tuple[RunFolder, Path | None]:
    """The run folder of a run, a checkpoint, or export/ of a run, and the export to judge."""
    if (path / SUMS).is_file():
        parent = path.resolve().parent
        if export is not None or not (parent / "config_snapshot.yaml").is_file():
            raise ConfigError(
                f"{path} is an exported model without its run: gates read what the run recorded. Name the run with "
                "--model RUN, and this folder with --export"
            )
        return RunFolder.open(parent, writes=False), path
    run = run_of(path)
    if export is None and (run.export / SUMS).is_file():
        export = run.export
    if export is not None and not (export / SUMS).is_file():
        raise ConfigError(f"{export} is not an exported model: it has no {SUMS}")
    return run, export


def _write(
    judgement: Judgement,
    checks: Sequence[Check],
    facts: Facts,
    run: RunFolder,
    export: Path | None,
    custom: Mapping[str, Mapping[str, str]],
    sign_with: Path | None,
) -> Judgement:
    """Writes the facts, the evidence with its signature and its copy, and the history."""
    folder = run.path / FOLDER
    folder.mkdir(exist_ok=True)
    facts_file, facts_text = folder / f"{judgement.preset}.facts.json", json.dumps(facts.as_json(), allow_nan=False)
    facts_bytes = (facts_text + "\n").encode()
    if facts.export is not None:
        subjects: Mapping[str, str] = facts.export["files"]
    elif facts.weights is not None:
        subjects = {
            f"checkpoints/{facts.weights['checkpoint']}/{name}": digest
            for name, digest in facts.weights["files"].items()
        }
    else:
        subjects = {run.config_snapshot.name: sha256_file(run.config_snapshot)}
    evidence = folder / f"{judgement.preset}.json"
    now = utc_now()
    predicate = _predicate(judgement, checks, facts, hashlib.sha256(facts_bytes).hexdigest(), custom, now)
    former = (folder / HISTORY).read_bytes() if (folder / HISTORY).is_file() else b""
    predicate["cdrmix"]["before"] = {
        "history": {"lines": former.count(b"\n"), "sha256": hashlib.sha256(former).hexdigest()},
        "signed": {} if export is None else signed_evidence(export, judgement.preset),
    }
    text = statement(subjects, predicate)
    signed = None if sign_with is None else _signature(text, sign_with)  # if that fails, nothing is written
    write_atomically(facts_file, facts_bytes)
    signature = evidence.with_name(evidence.name + SIGNATURE)
    signature.unlink(missing_ok=True)  # of an earlier judgement
    write_atomically(evidence, text)
    if signed is not None:
        write_atomically(signature, signed)
    copy = None
    if export is not None and facts.export is not None and not facts.export["problems"]:
        copy = copy_to_export(export, evidence, judgement.preset)
    line = {
        "time": now,
        "preset": judgement.preset,
        "outcome": judgement.outcome.value,
        "lenient": judgement.lenient,
        "passed": judgement.passed,
        "evidence_sha256": sha256_file(evidence),
        "verdicts": {name: verdict.outcome.value for name, verdict in judgement.verdicts.items()},
    }
    with (folder / HISTORY).open("a", encoding="utf-8") as history:
        history.write(json.dumps(line) + "\n")
    return dataclasses.replace(judgement, evidence=evidence, exported_evidence=copy)


def _signature(text: str, key: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="cdrmix-sign-") as folder:
        file = Path(folder) / "evidence"
        file.write_text(text, encoding="utf-8")
        return sign(file, key).read_bytes()


def _predicate(
    judgement: Judgement,
    checks: Sequence[Check],
    facts: Facts,
    facts_sha256: str,
    custom: Mapping[str, Mapping[str, str]],
    now: str,
) -> dict[str, Any]:
    """The test result of in-toto: result, configuration, tests by outcome; and the verdicts under `cdrmix`."""
    tests: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    for name, verdict in judgement.verdicts.items():
        tests[TESTS.get(verdict.outcome, "warnedTests")].append(name)
    passed = {True: "PASSED", False: "FAILED"}[judgement.outcome is Outcome.PASS]
    meanings = {check.name: check for check in checks}
    return {
        "result": "WARNED" if passed == "FAILED" and judgement.passed else passed,
        "configuration": [{"name": f"{judgement.preset}.facts.json", "digest": {"sha256": facts_sha256}}],
        **tests,
        "cdrmix": {
            "preset": judgement.preset,
            "outcome": judgement.outcome.value,
            "passed": judgement.passed,
            "lenient": judgement.lenient,
            "stopping": list(judgement.stopping),
            "time": now,
            "run": dict(facts.run),
            "version": environment()["versions"]["cdrmix"],
            "verdicts": {
                name: {
                    "group": meanings[name].group,
                    "meaning": meanings[name].meaning,
                    "required": name in judgement.required,
                    **verdict.as_json(),
                }
                for name, verdict in judgement.verdicts.items()
            },
            "custom_gates": {name: dict(origin) for name, origin in custom.items()},
        },
    }
