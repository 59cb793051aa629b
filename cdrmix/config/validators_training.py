"""Rules about the section `train`: rows, precision, memory and processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdrmix.config.hyperparameters import COUNTING_KEYS, countable
from cdrmix.config.rule import BUILT_IN, Rule


def _batch_rows(rows: int, micro: int) -> str | None:
    return f"a multiple of train.micro_batch_rows={micro}" if rows % micro else None


def _first_rows(first: int, rows: int, micro: int) -> str | None:
    refused = first >= rows or first % micro
    if refused and micro >= rows:
        return f"null, or train.micro_batch_rows below train.batch_rows={rows}; found {micro}"
    return f"a multiple of train.micro_batch_rows={micro} below train.batch_rows={rows}" if refused else None


def _expert_parallel(processes: int, experts: int, kind: str) -> str | None:
    if kind != "moe":
        return None if processes == 1 else f"1 for model.feed_forward.kind={kind}, which has no experts"
    return f"must divide model.feed_forward.experts={experts}" if experts % processes else None


def _slices(processes: int, row_length: int) -> str | None:
    return f"must divide data.row_length={row_length}" if row_length % processes else None


def _slices_of_convolution(processes: int, row_length: int, width: int, mixers: Mapping[str, list[int]]) -> str | None:
    least = width - 1  # a slice has the tokens that the next one reads
    refused = (mixers.get("mamba2") or mixers.get("routing_mamba")) and row_length // processes < least
    return (
        f"at most {max(1, row_length // least)}: slices of {least} tokens, for model.mamba.conv_width"
        if refused
        else None
    )


def _slices_of_heads(
    processes: int, heads: int, kv_heads: int, fraction: float, mixers: Mapping[str, list[int]]
) -> str | None:
    if not fraction and not mixers.get("attention"):
        return None
    if heads % processes:
        return f"must divide model.attention.heads={heads}"
    refused = kv_heads % processes and processes % kv_heads
    return f"a divisor or a multiple of model.attention.kv_heads={kv_heads}" if refused else None


def _slices_of_plugins(processes: int, mixers: Mapping[str, list[int]], feed_forward: str) -> str | None:
    others = [name for name in mixers if name not in BUILT_IN["mixer"]]
    others += [] if feed_forward in BUILT_IN["feed-forward"] else [feed_forward]
    if processes == 1 or not others:
        return None
    return f"1 with {others[0]} of a plugin, which would take each slice for a whole row"


def _whole_rows(
    processes: int, prediction: object, depth: Mapping[str, Any] | None, drop: bool, reasoning: object, dpo: object
) -> str | None:
    if processes == 1:
        return None
    reasons = {
        "model.prediction: its depths read the embeddings of later tokens": prediction is not None,
        "model.depth.part mixer or both: processes would keep different numbers of tokens": (
            depth is not None and depth.get("part", "feed_forward") != "feed_forward"
        ),
        "model.feed_forward.drop: an expert's capacity is of whole rows": drop,
        "reasoning: adapters and memories read whole rows": reasoning is not None,
        "train.dpo: an answer's probability is of whole rows": dpo is not None,
    }
    return next((f"1 with {reason}" for reason, refused in reasons.items() if refused), None)


def _rollouts(processes: int, *steps: int) -> str | None:
    if processes > 1 and any(steps):
        return "1 where a phase of reasoning.phases makes rollouts: processes end theirs at different tokens"
    return None


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
    Rule(("train.expert_parallel", "model.feed_forward.experts", "model.feed_forward.kind"), _expert_parallel),
    Rule(
        (
            "train.expert_parallel",
            *(f"reasoning.phases.{name}.steps" for name in ("acceptance", "policy", "operations")),
        ),
        _rollouts,
    ),
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
    Rule(("train.sequence_parallel", "data.row_length"), _slices),
    Rule(("train.sequence_parallel", "model.mixer_layers", "model.feed_forward.kind"), _slices_of_plugins),
    Rule(
        ("train.sequence_parallel", "data.row_length", "model.mamba.conv_width", "model.mixer_layers"),
        _slices_of_convolution,
    ),
    Rule(
        (
            *("train.sequence_parallel", "model.attention.heads", "model.attention.kv_heads"),
            *("model.attention_fraction", "model.mixer_layers"),
        ),
        _slices_of_heads,
    ),
    Rule(
        (
            *("train.sequence_parallel", "model.prediction", "model.depth", "model.feed_forward.drop", "reasoning"),
            "train.dpo",
        ),
        _whole_rows,
    ),
    Rule(("train.compile", "model.depth.part"), _compile_depth),
    Rule(("train.weights", "train.precision", "train.zero_stage"), _weights),
    Rule(("train.offload", "train.zero_stage", "train.expert_parallel"), _offload),
    Rule(("train.offload_folder", "train.offload", "train.optimizer.kind"), _offload_folder),
    Rule(("train.dpo", "data.source", "data.domains"), _dpo),
)
