"""Rules about data.objectives, the order of the rows, and what a tokenizer has for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cdrmix.config.rule import Rule, Violation
from cdrmix.config.validators_data import domain_names
from cdrmix.registry import nearest

WITH_FIELDS = ("csv", "huggingface", "jsonl", "parquet")  # kinds of sources whose records have fields


def _fim_domains(chosen: list[str] | None, domains: Mapping[str, Any] | None) -> Violation | None:
    known = domain_names(domains)
    for index, name in enumerate(chosen or []):
        if name not in known:
            return Violation((index,), f"one of data.domains: {', '.join(known)}", nearest(name, known))
    return None


def _marks(prefix: str, middle: str, suffix: str, end_of_text: str | None) -> str | None:
    marks = [prefix, middle, suffix, end_of_text or "the token that ends a document"]
    if len(set(marks)) < len(marks):
        return f"four different tokens, with data.tokenizer.end_of_text; they are {', '.join(marks)}"
    return None


def _cot(cot: object, weights: object) -> str | None:
    if cot is not None and weights is None:
        return "null where data.objectives.weights is missing. Set it, for example to {next_token: 1, cot: 0.2}"
    return None


def _cot_begin(begin: str, end: str, spans: list[Mapping[str, Any]]) -> str | None:
    if begin == end:
        return "another text than data.objectives.cot.end"
    if begin in [span.get("begin") for span in spans]:
        return "a text that begins none of data.objectives.spans: a token has one weight"
    return None


def _cot_columns(
    columns: Mapping[str, Mapping[str, Any]], domains: Mapping[str, Any] | None, source: Mapping[str, Any] | None
) -> Violation | None:
    known = domain_names(domains)
    for name, fields in columns.items():
        if name not in known:
            return Violation((name,), f"one of data.domains: {', '.join(known)}", nearest(name, known))
        owner = (domains or {}).get(name, {}).get("source") if domains is not None else source
        kind = (owner or {}).get("kind", "stdlib")
        if kind not in WITH_FIELDS:
            return Violation((name,), f"domains whose source is of kind {', '.join(WITH_FIELDS)}; this one is {kind}")
        names = [fields.get(each, each) for each in ("question", "thought", "answer")]
        if len(set(names)) < len(names):
            return Violation((name,), f"three different fields; they are {', '.join(names)}")
    return None


def _weights(weights: object, dpo: object) -> str | None:
    return "null with train.dpo, which has no next tokens" if weights is not None and dpo is not None else None


def _normalise(normalise: str, weights: object) -> str | None:
    if normalise == "sum_of_means" and weights is None:
        return "mean_of_tokens without data.objectives.weights: then the loss has no parts"
    return None


def _order(order: str, curriculum: list[Any], mixture: str | None) -> str | None:
    if order == "sequential" and (curriculum or mixture is not None):
        return "shuffled with data.curriculum or data.mixture, which draw rows at random"
    return None


def _of_trained(neutral: object, value: object, path: str | None) -> str | None:
    shown = "null" if neutral is None else str(neutral)
    return (
        f"{shown} for the tokenizer at data.tokenizer.path, which is not trained here"
        if (path is not None and value != neutral)
        else None
    )


def _normalization(normalization: str, lossless: bool, path: str | None) -> str | None:
    if normalization != "none" and lossless and path is None:
        return "none, or data.tokenizer.lossless: false, because it changes text"
    return None


def _add_tokens(tokens: list[str], kind: str, end_of_text: str | None) -> Violation | str | None:
    if tokens and kind != "cdrmix":
        return f"[] for model.kind={kind}; model.vocab.add_tokens adds the tokens and their vectors"
    for index, token in enumerate(tokens):
        if token == end_of_text or token in tokens[:index]:
            return Violation((index,), "a token that is neither data.tokenizer.end_of_text nor listed before")
    return None


RULES = (
    Rule(("data.objectives.fim.domains", "data.domains"), _fim_domains),
    Rule(
        (*(f"data.objectives.fim.{mark}" for mark in ("prefix", "middle", "suffix")), "data.tokenizer.end_of_text"),
        _marks,
    ),
    Rule(("data.objectives.cot", "data.objectives.weights"), _cot),
    Rule(("data.objectives.cot.begin", "data.objectives.cot.end", "data.objectives.spans"), _cot_begin),
    Rule(("data.objectives.cot.columns", "data.domains", "data.source"), _cot_columns),
    Rule(("data.objectives.weights", "train.dpo"), _weights),
    Rule(("data.objectives.normalise", "data.objectives.weights"), _normalise),
    Rule(("data.order", "data.curriculum", "data.mixture"), _order),
    Rule(("data.tokenizer.min_frequency", "data.tokenizer.path"), partial(_of_trained, 1)),
    Rule(("data.tokenizer.max_token_length", "data.tokenizer.path"), partial(_of_trained, None)),
    Rule(("data.tokenizer.normalization", "data.tokenizer.path"), partial(_of_trained, "none")),
    Rule(("data.tokenizer.normalization", "data.tokenizer.lossless", "data.tokenizer.path"), _normalization),
    Rule(("data.tokenizer.add_tokens", "model.kind", "data.tokenizer.end_of_text"), _add_tokens),
)
