"""Collects the facts of a run for its gates: from its rows, configuration, checkpoint, export, and files of results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.durable import write_atomically
from cdrmix.errors import CdrmixError, CheckpointError, ConfigError
from cdrmix.gpus import Gpu, gpu_by_name
from cdrmix.hf.export import exported_step
from cdrmix.hf.export_foreign import TOLERANCE
from cdrmix.hf.load import load_alone
from cdrmix.inference.checkpoints import list_checkpoints, read_manifest, step_of, weight_files
from cdrmix.inference.load import SUMS, final_weights
from cdrmix.json_text import parse_json
from cdrmix.ladder.evidence import exported_files, file_problems
from cdrmix.ladder.facts import Facts
from cdrmix.ladder.forecast import Forecast
from cdrmix.ladder.presentation import forecast_json
from cdrmix.ladder.rerun import processes_of, same_machine, train_again
from cdrmix.ladder.results import forecast_facts, read_forecast, read_results, results_of
from cdrmix.plan.flops import training_flops_per_token
from cdrmix.plan.machine import machine_for
from cdrmix.plan.plan import ASSUMED_MFU
from cdrmix.reason.stage_b import spans
from cdrmix.records import read_records
from cdrmix.run_folder import RunFolder, environment, finite

MEASURED = "measured.json"
PROMPT = "def "


def collect(
    run: RunFolder,
    *,
    export: Path | None,
    results: Sequence[Path],
    forecast: Forecast | Path | None,
    tokens_per_second: float | None,
    compares_logits: bool,
    trains_again: bool,
    rewritten: Collection[str],
    say: Callable[[str], None],
) -> Facts:
    """The facts of a run. What was measured here before, in gates/measured.json, is used again.

    export: the folder of the exported model; None: there is none. compares_logits: load the export and its checkpoint.
    trains_again: measure determinism and resume, unless that was done. rewritten: files of the export that the
    judgement writes. The others: as of `judge`.
    Raises ConfigError if the run or a file cannot be read.
    """
    every_result = read_results(results)  # files that are wrong are found before anything is computed
    expected = _forecast(forecast)
    config = Config.from_yaml(run.config_snapshot)
    summary, records = _summary(run), read_records(run.metrics_jsonl)
    weights = _weights(run)
    measured = _measured(run, config, trains_again, say)
    exported = None if export is None else _export(run, config, export, compares_logits, rewritten, say)
    known, unused = results_of(every_result, _model_files(run, exported))
    return Facts(
        run={
            "name": config.run.name,
            "config_hash": config.hash(),
            "folder": run.path.name,
            "step": None if weights is None else weights["step"],
            "steps": _steps(config),
            "finished": run.finished,
        },
        settings={
            "vocabulary": config.model.vocab_size,
            "steps": config.train.steps,
            "warmup_steps": config.train.warmup_steps,
            "log_every": config.train.log_every,
            "preferences": config.train.dpo is not None,
            "routed": bool(config.model.routers)
            if isinstance(config.model, Model)
            else any(record.routers for record in records.steps),
        },
        rows=tuple(map(dataclasses.asdict, records.steps)),
        phases=tuple(map(dataclasses.asdict, records.phases)),
        held_out=summary.get("held_out"),
        weights=weights,
        machine=_machine(run, config),
        plan=_plan(run, config, tokens_per_second, measured),
        forecast=expected,
        determinism=measured.get("determinism"),
        resume=measured.get("resume"),
        export=exported,
        results=tuple(known),
        foreign_results=tuple(unused),
    )


def _steps(config: Config) -> int:
    """The steps of a finished run, with those of stage B."""
    phases = [] if config.reasoning is None else spans(config)
    return phases[-1].last if phases else config.train.steps


def _summary(run: RunFolder) -> dict[str, Any]:
    """The contents of metrics.json. Raises ConfigError if it is missing or damaged."""
    summary = run.summary()
    if not summary:
        raise ConfigError(
            f"{run.metrics_json} is missing or damaged: it has the held-out loss and the machine of the run; restore it"
        )
    return summary


def _weights(run: RunFolder) -> dict[str, Any] | None:
    """Of the newest checkpoint with valid weights: how many, and how many are not finite; None without a checkpoint."""
    try:
        checkpoint, weights = final_weights(run.path)
    except CheckpointError:
        return None
    bad = {name: int((~torch.isfinite(tensor)).sum()) for name, tensor in weights.items()}
    return {
        "checkpoint": checkpoint.name,
        "step": step_of(checkpoint),
        "values": sum(tensor.numel() for tensor in weights.values()),
        "not_finite": sum(bad.values()),
        "first": next((name for name, count in bad.items() if count), None),
        "files": {name: entry["sha256"] for name, entry in read_manifest(checkpoint)["files"].items()},
    }


def _machine(run: RunFolder, config: Config) -> dict[str, Any] | None:
    """The machine of the run if it is this one; None if it is another."""
    if not same_machine(run):
        return None
    machine = machine_for(config, None, processes_of(run) or 1)
    return {"name": machine.name, "memory_bytes": machine.memory_bytes}


def _plan(run: RunFolder, config: Config, given: float | None, measured: dict[str, Any]) -> dict[str, Any] | None:
    """The planned speed of all processes, and where it is from; None if there is no plan for this device."""
    if given is not None:
        return {"tokens_per_second": given, "source": "as given"}
    if same_machine(run) and torch.cuda.is_available() and config.run.device != "cpu":
        gpu: Gpu | None = gpu_by_name(torch.cuda.get_device_name(0))
        if gpu is not None:
            rate = ASSUMED_MFU * gpu.flops_per_second * (processes_of(run) or 1)
            flops = training_flops_per_token(config).total
            return {"tokens_per_second": rate / flops, "source": f"{ASSUMED_MFU:.0%} of the bf16 peak, as cdrmix plan"}
    again = measured.get("determinism") or {}
    if again.get("tokens_per_second"):
        return {"tokens_per_second": again["tokens_per_second"], "source": f"{again['steps']} steps trained again"}
    return None


def _measured(run: RunFolder, config: Config, trains_again: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """What gates/measured.json has of this configuration, on this machine with these packages.

    Otherwise it is measured if `trains_again`.
    """
    path = run.path / "gates" / MEASURED
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        stored = {}
    identity = {"config_hash": config.hash(), "environment": environment()}
    if isinstance(stored, dict) and all(stored.get(name) == value for name, value in identity.items()):
        return stored
    if not trains_again:
        return {}
    found = train_again(run, say) | identity
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(finite(found), indent=2, allow_nan=False) + "\n")
    return found


def _export(
    run: RunFolder,
    config: Config,
    export: Path,
    compares_logits: bool,
    rewritten: Collection[str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The files of an export with their hashes, what is wrong with them, and whether it gives the trained logits."""
    if not (export / SUMS).is_file():
        raise ConfigError(f"{export} is not an exported model: it has no {SUMS}")
    step, problems = exported_step(export), file_problems(export, rewritten)
    if step is None and not problems:
        problems.append(f"{export} does not say which step it has")
    found: dict[str, Any] = {"step": step, "files": exported_files(export), "problems": problems}
    found |= {"logits": None, "logits_problem": "the files of the export are damaged"}
    if problems or not compares_logits:
        return found | ({} if problems else {"logits_problem": "they were not compared"})
    checkpoint = run.checkpoints / f"step-{step:08d}"
    if not checkpoint.is_dir():
        names = ", ".join(path.name for path in list_checkpoints(run.checkpoints)) or "none"
        return found | {"logits_problem": f"the checkpoint is gone; the run has {names}: export one of these"}
    say(f"Comparing the logits of {export} and {checkpoint}")
    try:
        return found | {"logits": _same_logits(config, checkpoint, export), "logits_problem": None}
    except CdrmixError as error:
        return found | {"logits_problem": str(error)}


