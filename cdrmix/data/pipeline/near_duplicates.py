"""Near-duplicates in external memory: signatures, bands, candidate pairs, verification, clusters, survivors.

Two documents are candidates if a band of their MinHash signatures is equal. A pair is verified first by the estimated
and then by the exact Jaccard similarity of its shingles. Verified pairs are joined to clusters. Of each cluster, the
document of the highest quality is kept, then of the highest priority, then of the smallest content hash.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.config.schema_data import Dedup
from cdrmix.data.dedup import minhash as dedup
from cdrmix.data.pipeline.merging import Documents
from cdrmix.data.pipeline.stages import StageRunner
from cdrmix.data.pipeline.stats import EXCERPT_CHARACTERS, Filtered, PipelineStats, Sample, excerpt
from cdrmix.data.pipeline.storage import (
    Array,
    column,
    key_ranges,
    read_array,
    read_range,
    read_table,
    texts_of,
    write_array,
    write_run,
)
from cdrmix.data.pipeline.url_duplicates import NUMBER, filtered_rows

BAND = np.dtype([("hash", "<u8"), ("number", "<i8")])
# Sorted by the greater number: in a crowded bucket many pairs have the same smaller number, so one range would have
# all.
PAIR = np.dtype([("b", "<i8"), ("a", "<i8")])
EMPTY = np.uint32(2**32 - 1)
PAIR_BLOCK = 4096
# In a bucket with more documents, each is compared with the first 32 and a few neighbours only: documents that are
# equal in one band are usually equal in other bands too.
CROWDED_BUCKET = 32
# A pair is compared exactly if its estimated similarity is at most 4 standard deviations below the threshold.
MARGIN_DEVIATIONS = 4


@dataclass(frozen=True)
class Sign:
    """A task: signatures and band entries of a partition."""

    signatures: Path
    bands: Path
    table: Path
    span: tuple[int, int]
    filtered: tuple[Path, ...]
    section: Dedup


@dataclass(frozen=True)
class Match:
    """A task: candidate pairs of the band hashes low .. high - 1, without those that are surely below the threshold."""

    path: Path
    bands: tuple[Path, ...]
    signatures: tuple[Path, ...]
    offsets: tuple[int, ...]
    low: int
    high: int
    section: Dedup


@dataclass(frozen=True)
class Verify:
    """A task: the pairs with the second document in low .. high - 1 whose exact similarity reaches the threshold."""

    path: Path
    pairs: tuple[Path, ...]
    low: int
    high: int
    documents: Documents
    section: Dedup
    memory: int  # bytes of texts in memory at a time


@dataclass(frozen=True)
class Cluster:
    """A task: from all verified pairs to the numbers of the filtered documents."""

    path: Path
    edges: tuple[Path, ...]
    documents: Documents


def near_duplicates(
    runner: StageRunner, documents: Documents, filtered: list[Path], section: Dedup, memory: int
) -> tuple[list[Path], dict[str, Any], list[dict[str, Any]]]:
    """Finds near-duplicates.

    filtered: runs of documents that earlier stages have filtered. memory: approximate bytes that a task may use.

    Returns the run of the filtered documents, the counts for the report, and the results with their statistics.
    """
    signatures, bands = runner.folder_of("signatures"), runner.folder_of("bands")
    signed = [
        Sign(
            signatures / f"{number:06d}.npy",
            bands / f"{number:06d}.npy",
            path,
            documents.span(number),
            tuple(filtered),
            section,
        )
        for number, path in enumerate(documents.paths)
    ]
    entries = sum(result["entries"] for result in runner.stage("signatures", sign, signed, about="signatures"))
    ranges = runner.task_count("pairs", max(len(signed), math.ceil(entries * BAND.itemsize * 8 / memory)))
    matched = [
        Match(
            runner.folder_of("pairs") / f"{number:06d}.npy",
            tuple(task.bands for task in signed),
            tuple(task.signatures for task in signed),
            tuple(map(int, documents.offsets)),
            low,
            high,
            section,
        )
        for number, (low, high) in enumerate(key_ranges(ranges))
    ]
    candidates = runner.stage("pairs", match, matched, about="candidate pairs")
    runner.remove("bands")
    runner.remove("signatures")
    verified = [
        Verify(
            runner.folder_of("edges") / f"{number:06d}.npy",
            tuple(task.path for task in matched),
            low,
            high,
            documents,
            section,
            memory // 4,
        )
        for number, (low, high) in enumerate(key_ranges(len(documents.paths), len(documents)))
    ]
    edges = runner.stage("edges", verify, verified, about="exact similarities")
    runner.remove("pairs")
    path = runner.folder_of("near_duplicate") / "000000.npy"
    task = Cluster(path, tuple(task.path for task in verified), documents)
    (clusters,) = runner.stage("near_duplicate", cluster, [task], about="clusters")
    runner.remove("edges")
    pair_counts = {
        "candidate_pairs": sum(result["candidates"] for result in candidates),
        "likely_pairs": sum(result["likely"] for result in edges),
        "verified_pairs": sum(result["verified"] for result in edges),
        "cluster_sizes": clusters["sizes"],
    }
    return [path], pair_counts, [clusters]


def sign(task: Sign) -> dict[str, Any]:
    """Writes the signatures, uint32 [rows, num_perm], and the run of band entries of a partition."""
    section = task.section
    texts = texts_of(read_table(task.table))
    signatures = dedup.minhash_signatures(
        texts, num_perm=section.num_perm, ngram=section.ngram, seed=section.seed, threads=1
    )
    rows = np.flatnonzero(~filtered_rows(task.filtered, task.span) & (signatures != EMPTY).any(1))
    hashes = dedup.band_hashes(signatures[rows], bands=section.bands, rows=section.rows)
    entries = np.zeros(hashes.size, BAND)
    entries["hash"] = hashes.ravel()
    entries["number"] = np.repeat(rows + task.span[0], section.bands)
    write_array(task.signatures, signatures)
    write_run(task.bands, entries)
    return {"bytes": int(texts.offsets[-1] - texts.offsets[0]), "entries": len(entries)}


def match(task: Match) -> dict[str, Any]:
    """Writes the run of pairs of a range of band hashes."""
    section = task.section
    entries = read_range(task.bands, task.low, task.high)
    hashes, numbers = np.ascontiguousarray(entries["hash"]), np.ascontiguousarray(entries["number"])
    pairs = dedup.bucket_pairs(hashes, numbers, limit=CROWDED_BUCKET)
    deviation = math.sqrt(section.threshold * (1 - section.threshold) / section.num_perm)
    least = section.threshold - MARGIN_DEVIATIONS * deviation
    signatures = [read_array(path) for path in task.signatures]
    offsets = np.array(task.offsets)
    likely = []
    for chunk in np.array_split(pairs, max(math.ceil(len(pairs) / PAIR_BLOCK), 1)):
        a, b = (_gather(signatures, offsets, np.ascontiguousarray(chunk[:, side])) for side in (0, 1))
        likely.append(chunk[dedup.estimated_jaccard(a, b) >= least])
    write_run(task.path, _as_pairs(np.concatenate(likely)))
    return {"candidates": len(pairs)}


def verify(task: Verify) -> dict[str, Any]:
    """Writes the run of verified pairs of a range of documents."""
    entries = read_range(task.pairs, task.low, task.high)
    pairs = np.unique(np.stack([entries["a"], entries["b"]], 1), axis=0)
    edges = np.concatenate([pairs[:0], *_similar(pairs, task)])
    # Connect each document with the smallest number of its component: one edge per document instead of one per pair.
    numbers, local = np.unique(edges, return_inverse=True)
    smallest = numbers[dedup.clusters(local.reshape(-1, 2), len(numbers))]
    star = np.stack([smallest, numbers], 1)[smallest != numbers]
    write_run(task.path, _as_pairs(star))
    return {"likely": len(pairs), "verified": len(edges)}


def _similar(pairs: Array, task: Verify) -> Iterator[Array]:
    """The pairs that reach the threshold. They are compared in pieces whose texts fit into memory."""
    numbers, local = np.unique(pairs, return_inverse=True)
    if len(pairs) > 1 and task.documents.sizes(numbers).sum() > task.memory:
        middle = len(pairs) // 2
        yield from _similar(pairs[:middle], task)
        yield from _similar(pairs[middle:], task)
    elif len(pairs):
        texts = task.documents.texts(numbers)
        similar = dedup.exact_jaccard(texts, local.reshape(-1, 2), ngram=task.section.ngram, threads=1)
        yield pairs[similar >= task.section.threshold]


def cluster(task: Cluster) -> dict[str, Any]:
    """Writes the run of filtered documents. Memory: about 100 bytes per document with a verified pair."""
    edges = np.concatenate([read_array(path) for path in task.edges])
    numbers, local = np.unique(np.stack([edges["a"], edges["b"]], 1), return_inverse=True)
    labels = dedup.clusters(local.reshape(-1, 2), len(numbers))
    table = task.documents.take(numbers, ["quality", "priority"])
    # the best document of each cluster first; ties are decided by the numbers, which follow the content hashes
    order = np.lexsort([numbers, -column(table, "priority").astype(np.int64), -column(table, "quality"), labels])
    survives = np.concatenate([[True], labels[order][1:] != labels[order][:-1]]) if len(order) else np.zeros(0, bool)
    survivor_of = np.repeat(numbers[order[survives]], np.bincount(np.cumsum(survives))[1:])  # in the order of `order`
    lost = np.sort(numbers[order[~survives]])
    stats = PipelineStats()
    if len(lost):
        stats.filtered["near_duplicate"] = Filtered(len(lost), int(task.documents.sizes(lost).sum()))
    kept_instead = dict(zip(numbers[order].tolist(), survivor_of.tolist(), strict=True))
    samples = [_sample(task.documents, number, kept_instead[number]) for number in lost[:3].tolist()]
    if samples:
        stats.filtered["near_duplicate"].add_samples(samples)
    entries = np.zeros(len(lost), NUMBER)
    entries["number"] = lost
    write_run(task.path, entries)
    sizes_of = Counter(np.unique(labels, return_counts=True)[1].tolist())
    return {"stats": stats.as_json(), "sizes": {str(size): sizes_of[size] for size in sorted(sizes_of)}}


def _sample(documents: Documents, lost: int, kept: int) -> Sample:
    (row,) = documents.take(np.array([lost]), ["hash", "where", "text"]).to_pylist()
    (like,) = documents.take(np.array([kept]), ["text"]).to_pylist()
    # the excerpts start a little before the first difference
    pairs = enumerate(zip(row["text"], like["text"], strict=False))
    difference = next((index for index, (left, right) in pairs if left != right), 0)
    start = max(difference - EXCERPT_CHARACTERS // 4, 0)
    texts = [("... " if start else "") + excerpt(text[start:]) for text in (row["text"], like["text"])]
    return Sample(row["hash"].hex(), row["where"], None, *texts)


def _gather(signatures: list[Array], offsets: Array, numbers: Array) -> Array:
    """The signatures of the documents with these numbers. The numbers may be in any order."""
    owners = np.searchsorted(offsets, numbers, side="right") - 1
    out = np.empty((len(numbers), signatures[0].shape[1]), np.uint32)
    for owner in np.unique(owners):
        mine = owners == owner
        out[mine] = signatures[owner][numbers[mine] - offsets[owner]]
    return out


def _as_pairs(pairs: Array) -> Array:
    entries = np.zeros(len(pairs), PAIR)
    if len(pairs):
        entries["a"], entries["b"] = pairs[:, 0], pairs[:, 1]
    return entries
