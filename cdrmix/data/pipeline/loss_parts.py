"""The parts of the loss in the last stages: of tokens, of documents with chains of thought, of rearranged documents."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cdrmix.config.schema_objectives import Cot, Objectives
from cdrmix.data.chains import ChainCounts
from cdrmix.data.objectives import COT, FIM, NEXT_TOKEN, EncodedDocument, chosen_number, rearranged_documents
from cdrmix.data.pipeline.storage import Array, column, read_table, whole
from cdrmix.data.shard_writer import SplitWriter
from cdrmix.data.tokenizer import TextTokenizer

ENCODE_BLOCK_DOCUMENTS = 1024

# Only with data.objectives.fim.characters.
CUTS = pa.field("cuts", pa.large_list(pa.int64()))  # numbers of the tokens that begin further documents; null: none
# Only with data.objectives.weights.
PART_COLUMNS = (
    pa.field("parts", pa.large_list(pa.uint8())),  # of the loss; null: all NEXT_TOKEN
    pa.field("chain_number", pa.float64()),  # of a training document with chains of thought: `chosen_number`
    pa.field("fim_ids", pa.large_list(pa.uint32())),  # of a held-out document, rearranged; null: it is not
    pa.field("fim_weights", pa.large_list(pa.float32())),  # null: all 1
    pa.field("fim_cuts", pa.large_list(pa.int64())),  # as CUTS
)


class Parted:
    """The columns PART_COLUMNS of a partition: items by number of the document."""

    def __init__(self, documents: int) -> None:
        self.parts: list[Array | None] = [None] * documents
        self._numbers: list[float | None] = [None] * documents
        self._rearranged: list[EncodedDocument | None] = [None] * documents

    def add_chain_numbers(self, table: pa.Table, training: Array, cot: Cot | None) -> None:
        """Sets the numbers of the training documents with chains of thought. training: bool [documents]."""
        hashes = table.column("hash")
        for number, parts in enumerate(self.parts):
            if cot is not None and training[number] and parts is not None and COT in parts:
                self._numbers[number] = chosen_number(cot.seed, hashes[number].as_py())

    def add_rearranged(
        self, table: pa.Table, rows: Array, domains: list[str], tokenizer: TextTokenizer, objectives: Objectives
    ) -> None:
        """Sets the rearranged tokens of these held-out documents, with the end of text."""
        for some in in_blocks(rows):
            found = rearranged_documents(*texts_of_rows(table, some, domains), tokenizer, objectives)
            for number, document in zip(some, found, strict=True):
                self._rearranged[number] = document and ended(document, tokenizer)

    def columns(self) -> dict[pa.Field, pa.Array]:
        """The columns in order."""
        values: tuple[list[Any], ...] = (
            self.parts,
            self._numbers,
            [document and document.ids for document in self._rearranged],
            [document and document.weights for document in self._rearranged],
            [document and document.cuts for document in self._rearranged],
        )
        return {field: pa.array(items, field.type) for field, items in zip(PART_COLUMNS, values, strict=True)}


def texts_of_rows(table: pa.Table, rows: list[int], domains: list[str]) -> tuple[list[str], list[bytes], list[str]]:
    """Texts, content hashes and names of the domains of rows of the table."""
    part = table.take(pa.array(rows))
    return part.column("text").to_pylist(), part.column("hash").to_pylist(), [domains[number] for number in rows]


def ended(document: EncodedDocument, tokenizer: TextTokenizer) -> EncodedDocument:
    """The document with an end-of-text of weight 1, which is in the part FIM at the end of rearranged text."""
    ids, weights, parts, cuts = document
    part = FIM if parts is not None and parts[-1] == FIM else NEXT_TOKEN
    return EncodedDocument(
        np.append(ids, np.uint32(tokenizer.end_of_text_id)),
        None if weights is None else np.append(weights, np.float32(1)),
        None if parts is None else np.append(parts, np.uint8(part)),
        cuts,
    )


def in_blocks(rows: Array) -> Iterator[list[int]]:
    """The numbers of rows in lists of at most ENCODE_BLOCK_DOCUMENTS, which bounds memory."""
    for start in range(0, len(rows), ENCODE_BLOCK_DOCUMENTS):
        yield rows[start : start + ENCODE_BLOCK_DOCUMENTS].tolist()


def chain_counts(path: Path) -> ChainCounts:
    """What choose_chains asks of a partition."""
    table = read_table(path).select(["ids", "parts", "held_out", "chain_number"])
    numbers = column(table, "chain_number")
    chosen = np.flatnonzero(~np.isnan(numbers))
    parts = whole(table.column("parts"))
    tokens = np.array([int((parts[number].values.to_numpy() == COT).sum()) for number in chosen.tolist()], np.int64)
    training = ~whole(table.column("held_out")).to_numpy(zero_copy_only=False)
    every = int(np.diff(whole(table.column("ids")).offsets.to_numpy())[training].sum())
    return ChainCounts(numbers[chosen], tokens, every - int(tokens.sum()))


def without_chains(table: pa.Table, below: float, tokenizer: TextTokenizer) -> pa.Table:
    """A partition without the chains of thought of the training documents whose number is not below `below`."""
    numbers = column(table, "chain_number")
    left_out = np.flatnonzero(numbers >= below).tolist()
    if not left_out:
        return table
    sizes = np.array(tokenizer.byte_lengths(), np.int64)
    columns: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in ("ids", "weights", "parts")}
    text_bytes = column(table, "bytes").copy()
    for number in left_out:
        parts = np.array(columns["parts"][number])
        of_text = parts != COT
        text_bytes[number] -= sizes[np.array(columns["ids"][number])[~of_text]].sum()
        for items in columns.values():
            if items[number] is not None:
                items[number] = np.array(items[number])[of_text]
    for name, items in columns.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.array(items, table.schema.field(at).type))
    return table.set_column(table.schema.get_field_index("bytes"), "bytes", pa.array(text_bytes))


def has_rearranged(path: Path) -> bool:
    """Whether a partition has rearranged held-out documents."""
    ids = read_table(path).column("fim_ids")
    return bool(ids.null_count < len(ids))


def add_rearranged(table: pa.Table, split: SplitWriter) -> None:
    """Appends the rearranged held-out documents of a partition."""
    owners = column(table, "domain")
    ids, weights, cuts = (whole(table.column(name)) for name in ("fim_ids", "fim_weights", "fim_cuts"))
    for number in range(len(table)):
        if ids[number].is_valid:
            of_document = ids[number].values.to_numpy()
            of_tokens = weights[number].values.to_numpy() if weights[number].is_valid else None
            parts = np.full(len(of_document), FIM, np.uint8)
            for stretch in stretches(cuts[number].values, len(of_document)):
                of_stretch = None if of_tokens is None else of_tokens[stretch]
                split.add(of_document[stretch], 0, domain=int(owners[number]), weights=of_stretch, parts=parts[stretch])


def stretches(cuts: pa.Array | None, tokens: int) -> list[slice]:
    """The tokens of each document that a long one was cut into. cuts: of CUTS."""
    borders = [0, *([] if cuts is None else cuts.to_pylist()), tokens]
    return [slice(start, stop) for start, stop in pairwise(borders)]