def _same_logits(config: Config, checkpoint: Path, export: Path) -> bool:
    ours, theirs = load_alone(checkpoint), load_alone(export)
    length = min(config.data.row_length, 256)
    scattered = [7919 * position % ours.model.vocab_size for position in range(length)]
    # The bits are the same unless the weights were rounded or adapters are merged in another order.
    exact = isinstance(config.model, Model) or (config.export.weights == "fp32" and config.model.lora is None)
    device = next(iter(ours.model.parameters())).device
    for ids in (ours.tokenizer.encode(PROMPT), scattered):
        ids_BT = torch.tensor([ids], device=device)
        with torch.no_grad():
            expected, actual = (each.model.logits(each.model(ids_BT).hidden_BTD).float() for each in (ours, theirs))
        distance = (expected - actual).square().mean().sqrt() / expected.std()
        if not (torch.equal(expected, actual) if exact else bool(distance <= TOLERANCE)):
            return False
    return theirs.tokenizer.encode(PROMPT) == ours.tokenizer.encode(PROMPT)


def _model_files(run: RunFolder, exported: dict[str, Any] | None) -> frozenset[str]:
    """The SHA-256 of the files of weights of the exported model: those of the export and of its checkpoint."""
    hashes: set[str] = set()
    checkpoints = list_checkpoints(run.checkpoints)
    if exported is not None:
        hashes |= {digest for name, digest in exported["files"].items() if name.endswith(".safetensors")}
        checkpoints = [path for path in checkpoints if step_of(path) == exported["step"]]
    for checkpoint in checkpoints[-1:]:
        try:
            files = read_manifest(checkpoint)["files"]
        except CheckpointError:
            continue
        hashes |= {files[name]["sha256"] for name in weight_files(files)}
    return frozenset(hashes)


def _forecast(given: Forecast | Path | None) -> dict[str, Any] | None:
    if given is None:
        return None
    return forecast_facts(forecast_json(given)) if isinstance(given, Forecast) else read_forecast(given)
