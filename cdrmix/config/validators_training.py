"""Rules about the section `train`: rows, precision, memory and processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdrmix.config.hyperparameters import COUNTING_KEYS, countable
from cdrmix.config.rule import Rule


def _batch_rows(rows: int, micro: int) -> str | None:
    return f"a multiple of train.micro_batch_rows={micro}" if rows % micro else None


def _first_rows(first: int, rows: int, micro: int) -> str | None:
    refused = first >= rows or first % micro
    if refused and micro >= rows:
        return f"null, or train.micro_batch_rows below train.batch_rows={rows}; found {micro}"
    return f"a multiple of train.micro_batch_rows={micro} below train.batch_rows={rows}" if refused else None


def _below_steps(warmup: int, steps: int) -> str | None:
    return f"below train.steps={steps}" if warmup >= steps else None


def _compile(
    compiled: bool, zero_stage: int | str, offload: str, expert_parallel: int, sequence_parallel: int
) -> str | None:
    # All gather or exchange in hooks of modules or in layers, which compiled code does not call.
    parallel = max(expert_parallel, sequence_parallel)
    refused = compiled and (zero_stage == 3 or offload == "all" or parallel > 1)
    others = " and train.offload none or optimizer" if offload == "all" else ""
    slices = " and train.sequence_parallel 1" if sequence_parallel > 1 else ""
    return f"false, or train.zero_stage below 3{others} and train.expert_parallel 1{slices}" if refused else None


def _compile_depth(compiled: bool, part: str) -> str | None:
    if not compiled or part == "feed_forward":
        return None
    return "false with model.depth.part mixer or both: mixers read as many rows as tokens are kept"


def _weights(weights: str, precision: str, zero_stage: int | str) -> str | None:
    refused = weights == "bf16" and (precision != "bf16" or zero_stage == 0)
    return "fp32, or train.precision: bf16 and train.zero_stage: auto, 1, 2 or 3" if refused else None


def _offload(offload: str, zero_stage: int | str, expert_parallel: int) -> str | None:
    stages = ("auto", 3) if offload == "all" else ("auto", 2, 3)
    if offload == "none" or (zero_stage in stages and expert_parallel == 1):
        return None
    which = "auto or 3" if offload == "all" else "auto, 2 or 3"
    return f"none, or train.zero_stage: {which} and train.expert_parallel: 1"


def _offload_folder(folder: str | None, offload: str, optimizer: str) -> str | None:
    refused = folder is not None and (offload == "none" or optimizer != "adamw")
    return "null, or train.offload: optimizer or all and train.optimizer: adamw" if refused else None


def _dpo(dpo: object, source: Mapping[str, Any] | None, domains: Mapping[str, Any] | None) -> str | None:
    owners = [domain for domain in domains.values() if isinstance(domain, Mapping)] if domains else [{"source": source}]
    sources = [owner.get("source") for owner in owners]
    kinds = [each.get("kind") if isinstance(each, Mapping) else None for each in sources]
    pairs = [kind in ("preferences", "task_preferences") for kind in kinds]
    if dpo is not None and not all(pairs):
        return "null, or sources of the kinds preferences and task_preferences alone"
    return "a section, because the sources are preferences" if dpo is None and any(pairs) else None


def _precision(precision: str, device: str) -> str | None:
    return "bf16 or fp32 with run.device=cpu; fp16 needs a GPU" if precision == "fp16" and device == "cpu" else None


def _residual_dtype(residual_dtype: str | None, precision: str) -> str | None:
    refused = residual_dtype == "bf16" and precision != "bf16"
    return "fp32 or null, or train.precision: bf16" if refused else None


RULES = (
    Rule(("train.batch_rows", "train.micro_batch_rows"), _batch_rows),
    Rule(("train.batch_warmup.rows", "train.batch_rows", "train.micro_batch_rows"), _first_rows),
    *(Rule((key, "model.mixer_layers", "model.feed_forward.kind"), countable) for key in COUNTING_KEYS),
    Rule(("train.warmup_steps", "train.steps"), _below_steps),
    Rule(("train.batch_warmup.steps", "train.steps"), _below_steps),
    Rule(("train.precision", "run.device"), _precision),
    Rule(("train.residual_dtype", "train.precision"), _residual_dtype),
    Rule(
        (
            *("train.compile", "train.zero_stage", "train.offload", "train.expert_parallel"),
            "train.sequence_parallel",
        ),
        _compile,
    ),
    Rule(("train.compile", "model.depth.part"), _compile_depth),
    Rule(("train.weights", "train.precision", "train.zero_stage"), _weights),
    Rule(("train.offload", "train.zero_stage", "train.expert_parallel"), _offload),
    Rule(("train.offload_folder", "train.offload", "train.optimizer.kind"), _offload_folder),
    Rule(("train.dpo", "data.source", "data.domains"), _dpo),
)
