"""The files that a ladder answers for: those of its runs, and its own copies of what its rungs were judged by.

Any judgement of a run (`cdrmix gate`) writes its evidence into the run and into the export, and lists it in SHA256SUMS.
So the ledger records neither. The ladder keeps a copy of the evidence of each of its judgements in a folder that is
written once, judgements/RUNG/NUMBER.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cdrmix.durable import sha256_file, write_atomically
from cdrmix.errors import LedgerError
from cdrmix.inference.load import SUMS, read_sums
from cdrmix.json_text import parse_json
from cdrmix.ladder.evidence import SIGNATURE, exported_files, is_evidence
from cdrmix.ladder.ledger import REMEDY, Entry, check_files
from cdrmix.run_folder import RunFolder

JUDGEMENTS, RESULTS = "judgements", "suites.json"
TEMPORARY = ".tmp"  # of cdrmix.durable.write_atomically


def run_path(root: Path, entry: Entry) -> Path:
    """The run folder of a `trained` entry."""
    return root / str(entry.record["run"])


def training_files(run: RunFolder) -> list[Path]:
    """The files of a finished run that the ledger records: its configuration, its metrics, and the exported model."""
    return [run.config_snapshot, run.metrics_jsonl, *(run.export / name for name in exported_files(run.export))]


def training_facts(run: RunFolder) -> dict[str, Any]:
    """What metrics.json says of a finished run. The rest of that file may change: a mirror and a watcher write to it.

    Raises LedgerError if it has no finite held-out loss.
    """
    summary = run.summary()
    try:
        facts = {
            "step": summary["held_out_step"],
            "loss": summary["held_out"]["loss_nats_per_token"],
            "bits_per_byte": summary["held_out"]["bits_per_byte"],
            "text": summary["text_fingerprint"],
            "tokenizer": summary["corpus"]["tokenizer_sha256"],
            "exported_step": summary["export"]["step"],
        }
    except (LookupError, TypeError) as error:
        raise LedgerError(f"{run.metrics_json} is incomplete: it has no {error}. {REMEDY}") from error
    if not math.isfinite(facts["loss"]):
        raise LedgerError(f"{run.metrics_json} has no held-out loss: found {facts['loss']}. {REMEDY}")
    return facts


def check_run(root: Path, trained: Entry) -> None:
    """Compares a run with its `trained` line: the recorded files, SHA256SUMS, added files, and what metrics.json says.

    Evidence in the export is left out. Raises LedgerError with the name of the file.
    """
    check_files(root, trained)
    run = run_path(root, trained)
    export, where = run / "export", f"line {trained.number} of the ledger in {root}"
    files = {root / name: digest for name, digest in trained.record["files"].items()}
    recorded = {path.name: digest for path, digest in files.items() if path.parent == export}
    sums = {name: digest for name, digest in read_sums(export).items() if not is_evidence(name)}
    for name in sorted(sums.keys() | recorded.keys()):
        if sums.get(name) != recorded.get(name):
            raise LedgerError(f"{export / SUMS} was changed: it does not list {name} as {where} does. {REMEDY}")
    for path in sorted(export.iterdir()):
        if path.name not in recorded and not _of_a_judgement(path.name):
            raise LedgerError(f"{path} was added: {where} does not record it. Remove it, or restore the folder.")
    for name, value in training_facts(RunFolder.open(run, writes=False)).items():
        if trained.facts[name] != value:
            raise LedgerError(
                f"{run / 'metrics.json'} was changed: {name} is {value}, {where} says {trained.facts[name]}. {REMEDY}"
            )


def remove_incomplete_evidence(export: Path) -> None:
    """Removes what a judgement that was killed left in an export: evidence that SHA256SUMS does not fit.

    The files of the model must have been verified. Their lines of SHA256SUMS stay.
    """
    sums = read_sums(export)
    whole = {
        name: digest
        for name, digest in sums.items()
        if not is_evidence(name) or ((export / name).is_file() and sha256_file(export / name) == digest)
    }
    left = [path for path in export.iterdir() if path.name not in whole and path.name != SUMS]
    for path in left:
        if _of_a_judgement(path.name):
            path.unlink()
    if whole != sums:
        write_atomically(export / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(whole.items())))
        os.chmod(export / SUMS, 0o444)


def keep_evidence(folder: Path, evidence: Path, results: Sequence[Path]) -> list[Path]:
    """Copies the evidence of a judgement, its signature, its facts and the files of results. Returns the copies."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = evidence.with_name(f"{evidence.stem}.facts.json")
    signature = evidence.with_name(evidence.name + SIGNATURE)
    (folder / signature.name).unlink(missing_ok=True)  # of a judgement of this number that was killed
    kept = []
    for source in (evidence, facts, signature, *results):
        if not source.is_file():
            continue
        if source.parent != folder:
            write_atomically(folder / source.name, source.read_bytes())
        kept.append(folder / source.name)
    return kept


def read_suites(path: Path, weights: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The results of a model in a file, by suite, without those where anything was not measured.

    weights: the SHA-256 of the files of weights of the model. {} without a file.
    """
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
        return {
            result["suite"]: result
            for result in stored
            if result["facts"].get("model", {}).get("weights") == weights  # nothing of a suite that failed
            and all(measure["problem"] is None for measure in result["measures"])
        }
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return {}


def _of_a_judgement(name: str) -> bool:
    """Whether a file of an export is SHA256SUMS or evidence, or a temporary file of them after a kill."""
    name = name.removesuffix(TEMPORARY)
    return name == SUMS or is_evidence(name)
