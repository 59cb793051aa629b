"""Combinations of keys that cannot work, though each key by itself is allowed.

A rule reads the keys that it names and is skipped where one of them is unknown (missing, or
already refused by itself), so that the rules can be asked about a configuration that is broken
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """`check`, given the values of `keys`, says what is allowed for the first key, or None when all is well."""

    keys: tuple[str, ...]
    check: Callable[..., str | None]


class Conflict(NamedTuple):
    """The rule that failed, by its keys, the first one's value, and what is allowed for it."""

    keys: tuple[str, ...]
    value: Any
    allowed: str


def conflicts(values: Mapping[str, Any]) -> list[Conflict]:
    """Every combination that cannot work among `values` (dotted key to value, defaults included)."""
    failed = []
    for keys, check in RULES:
        if all(key in values for key in keys):
            inputs = [values[key] for key in keys]
            message = check(*inputs)
            if message:
                failed.append(Conflict(keys, inputs[0], message))
    return failed


def _heads(heads: int, width: int, fraction: float) -> str | None:
    return f"must divide model.d_model={width}" if fraction > 0 and width % heads else None


def _rope(rope: bool, width: int, heads: int, fraction: float) -> str | None:
    odd = fraction > 0 and width % heads == 0 and width // heads % 2 == 1
    return (
        f"false, or an even head width; model.d_model/model.attention.heads is {width // heads}"
        if rope and odd
        else None
    )


def _kv_heads(kv_heads: int, heads: int, fraction: float) -> str | None:
    return f"must divide model.attention.heads={heads}" if fraction > 0 and heads % kv_heads else None


def _head_size(head_size: int, width: int, fraction: float) -> str | None:
    return f"must divide model.d_model={width}" if fraction < 1 and width % head_size else None


def _top_k(top_k: int, experts: int, kind: str) -> str | None:
    return f"at most model.feed_forward.experts={experts}" if kind == "moe" and top_k > experts else None


def _activation(activation: str, kind: str) -> str | None:
    return "relu2, for model.feed_forward.kind=channel_mix" if kind == "channel_mix" and activation != "relu2" else None


def _batch_rows(rows: int, micro: int) -> str | None:
    return f"a multiple of train.micro_batch_rows={micro}" if rows % micro else None


def _expert_parallel(processes: int, experts: int, kind: str) -> str | None:
    if kind != "moe":
        return None if processes == 1 else f"1 for model.feed_forward.kind={kind}, which has no experts to share out"
    return f"must divide model.feed_forward.experts={experts}" if experts % processes else None


def _warmup_steps(warmup: int, steps: int) -> str | None:
    return f"below train.steps={steps}" if warmup >= steps else None


def _vocab_size(vocabulary: int, tokenizer: str | None) -> str | None:
    if tokenizer is None and vocabulary < 257:
        return "at least 257 for a tokenizer trained on the corpus: 256 bytes and the end-of-text token"
    return None


def _precision(precision: str, device: str) -> str | None:
    return "bf16 or fp32 with run.device=cpu; fp16 needs a GPU" if precision == "fp16" and device == "cpu" else None


RULES = (
    Rule(("model.attention.heads", "model.d_model", "model.attention_fraction"), _heads),
    Rule(("model.attention.rope", "model.d_model", "model.attention.heads", "model.attention_fraction"), _rope),
    Rule(("model.attention.kv_heads", "model.attention.heads", "model.attention_fraction"), _kv_heads),
    Rule(("model.rwkv.head_size", "model.d_model", "model.attention_fraction"), _head_size),
    Rule(("model.feed_forward.top_k", "model.feed_forward.experts", "model.feed_forward.kind"), _top_k),
    Rule(("model.feed_forward.activation", "model.feed_forward.kind"), _activation),
    Rule(("train.batch_rows", "train.micro_batch_rows"), _batch_rows),
    Rule(("train.expert_parallel", "model.feed_forward.experts", "model.feed_forward.kind"), _expert_parallel),
    Rule(("train.warmup_steps", "train.steps"), _warmup_steps),
    Rule(("model.vocab_size", "data.tokenizer.path"), _vocab_size),
    Rule(("train.precision", "run.device"), _precision),
)
