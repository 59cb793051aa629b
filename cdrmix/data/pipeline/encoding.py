"""The last stages: from the kept documents to tokens, partition by partition, and to shards."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from cdrmix.config.schema_objectives import Objectives
from cdrmix.data import shards
from cdrmix.data.chains import ChainChoice, choose_chains
from cdrmix.data.chat.encoding import ChatEncoder, Encoded
from cdrmix.data.chat.rendering import Rendered
from cdrmix.data.dedup.minhash import FingerprintFile, count_contaminated, simhash
from cdrmix.data.objectives import EncodedDocument, encode_documents, pieces
from cdrmix.data.pipeline.duplicates import Survivors
from cdrmix.data.pipeline.loss_parts import (
    CUTS,
    Parted,
    add_rearranged,
    chain_counts,
    ended,
    has_rearranged,
    in_blocks,
    stretches,
    texts_of_rows,
    without_chains,
)
from cdrmix.data.pipeline.merging import Documents, count_filtered
from cdrmix.data.pipeline.stats import PipelineStats
from cdrmix.data.pipeline.storage import Array, column, read_table, texts_of, whole, write_table
from cdrmix.data.shard_writer import SplitWriter
from cdrmix.data.tokenizer import TextTokenizer

HASH_RANGE = 2**64
LONGER_THAN_ROW = "longer_than_row"  # the rule, in the report, that filters conversations that no row can hold

TOKENS = pa.schema(
    {
        "ids": pa.large_list(pa.uint32()),  # the last is the end of text
        "weights": pa.large_list(pa.float32()),  # null: all 1
        "held_out": pa.bool_(),
        "domain": pa.uint16(),
        "bytes": pa.int64(),  # of the text, UTF-8
        "fingerprint": pa.uint64(),  # SimHash
        "row": pa.int64(),  # in the merged partition
        "second": pa.int64(),  # number of the token that begins the second of two documents; 0: there is one
    }
)
# Only for a tokenizer that changes text: the bytes of the text that each token stands for; null for training text.
TOKEN_BYTES = pa.field("token_bytes", pa.large_list(pa.uint32()))


def training_texts(survivors: Survivors, threshold: int) -> Iterator[str]:
    """The training texts in order. Of a conversation, the pieces between its special tokens."""
    for partition in range(len(survivors)):
        table = survivors.table(partition, ["text", "split_hash", "marks"])
        kept = table.filter(pa.array(column(table, "split_hash") >= np.uint64(threshold)))
        for batch in kept.to_batches(max_chunksize=256):
            for text, marks in zip(*(batch.column(name).to_pylist() for name in ("text", "marks")), strict=True):
                yield from Rendered.from_marks(text, marks).plain() if marks else [text]


def held_out_threshold(survivors: Survivors, fraction: float) -> tuple[int, int]:
    """(threshold, number of documents): documents with a `split_hash` below the threshold are held out.

    The threshold is `fraction` of the hash range. In a small corpus, one split could be empty; then the threshold is
    moved just far enough that each split has a text. It is 0 if there are not two different texts.
    """
    threshold = int(fraction * HASH_RANGE)
    lowest, highest, count = HASH_RANGE, -1, 0
    for partition in range(len(survivors)):
        sides = column(survivors.table(partition, ["split_hash"]), "split_hash")
        if len(sides):
            lowest, highest, count = min(lowest, int(sides.min())), max(highest, int(sides.max())), count + len(sides)
        if lowest < threshold <= highest:
            return threshold, count
    if lowest >= highest:
        return 0, count
    return (lowest + 1 if lowest >= threshold else highest), count


@dataclass(frozen=True)
class Encode:
    """A task: tokenise the kept documents of a partition to `path`."""

    path: Path
    survivors: Survivors
    partition: int
    threshold: int
    tokenizer: Path
    end_of_text: str
    lossless: bool
    objectives: Objectives
    domains: tuple[str, ...]
    row_length: int


def encode(task: Encode) -> dict[str, Any]:
    """Writes the tokens of a partition. Conversations that are longer than a row are left out and counted.

    A cut conversation would have answers without their question.
    """
    rows = task.survivors.rows(task.partition)
    columns = ["hash", "text", "domain", "split_hash", "where", "marks"]
    table = task.survivors.table(task.partition, columns).combine_chunks()
    tokenizer = _tokenizer(task.tokenizer, task.end_of_text, task.lossless)
    packed = texts_of(table)
    sizes = np.diff(packed.offsets)
    domains = column(table, "domain")
    held_out = column(table, "split_hash") < np.uint64(task.threshold)
    ids: list[Array] = [np.zeros(0, np.uint32)] * len(table)
    weights: list[Array | None] = [None] * len(table)
    second = np.zeros(len(table), np.int64)
    cuts: list[tuple[int, ...] | None] = [None] * len(table)
    is_text = np.array([not marks for marks in table.column("marks").to_pylist()], bool)
    names = [task.domains[number] for number in domains]
    parted = Parted(len(table)) if task.objectives.weights is not None else None
    # Held-out text is not rearranged, because it measures how well text is predicted. Its chains of thought are a part.
    as_it_is = Objectives(cot=task.objectives.cot)
    for side, objectives in ((~held_out, task.objectives), (held_out, as_it_is)):
        for number, document in _encoded_texts(table, np.flatnonzero(side & is_text), names, tokenizer, objectives):
            ids[number], weights[number] = document.ids, document.weights
            cuts[number] = document.cuts or None
            if parted is not None:
                parted.parts[number] = document.parts
    if parted is not None:
        parted.add_chain_numbers(table, ~held_out, task.objectives.cot)
        parted.add_rearranged(table, np.flatnonzero(held_out & is_text), names, tokenizer, task.objectives)
    token_bytes: list[Array | None] = [None] * len(table)
    if not tokenizer.lossless:
        _add_token_bytes(token_bytes, table, np.flatnonzero(held_out & is_text), sizes, tokenizer, as_it_is)
    for number, (chat, cut) in _encoded_chats(table, np.flatnonzero(~is_text), tokenizer):
        ids[number], weights[number], second[number] = chat.ids, chat.weights, cut
        if held_out[number]:
            token_bytes[number] = chat.token_bytes
    too_long = ~is_text & (np.array([len(each) for each in ids]) > task.row_length)
    stats = PipelineStats()
    count_filtered(stats, LONGER_THAN_ROW, table, np.flatnonzero(too_long))
    more: dict[pa.Field, pa.Array] = {} if parted is None else parted.columns()
    if any(cuts):
        more[CUTS] = pa.array(cuts, CUTS.type)
    if not tokenizer.lossless:
        more[TOKEN_BYTES] = pa.array(token_bytes, TOKEN_BYTES.type)
    tokens = pa.table(
        {
            "ids": _lists(ids, pa.uint32()),
            "weights": pa.array(weights, pa.large_list(pa.float32())),
            "held_out": pa.array(held_out),
            "domain": pa.array(domains),
            "bytes": pa.array(sizes.astype(np.int64)),
            "fingerprint": pa.array(simhash(packed, threads=1)),
            "row": pa.array(rows),
            "second": pa.array(second),
            **{field.name: values for field, values in more.items()},
        },
        schema=pa.schema([*TOKENS, *more]),
    )
    write_table(task.path, tokens.filter(pa.array(~too_long)), {})
    left = [int((side & ~too_long).sum()) for side in (~held_out, held_out)]
    return {"bytes": int(sizes.sum()), "stats": stats.as_json(), "left": left}


def _encoded_texts(
    table: pa.Table, rows: Array, domains: list[str], tokenizer: TextTokenizer, objectives: Objectives
) -> Iterator[tuple[int, EncodedDocument]]:
    """The number of each of these rows of the table, with its tokens, the end-of-text at the end."""
    for some in in_blocks(rows):
        encoded = encode_documents(*texts_of_rows(table, some, domains), tokenizer, objectives)
        for number, document in zip(some, encoded, strict=True):
            yield number, ended(document, tokenizer)


def _encoded_chats(table: pa.Table, rows: Array, tokenizer: TextTokenizer) -> Iterator[tuple[int, tuple[Encoded, int]]]:
    """The number of each of these rows of the table, with its tokens and `second` of TOKENS.

    A row has a conversation, or both conversations of a pair.
    """
    for some in in_blocks(rows):
        texts = [Rendered.from_marks(*(table[name][number].as_py() for name in ("text", "marks"))) for number in some]
        documents = iter(_chat_encoder(tokenizer).encode([document for text in texts for document in text.documents()]))
        for number, text in zip(some, texts, strict=True):
            first = next(documents)
            if text.second:
                pair = zip(first, next(documents), strict=True)
                yield number, (Encoded(*(np.concatenate(each) for each in pair)), len(first.ids))
            else:
                yield number, (first, 0)


@lru_cache(maxsize=1)
def _chat_encoder(tokenizer: TextTokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer)


def _add_token_bytes(
    counts: list[Array | None],
    table: pa.Table,
    rows: Array,
    sizes: Array,
    tokenizer: TextTokenizer,
    objectives: Objectives,
) -> None:
    """Sets the items `rows` to uint32 [tokens] of these texts. The end-of-text has the bytes that are left.

    objectives: those that the texts were tokenised with, without fill in the middle.
    """
    for some in in_blocks(rows):
        texts = table.column("text").take(pa.array(some)).to_pylist()
        of_texts = [pieces(text, objectives) for text in texts]
        every = [piece for of_text in of_texts for piece in of_text]
        encoded = tokenizer.encode_with_bytes([piece.text for piece in every], [piece.continues for piece in every])
        of_pieces = iter(of_tokens for _, of_tokens in encoded)
        for number, of_text in zip(some, of_texts, strict=True):
            of_tokens = np.concatenate([next(of_pieces) for _ in of_text])
            left = int(sizes[number]) - int(of_tokens.sum())
            counts[number] = np.append(of_tokens, np.uint32(left))


def _lists(arrays: list[Array], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values, kind))


@lru_cache(maxsize=1)
def _tokenizer(path: Path, end_of_text: str, lossless: bool) -> TextTokenizer:
    return TextTokenizer.load(path, end_of_text, begin_of_text=None, lossless=lossless)


@dataclass(frozen=True)
class Assembled:
    """The finished shards: index entries of the splits and the files, and counts for the report.

    chains: the choice of chains of thought; None without data.objectives.cot.
    """

    splits: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]
    dtype: str
    near_duplicates: int
    tokens_by_domain: dict[str, int]
    chains: ChainChoice | None


def assemble(
    folder: Path,
    parts: list[Path],
    documents: Documents,
    domains: list[str],
    *,
    vocab_size: int,
    shard_tokens: int,
    row_length: int,
    length_classes: list[int],
    weights: bool,
    pairs: bool,
    objectives: Objectives,
    tokenizer: TextTokenizer,
) -> Assembled:
    """Writes the splits to `folder`, in the order of the partitions.

    It also writes report/documents.parquet: the origin of each document. parts: the files of `encode`, one per
    partition.
    """
    sources: Counter[str] = Counter()
    (folder / "report").mkdir()
    chains = None if objectives.cot is None else choose_chains(map(chain_counts, parts), objectives.cot)
    parted = objectives.weights is not None
    names = (*shards.SPLITS, shards.REARRANGED) if parted and any(map(has_rearranged, parts)) else shards.SPLITS
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                SplitWriter(
                    folder,
                    name,
                    vocab_size=vocab_size,
                    shard_tokens=shard_tokens,
                    row_length=row_length,
                    domains=domains,
                    length_classes=length_classes,
                    weights=weights or parted,
                    first_id=None if tokenizer.begin_of_text is None else tokenizer.first_id,
                    original=name == "valid" and not tokenizer.lossless,
                    pairs=pairs,
                )
            )
            for name in names
        }
        train, valid = (writers[name] for name in shards.SPLITS)
        # files without a name: they are deleted when the process ends, even if it is killed
        train_fingerprints, valid_fingerprints = (
            FingerprintFile(stack.enter_context(tempfile.TemporaryFile(dir=folder))) for _ in shards.SPLITS
        )
        provenance = stack.enter_context(
            pyarrow.parquet.ParquetWriter(folder / "report" / "documents.parquet", PROVENANCE, compression="zstd")
        )
        for path, merged in zip(parts, documents.paths, strict=True):
            table = read_table(path)
            if chains is not None:
                table = without_chains(table, chains.below, tokenizer)
            held_out = whole(table.column("held_out")).to_numpy(zero_copy_only=False)
            fingerprints = column(table, "fingerprint")
            train_fingerprints.add(fingerprints[~held_out])
            valid_fingerprints.add(fingerprints[held_out])
            originals = {} if tokenizer.lossless else _originals(table, merged, held_out)
            _add_documents(table, [valid if held else train for held in held_out], originals)
            if shards.REARRANGED in writers:
                add_rearranged(table, writers[shards.REARRANGED])
            _write_provenance(provenance, table, merged, domains, sources)
        splits = {name: writer.close() for name, writer in writers.items()}
        near_duplicates = count_contaminated(valid_fingerprints, train_fingerprints)
    files = {name: entry for writer in writers.values() for name, entry in writer.files.items()}
    return Assembled(splits, files, train.dtype, near_duplicates, dict(sources), chains)


def _add_documents(table: pa.Table, splits: list[SplitWriter], originals: dict[int, tuple[Array, bytes]]) -> None:
    """Appends each document of a partition to its split. originals: as of `_originals`."""
    ids = whole(table.column("ids"))
    flat, offsets = ids.values.to_numpy(), ids.offsets.to_numpy()
    weights = whole(table.column("weights"))
    parts = whole(table.column("parts")) if "parts" in table.column_names else None
    sizes, owners, seconds = (column(table, name) for name in ("bytes", "domain", "second"))
    cuts = whole(table.column(CUTS.name)) if CUTS.name in table.column_names else None
    for number, split in enumerate(splits):
        some = weights[number].values if weights.null_count < len(table) else None
        of_parts = None if parts is None else parts[number].values
        tokens = flat[offsets[number] : offsets[number + 1]]
        of_tokens = [None if each is None else each.to_numpy() for each in (some, of_parts)]
        for stretch in stretches(None if cuts is None else cuts[number].values, len(tokens)):
            split.add(
                tokens[stretch],
                int(sizes[number]) if stretch.start == 0 else 0,
                domain=int(owners[number]),
                weights=None if of_tokens[0] is None else of_tokens[0][stretch],
                parts=None if of_tokens[1] is None else of_tokens[1][stretch],
                original=originals.get(number),
                second=int(seconds[number]),
            )


def _originals(tokens: pa.Table, merged: Path, held_out: Array) -> dict[int, tuple[Array, bytes]]:
    """Of each held-out document of a partition, by number: the bytes of each token, and the text.

    Of a conversation the text has no special tokens.
    """
    table = read_table(merged).select(["text", "marks"]).take(tokens.column("row"))
    counts = whole(tokens.column(TOKEN_BYTES.name))
    found = {}
    for number in np.flatnonzero(held_out).tolist():
        text, marks = (table[name][number].as_py() for name in ("text", "marks"))
        text = "".join(Rendered.from_marks(text, marks).plain()) if marks else text
        found[number] = (counts[number].values.to_numpy(), text.encode("utf-8"))
    return found


PROVENANCE = pa.schema(
    {
        "split": pa.string(),
        "domain": pa.string(),
        "hash": pa.binary(16),
        "where": pa.large_string(),
        "language": pa.large_string(),
        "tokens": pa.int64(),
        "bytes": pa.int64(),
        "meta": pa.large_string(),
    }
)


def _write_provenance(
    writer: pyarrow.parquet.ParquetWriter,
    tokens: pa.Table,
    merged: Path,
    domains: list[str],
    sources: Counter[str],
) -> None:
    counts = np.diff(whole(tokens.column("ids")).offsets.to_numpy())
    names = ["hash", "where", "language", "meta"]
    origin = read_table(merged).select(names).take(tokens.column("row"))
    held_out = tokens.column("held_out").to_pylist()
    owners = [domains[number] for number in tokens.column("domain").to_pylist()]
    table = pa.table(
        {
            "split": pa.array(["valid" if held else "train" for held in held_out], pa.string()),
            "domain": pa.array(owners, pa.string()),
            "tokens": pa.array(counts.astype(np.int64)),
            "bytes": tokens.column("bytes"),
            **{name: origin.column(name) for name in names},
        }
    )
    if len(table):
        writer.write_table(table.select(PROVENANCE.names).cast(PROVENANCE))
    for owner, count in zip(owners, counts.tolist(), strict=True):
        sources[owner] += count
