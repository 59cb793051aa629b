"""Chains of thought: texts from the fields of records, and the choice of the documents that keep their chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cdrmix.config import schema_data
from cdrmix.config.schema_objectives import Columns, Cot
from cdrmix.data.sources import make_source
from cdrmix.data.sources.base import BadRecord, Metadata, Source

Array = np.ndarray[Any, np.dtype[Any]]


def source_of(data: schema_data.Data, name: str) -> Source:
    """The source of a domain. Records become texts with chains of thought where data.objectives.cot.columns says so.

    Raises as `make_source`.
    """
    section = data.all_domains()[name].source
    cot = data.objectives.cot
    columns = None if cot is None else cot.columns.get(name)
    if cot is None or columns is None:
        return make_source(section, data.max_expansion)
    source = make_source(section.model_copy(update={"text_field": columns.question}), data.max_expansion)
    source.parse = partial(parse_columns, parse=source.parse, columns=columns, begin=cot.begin, end=cot.end)
    return source


def parse_columns(
    raw: Any, parse: Callable[[Any], tuple[str, Metadata]], columns: Columns, begin: str, end: str
) -> tuple[str, Metadata]:
    """The question, the chain of thought between its marks, and the answer of a record, in lines of their own.

    parse: of the source, with the question as the text. Raises BadRecord if the answer is no text, or if a field has a
    mark.
    """
    question, metadata = parse(raw)
    thought, answer = metadata.get(columns.thought) or "", metadata.get(columns.answer)
    for name, value in ((columns.question, question), (columns.thought, thought), (columns.answer, answer)):
        if not isinstance(value, str):
            raise BadRecord(f"has no field {name!r}" if value is None else f"field {name!r} is not a string")
        if begin in value or end in value:
            raise BadRecord(f"field {name!r} has a mark of data.objectives.cot, {begin!r} or {end!r}")
    left = {name: value for name, value in metadata.items() if name not in (columns.thought, columns.answer)}
    chain = f"{begin}{thought}{end}\n" if thought.strip() else ""
    return f"{question}\n{chain}{answer}", left


class ChainCounts(NamedTuple):
    """What a partition has: of each training document with chains its number of `chosen_number` and its tokens in them,
    and the training tokens that are in no chain."""

    numbers: Array  # float64 [documents]
    tokens: Array  # int64 [documents]
    others: int


@dataclass(frozen=True)
class ChainChoice:
    """Which documents keep their chains of thought: those whose number is below `below`.

    documents, tokens: with chains, and in them. kept_documents, kept_tokens: of those that keep them. share: of the
    training tokens that are in chains.
    """

    below: float
    documents: int
    tokens: int
    kept_documents: int
    kept_tokens: int
    share: float

    def __str__(self) -> str:
        return (
            f"Chains of thought: {self.kept_documents:,} of {self.documents:,} training documents keep theirs, "
            f"{self.kept_tokens:,} tokens, {self.share:.1%} of the training tokens"
        )

    def as_json(self) -> dict[str, Any]:
        """The counts for the report of the shards."""
        return {name: value for name, value in vars(self).items() if name != "below"}


def choose_chains(counts: Iterable[ChainCounts], cot: Cot) -> ChainChoice:
    """The largest choice by number with cot.rate and cot.max_share. Documents of one number are chosen together."""
    every = [*counts]
    numbers = np.concatenate([np.zeros(0), *(each.numbers for each in every)])
    tokens = np.concatenate([np.zeros(0, np.int64), *(each.tokens for each in every)])
    others = sum(each.others for each in every)
    distinct, which = np.unique(numbers, return_inverse=True)
    totals = np.cumsum(np.bincount(which, tokens, len(distinct))).astype(np.int64)  # exact: below 2^53
    fits = (totals * (1 - cot.max_share) <= cot.max_share * others) & (distinct < cot.rate)
    count = int(np.argmin(fits)) if not fits.all() else len(fits)
    below = float(distinct[count]) if count < len(distinct) else 1.0
    kept = int(totals[count - 1]) if count else 0
    return ChainChoice(
        below=below,
        documents=len(numbers),
        tokens=int(tokens.sum()),
        kept_documents=int((numbers < below).sum()),
        kept_tokens=kept,
        share=kept / (kept + others) if kept else 0.0,
    )
