"""Evidence of a judgement: an in-toto statement on the files of an export, its copy in the export, and its signature.

The statement (in-toto Statement v1) names the files of the export with their SHA-256. Its predicate is a test result
(https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md) with the verdicts in addition.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.durable import sha256_file, sync_folder, write_atomically
from cdrmix.errors import CheckpointError, ConfigError, ExportMismatchError
from cdrmix.inference.load import SUMS, read_sums
from cdrmix.json_text import parse_json
from cdrmix.ladder.verdict import Outcome, exit_code
from cdrmix.units import utc_text

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
NAMESPACE = "cdrmix-ladder"  # of signatures, as ssh-keygen -n
SIGNATURE = ".sig"


def exported_name(preset: str) -> str:
    """The name of the evidence in an export."""
    return f"gates-{preset}.json"


def evidence_names(preset: str) -> tuple[str, str]:
    """The names of the evidence in an export and of its signature."""
    return exported_name(preset), exported_name(preset) + SIGNATURE


def is_evidence(name: str) -> bool:
    """Whether a file of an export is evidence or its signature."""
    return name.startswith("gates-") and name.removesuffix(SIGNATURE).endswith(".json")


def exported_files(export: Path) -> dict[str, str]:
    """The SHA-256 of the files of an export, without SHA256SUMS and the evidence. Folders are left out."""
    paths = (path for path in sorted(export.iterdir()) if path.is_file())
    return {path.name: sha256_file(path) for path in paths if path.name != SUMS and not is_evidence(path.name)}


def file_problems(export: Path, without: Collection[str] = ()) -> list[str]:
    """What differs between an export and its SHA256SUMS: each file that is missing, changed or added, as a sentence.

    without: names of files that are not verified. Raises CheckpointError if SHA256SUMS is missing or malformed.
    """
    sums = read_sums(export)
    problems = []
    for name, expected in sums.items():
        if name in without:
            continue
        path = export / name
        if not path.is_file():
            problems.append(f"{path} is missing, but {SUMS} lists it")
        elif (found := sha256_file(path)) != expected:
            problems.append(f"{path} was changed: its SHA-256 is {found}, {SUMS} says {expected}")
    known = {*sums, *without, SUMS}
    added = sorted(path.name for path in export.iterdir() if path.name not in known)
    return problems + [f"{export / name} was added: {SUMS} does not list it" for name in added]


def statement(files: Mapping[str, str], predicate: Mapping[str, Any]) -> str:
    """An in-toto statement on files (name -> SHA-256), as JSON."""
    subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(files.items())]
    content = {"_type": STATEMENT, "subject": subjects, "predicateType": PREDICATE, "predicate": predicate}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def check_key(key: Path) -> None:
    """Raises ConfigError if a file cannot be used to sign."""
    if shutil.which("ssh-keygen") is None:
        raise ConfigError("--sign needs ssh-keygen of OpenSSH, which is not installed")
    if not key.is_file():
        raise ConfigError(f"--sign {key}: there is no such file; name a private key of ssh")


def sign(evidence: Path, key: Path) -> Path:
    """Signs a file with a private key of ssh. Returns the signature, a file beside it.

    ssh-keygen asks for the passphrase of the key, if it has one. Raises ConfigError if it refuses the key.
    """
    signature = evidence.with_name(evidence.name + SIGNATURE)
    signature.unlink(missing_ok=True)  # ssh-keygen asks before it overwrites
    _ssh_keygen(["-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE, str(evidence)], f"--sign {key}")
    return signature


def copy_to_export(export: Path, evidence: Path, preset: str) -> Path:
    """Copies evidence and its signature into an export, read-only, and lists them in SHA256SUMS. Returns the copy."""
    sums = {each: digest for each, digest in read_sums(export).items() if not is_evidence(each)}
    name = exported_name(preset)
    (export / (name + SIGNATURE)).unlink(missing_ok=True)  # of an earlier judgement
    for source in (evidence, evidence.with_name(evidence.name + SIGNATURE)):
        if source.is_file():
            target = export / (name + source.name.removeprefix(evidence.name))
            write_atomically(target, source.read_bytes())
            target.chmod(0o444)
    for path in export.iterdir():
        if is_evidence(path.name):
            sums[path.name] = sha256_file(path)
    _write_sums(export, sums)
    return export / name


def _write_sums(export: Path, sums: Mapping[str, str]) -> None:
    write_atomically(export / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
    os.chmod(export / SUMS, 0o444)
    sync_folder(export)


def signed_evidence(export: Path, without: str) -> dict[str, str]:
    """The SHA-256 of the signed evidence in an export, by file name. without: a preset that is left out."""
    paths = (path.with_name(path.name.removesuffix(SIGNATURE)) for path in sorted(export.glob(f"gates-*{SIGNATURE}")))
    return {path.name: sha256_file(path) for path in paths if path.is_file() and path.name != exported_name(without)}


def remove_evidence(export: Path, preset: str) -> list[Path]:
    """Removes the evidence of a preset and its signature from an export and from its SHA256SUMS. Returns the files.

    Raises CheckpointError if there is none, with the presets that the export has evidence of.
    """
    if not (export / SUMS).is_file():
        raise CheckpointError(f"{export} is not an exported model: it has no {SUMS}")
    sums, names = read_sums(export), evidence_names(preset)
    found = [export / name for name in names if name in sums or (export / name).is_file()]
    if not found:
        has = sorted(path.stem.removeprefix("gates-") for path in export.glob("gates-*.json"))
        raise CheckpointError(f"{export} has no evidence of {preset}; it has that of {', '.join(has) or 'no preset'}")
    for path in found:
        path.unlink(missing_ok=True)
    _write_sums(export, {name: digest for name, digest in sums.items() if name not in names})
    return found


@dataclass(frozen=True)
class Evidence:
    """Evidence in an export that was verified. time: of the judgement.

    outcome, stopping, lenient: of the judgement. progress: as of the function `progress`. signer: who signed it, of the
    allowed signers; None: not checked.
    """

    preset: str
    time: datetime.datetime
    outcome: Outcome
    stopping: tuple[str, ...]
    lenient: str | None
    progress: str
    signer: str | None
    path: Path

    @property
    def exit_code(self) -> int:
        """That of the judgement."""
        return exit_code(self.outcome, self.lenient)


def verify_evidence(
    export: Path,
    allowed_signers: Path | None = None,
    *,
    required: Collection[str] = (),
    not_before: datetime.datetime | None = None,
) -> list[Evidence]:
    """Verifies an export with SHA256SUMS, and each evidence in it with the files and earlier evidence that it names.

    allowed_signers: a file as in ssh-keygen(1); then each evidence must have a signature of one of them. required: the
    presets whose evidence the export must have. not_before: the earliest time of the required evidence, or without
    `required` of all evidence; with a time zone.

    Raises:
        CheckpointError: the export is none or has no evidence, or a file was changed, added or removed, or a signature
            is missing or wrong, or evidence is missing that is required or that other evidence names, or is too old. It
            names each.
        ExportMismatchError: the files agree with SHA256SUMS, but not with the evidence: another model was judged.
        ConfigError: allowed_signers cannot be used.
    """
    if not (export / SUMS).is_file():
        raise CheckpointError(f"{export} is not an exported model: it has no {SUMS}")
    if allowed_signers is not None and not allowed_signers.is_file():
        raise ConfigError(f"--allowed-signers {allowed_signers}: there is no such file")
    if problems := file_problems(export):
        raise CheckpointError("; ".join(problems))
    paths = sorted(path for path in export.iterdir() if is_evidence(path.name) and path.suffix == ".json")
    if not paths:
        raise CheckpointError(f"{export} has no evidence: judge its run with cdrmix gate")
    files = exported_files(export)
    contents = {path: _read(path) for path in paths}
    for path, content in contents.items():
        problems += _subject_problems(path, content, files)
    if problems:
        raise ExportMismatchError("; ".join(problems))
    signers = {path: None if allowed_signers is None else _signer(path, allowed_signers) for path in paths}
    found = [_evidence(path, contents[path]["predicate"], signers[path]) for path in paths]
    problems = _missing_evidence(export, {each.path.name: each for each in found}, contents)
    problems += _unmet(export, found, required, not_before)
    if problems:
        raise CheckpointError("; ".join(problems))
    return found


def _missing_evidence(
    export: Path, found: Mapping[str, Evidence], contents: Mapping[Path, Mapping[str, Any]]
) -> list[str]:
    """The signed evidence that other evidence names and that is missing, or that an older one stands for. Nobody can
    take an unfavourable judgement out of an export without also taking out all that came after it."""
    problems = []
    for path, content in contents.items():
        later = found[path.name]
        for name, digest in content["predicate"]["cdrmix"].get("before", {}).get("signed", {}).items():
            earlier = found.get(name)
            if earlier is None:
                what = "is missing"
            elif earlier.time < later.time and sha256_file(earlier.path) != digest:
                what = f"is another one, of {utc_text(earlier.time)}"
            else:
                continue
            problems.append(
                f"{export / name} {what}, and {path.name} of {utc_text(later.time)} names it: restore it, or "
                f"judge the run again with --preset {later.preset} --sign KEY"
            )
    return problems


def _unmet(
    export: Path, found: Sequence[Evidence], required: Collection[str], not_before: datetime.datetime | None
) -> list[str]:
    """The required presets of which there is no evidence, or too old evidence, as sentences."""
    has = {each.preset: each for each in found}
    problems = [
        f"{export} has no evidence of {preset}, which --require-preset requires; it has that of {', '.join(has)}"
        for preset in required
        if preset not in has
    ]
    if not_before is not None:
        problems += [
            f"{each.path} is of {utc_text(each.time)}, and --not-before requires {utc_text(not_before)} or later: "
            f"judge the run again with --preset {each.preset}"
            for each in found
            if each.time < not_before and (not required or each.preset in required)
        ]
    return problems


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        known = content["_type"] == STATEMENT and content["predicateType"] == PREDICATE
        for subject in content["subject"]:
            known = known and isinstance(subject["name"], str) and len(subject["digest"]["sha256"]) == 64
        found = content["predicate"]["cdrmix"]
        evidence = _evidence(path, content["predicate"], None)
        known = known and exported_name(evidence.preset) == path.name and evidence.time.tzinfo is not None
        known = (
            known and isinstance(found["stopping"], list) and all(isinstance(name, str) for name in evidence.stopping)
        )
        known = known and isinstance(evidence.lenient, str | None)
        known = known and all(isinstance(digest, str) for digest in found.get("before", {}).get("signed", {}).values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not the evidence of a judgement: {type(error).__name__}") from error
    if not known:
        raise CheckpointError(f"{path} is not an in-toto statement on a test result of the preset in its name")
    return content


def _subject_problems(path: Path, content: Mapping[str, Any], files: Mapping[str, str]) -> list[str]:
    judged = {subject["name"]: subject["digest"]["sha256"] for subject in content["subject"]}
    problems = []
    for name in sorted(judged.keys() | files.keys()):
        if name not in files:
            problems.append(f"{path.name}: {name} was judged, and is missing")
        elif name not in judged:
            problems.append(f"{path.name}: {name} was added after the judgement")
        elif files[name] != judged[name]:
            problems.append(
                f"{path.name}: {name} was changed after the judgement: its SHA-256 is {files[name]}, of the judged "
                f"file {judged[name]}"
            )
    return problems


def _evidence(path: Path, predicate: Mapping[str, Any], signer: str | None) -> Evidence:
    found = predicate["cdrmix"]
    outcome = Outcome(found["outcome"])
    lenient, far = found["lenient"], progress(found.get("run", {}))
    time = datetime.datetime.fromisoformat(found["time"])
    return Evidence(found["preset"], time, outcome, tuple(found["stopping"]), lenient, far, signer, path)


def progress(run: Mapping[str, Any]) -> str:
    """How far a run was that is not finished: "step 50 of 100"; "" for a finished one. run: of `Facts`."""
    if run.get("finished", True):
        return ""
    return "no checkpoint yet" if run["step"] is None else f"step {run['step']:,} of {run['steps']:,}"


def _signer(path: Path, allowed_signers: Path) -> str:
    """Who of the allowed signers signed a file. Raises CheckpointError."""
    signature = path.with_name(path.name + SIGNATURE)
    if not signature.is_file():
        raise CheckpointError(f"{path} has no signature, which --allowed-signers requires: {_remedy(path)}")
    common = ["-f", str(allowed_signers), "-n", NAMESPACE, "-s", str(signature)]
    try:
        found = _ssh_keygen(["-Y", "find-principals", *common], str(signature))
        signer = found.splitlines()[0].strip()
        _ssh_keygen(["-Y", "verify", "-I", signer, *common], str(signature), path.read_bytes())
    except ConfigError as error:
        raise CheckpointError(f"{path} is not signed by an allowed signer: {error}. {_remedy(path)}") from error
    return signer


def _remedy(path: Path) -> str:
    preset = path.stem.removeprefix("gates-")
    return (
        f"judge the run with --preset {preset} --sign KEY, or remove this evidence: "
        f"cdrmix evidence remove {path.parent} --preset {preset}"
    )


def _ssh_keygen(arguments: list[str], what: str, given: bytes | None = None) -> str:
    """Runs ssh-keygen and returns its output. Raises ConfigError with what it says if it fails."""
    if shutil.which("ssh-keygen") is None:
        raise ConfigError("signatures need ssh-keygen of OpenSSH, which is not installed")
    done = subprocess.run(["ssh-keygen", *arguments], input=given, capture_output=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).decode("utf-8", errors="replace").strip().replace("\n", "; ")
        raise ConfigError(f"{what}: ssh-keygen refused: {said}")
    return done.stdout.decode("utf-8", errors="replace")
