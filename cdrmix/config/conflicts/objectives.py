"""Conflicts in data.objectives: fill in the middle, chains of thought, weights of parts."""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.conflicts.conflict import Conflict
from cdrmix.config.conflicts.data import domain_names
from cdrmix.config.schema_data import Data
from cdrmix.config.schema_objectives import Cot, Fim
from cdrmix.config.schema_run import Sections
from cdrmix.registry import nearest

WITH_FIELDS = ("csv", "huggingface", "jsonl", "parquet")  # kinds of sources whose records have fields


def conflicts(config: Sections) -> Iterator[Conflict]:
    section, prefix = config.data.objectives, "data.objectives"
    if section.fim is not None:
        yield from _fim(config.data, section.fim)
    if section.cot is not None:
        yield from _cot(config.data, section.cot)
    if section.weights is not None and config.train.dpo is not None:
        yield Conflict(f"{prefix}.weights", "null with train.dpo, which has no next tokens")
    if section.normalise == "sum_of_means" and section.weights is None:
        allowed = f"mean_of_tokens without {prefix}.weights: then the loss has no parts"
        yield Conflict(f"{prefix}.normalise", allowed)


def _fim(data: Data, fim: Fim) -> Iterator[Conflict]:
    known = domain_names(data)
    for index, name in enumerate(fim.domains or []):
        if name not in known:
            allowed = f"one of data.domains: {', '.join(known)}"
            yield Conflict("data.objectives.fim.domains", allowed, (index,), nearest(name, known))
            break
    end_of_text = data.tokenizer.end_of_text or "the token that ends a document"
    marks = [fim.prefix, fim.middle, fim.suffix, end_of_text]
    if len({*marks}) < len(marks):
        allowed = f"four different tokens, with data.tokenizer.end_of_text; they are {', '.join(marks)}"
        yield Conflict("data.objectives.fim.prefix", allowed)


def _cot(data: Data, cot: Cot) -> Iterator[Conflict]:
    section, prefix = data.objectives, "data.objectives"
    if section.weights is None:
        example = "Set it, for example to {next_token: 1, cot: 0.2}"
        yield Conflict(f"{prefix}.cot", f"null where {prefix}.weights is missing. {example}")
    if cot.begin == cot.end:
        yield Conflict(f"{prefix}.cot.begin", f"another text than {prefix}.cot.end")
    elif cot.begin in [span.begin for span in section.spans]:
        allowed = f"a text that begins none of {prefix}.spans: a token has one weight"
        yield Conflict(f"{prefix}.cot.begin", allowed)
    known, key = domain_names(data), f"{prefix}.cot.columns"
    for name, fields in cot.columns.items():
        if name not in known:
            yield Conflict(key, f"one of data.domains: {', '.join(known)}", (name,), nearest(name, known))
            return
        source = data.source if data.domains is None else data.domains[name].source
        kind = "stdlib" if source is None else source.kind
        if kind not in WITH_FIELDS:
            allowed = f"domains whose source is of kind {', '.join(WITH_FIELDS)}; this one is {kind}"
            yield Conflict(key, allowed, (name,))
            return
        names = [fields.question, fields.thought, fields.answer]
        if len({*names}) < len(names):
            yield Conflict(key, f"three different fields; they are {', '.join(names)}", (name,))
            return
