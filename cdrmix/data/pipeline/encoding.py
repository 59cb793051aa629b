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

from cdrmix.config.schema_data import Objectives
from cdrmix.data import shards
from cdrmix.data.dedup.minhash import FingerprintFile, count_contaminated, simhash
from cdrmix.data.objectives import encode_documents
from cdrmix.data.pipeline.duplicates import Survivors
from cdrmix.data.pipeline.merging import Documents
from cdrmix.data.pipeline.storage import Array, column, read_table, texts_of, whole, write_table
from cdrmix.data.shards import SplitWriter
from cdrmix.data.tokenizer import TextTokenizer

HASH_RANGE = 2**64
ENCODE_BLOCK_DOCUMENTS = 1024

TOKENS = pa.schema(
    {
        "ids": pa.large_list(pa.uint32()),  # the last is the end of text
        "weights": pa.large_list(pa.float32()),  # null: all 1
        "held_out": pa.bool_(),
        "domain": pa.uint16(),
        "bytes": pa.int64(),  # of the text, UTF-8
        "fingerprint": pa.uint64(),  # SimHash
        "row": pa.int64(),  # in the merged partition
    }
)


def training_texts(survivors: Survivors, threshold: int) -> Iterator[str]:
    """The training texts in order."""
    for partition in range(len(survivors)):
        table = survivors.table(partition, ["text", "split_hash"])
        kept = table.filter(pa.array(column(table, "split_hash") >= np.uint64(threshold)))
        for batch in kept.to_batches(max_chunksize=256):
            yield from batch.column("text").to_pylist()


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
    objectives: Objectives
    domains: tuple[str, ...]


def encode(task: Encode) -> dict[str, Any]:
    """Writes the tokens of a partition."""
    rows = task.survivors.rows(task.partition)
    table = task.survivors.table(task.partition, ["hash", "text", "domain", "split_hash"]).combine_chunks()
    tokenizer = _tokenizer(task.tokenizer, task.end_of_text)
    packed = texts_of(table)
    sizes = np.diff(packed.offsets)
    domains = column(table, "domain")
    held_out = column(table, "split_hash") < np.uint64(task.threshold)
    ids: list[Array] = [np.zeros(0, np.uint32)] * len(table)
    weights: list[Array | None] = [None] * len(table)
    # held-out text is not rearranged, because it measures how well text is predicted
    for rows_of_side, objectives in ((~held_out, task.objectives), (held_out, Objectives())):
        chosen = np.flatnonzero(rows_of_side)
        for some in np.array_split(chosen, -(-len(chosen) // ENCODE_BLOCK_DOCUMENTS) or 1):
            part = table.take(pa.array(some))
            encoded = encode_documents(
                part.column("text").to_pylist(),
                part.column("hash").to_pylist(),
                [task.domains[number] for number in domains[some]],
                tokenizer,
                objectives,
                objectives.fim.seed if objectives.fim else 0,
            )
            for number, (document_ids, document_weights) in zip(some, encoded, strict=True):
                ids[number] = np.append(document_ids, np.uint32(tokenizer.end_of_text_id))
                if document_weights is not None:
                    weights[number] = np.append(document_weights, np.float32(1))
    tokens = pa.table(
        {
            "ids": _lists(ids, pa.uint32()),
            "weights": pa.array(weights, pa.large_list(pa.float32())),
            "held_out": pa.array(held_out),
            "domain": pa.array(domains),
            "bytes": pa.array(sizes.astype(np.int64)),
            "fingerprint": pa.array(simhash(packed, threads=1)),
            "row": pa.array(rows),
        },
        schema=TOKENS,
    )
    write_table(task.path, tokens, {})
    return {"bytes": int(sizes.sum())}


def _lists(arrays: list[Array], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values, kind))


@lru_cache(maxsize=1)
def _tokenizer(path: Path, end_of_text: str) -> TextTokenizer:
    return TextTokenizer.load(path, end_of_text)


@dataclass(frozen=True)
class Assembled:
    """The finished shards: index entries of the splits and the files, and counts for the report."""

    splits: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]
    dtype: str
    near_duplicates: int
    tokens_by_domain: dict[str, int]


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
) -> Assembled:
    """Writes both splits to `folder`, in the order of the partitions.

    It also writes report/documents.parquet: the origin of each document. parts: the files of `encode`, one per
    partition.
    """
    sources: Counter[str] = Counter()
    (folder / "report").mkdir()
    with ExitStack() as stack:
        train, valid = (
            stack.enter_context(
                SplitWriter(
                    folder,
                    name,
                    vocab_size=vocab_size,
                    shard_tokens=shard_tokens,
                    row_length=row_length,
                    domains=domains,
                    length_classes=length_classes,
                    weights=weights,
                )
            )
            for name in shards.SPLITS
        )
        # files without a name: they are deleted when the process ends, even if it is killed
        train_fingerprints, valid_fingerprints = (
            FingerprintFile(stack.enter_context(tempfile.TemporaryFile(dir=folder))) for _ in shards.SPLITS
        )
        provenance = stack.enter_context(
            pyarrow.parquet.ParquetWriter(folder / "report" / "documents.parquet", PROVENANCE, compression="zstd")
        )
        for path, merged in zip(parts, documents.paths, strict=True):
            table = read_table(path)
            held_out = whole(table.column("held_out")).to_numpy(zero_copy_only=False)
            fingerprints = column(table, "fingerprint")
            train_fingerprints.add(fingerprints[~held_out])
            valid_fingerprints.add(fingerprints[held_out])
            ids = whole(table.column("ids"))
            flat, offsets = ids.values.to_numpy(), ids.offsets.to_numpy()
            document_weights = whole(table.column("weights"))
            sizes, owners = column(table, "bytes"), column(table, "domain")
            for number in range(len(table)):
                some = document_weights[number].values if document_weights.null_count < len(table) else None
                (valid if held_out[number] else train).add(
                    flat[offsets[number] : offsets[number + 1]],
                    int(sizes[number]),
                    domain=int(owners[number]),
                    weights=None if some is None else some.to_numpy(),
                )
            _write_provenance(provenance, table, merged, domains, np.diff(offsets), sources)
        splits = {split.name: split.close() for split in (train, valid)}
        near_duplicates = count_contaminated(valid_fingerprints, train_fingerprints)
    return Assembled(splits, {**train.files, **valid.files}, train.dtype, near_duplicates, dict(sources))


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
    counts: Array,
    sources: Counter[str],
) -> None:
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
