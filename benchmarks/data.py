"""The data suite's cases: signatures compared with peers, and the share of planted near-duplicates that is found.

The texts are the files of Python's packages on this machine: code and its documentation, the same on every run here.
Speed is in megabytes of text a second of CPU time, of all threads of the process, so that other work on the machine has
little effect.
"""

from __future__ import annotations

import hashlib
import random
import re
import site
import sysconfig
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from cases import Case, Options, Result, quantiles
from data_cleaning import cleaning
from data_loader import loader
from data_pipeline import line, memory, processes
from data_tokens import tokens
from dedup_peers import DATASKETCH, GAOYA, OURS, RENSA, present

from cdrmix import _dedup
from cdrmix.data.dedup.minhash import candidate_pairs, clusters, estimated_jaccard, exact_jaccard, minhash_signatures

CORPUS_BYTES = 30_000_000
LINE_BYTES = 60_000_000  # for the whole pipeline, whose start and end take a third of a second
NUM_PERM, NGRAM, BANDS, ROWS, THRESHOLD = 128, 5, 16, 8, 0.8
WORDS = 300  # of a planted document, about 2.5 kB
# Shares of a document's words that are replaced, one by one or in one block: with 5-word shingles these give
# similarities from 0.2 to 0.98, the range in which recall varies.
SCATTERED, BLOCKS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12), (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
FEWEST = 150  # least pairs of a tenth of similarity for a figure of its recall: half a standard deviation of 0.04


@cache
def corpus(most: int = CORPUS_BYTES) -> list[str]:
    """Whole files of the standard library and of the installed packages, up to `most` bytes."""
    folders = [Path(sysconfig.get_paths()["stdlib"]), *map(Path, site.getsitepackages())]
    texts: list[str] = []
    size = 0
    seen = set()
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        encoded = path.read_bytes()
        digest = hashlib.sha256(encoded).digest()
        if size >= most or len(encoded) < 200 or digest in seen:
            continue
        try:
            text = encoded.decode("utf-8")
        except UnicodeDecodeError:
            continue
        seen.add(digest)
        texts.append(text)
        size += len(encoded)
    return texts


def megabytes(texts: list[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def facts(texts: list[str]) -> dict[str, object]:
    """The settings: two rows are comparable if these are equal."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return {
        "documents": len(texts),
        "megabytes": round(megabytes(texts), 2),
        "sha256": digest[:16],
        "num_perm": NUM_PERM,
        "ngram": NGRAM,
        "instruction_set": _dedup.instruction_sets()[-1],
    }


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of all threads of this process."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def signatures(options: Options) -> Result:
    """Every signer in turns, starting with another one in each round; the speed over a peer is that of the medians."""
    texts = corpus()
    size = megabytes(texts)
    signers, versions, absent = present(options.without)
    signers[OURS](texts)  # loads the library and the texts
    names = list(signers)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(max(1, options.blocks // 4)):  # a round takes some seconds for the slowest peer
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            speeds[name].append(size / cpu_seconds(lambda name=name: signers[name](texts)))
    medians = {name: quantiles(values)["p50"] for name, values in speeds.items()}
    figures = {"megabytes_a_cpu_second": medians[OURS]}
    for name, key in ((RENSA, "rensa"), (GAOYA, "gaoya"), (DATASKETCH, "datasketch")):
        if name in medians:
            figures[f"speed_over_{key}"] = medians[OURS] / medians[name]
    packed = _dedup.Texts(texts)
    for name in _dedup.instruction_sets():
        seconds = min(
            cpu_seconds(lambda name=name: _dedup.minhash(packed, NUM_PERM, NGRAM, 1, 1, name)) for _ in range(3)
        )
        figures[f"megabytes_a_cpu_second_{name}"] = size / seconds
    return Result(
        unit="MB of text a CPU second",
        peer_name=RENSA if RENSA in speeds else None,
        ours=speeds[OURS],
        peer=speeds.get(RENSA, []),
        figures=figures,
        settings={**facts(texts), "device": "cpu", "versions": versions},
        peers={
            name: {
                "megabytes_a_cpu_second": quantiles(values),
                "milliseconds": quantiles([1000 * size / value for value in values]),
            }
            for name, values in speeds.items()
        },
        absent=absent,
    )


def planted() -> tuple[list[str], np.ndarray]:
    """About CORPUS_BYTES of documents, every second one an edited copy of the one before; the pairs, int64 [m, 2]."""
    rng = random.Random(1)
    words = [word for text in corpus() for word in text.split(" ")]
    texts: list[str] = []
    size, start = 0, 0
    while size < CORPUS_BYTES and start + WORDS <= len(words):
        original = words[start : start + WORDS]
        start += WORDS
        edited = list(original)
        if rng.random() < 0.5:
            spots = rng.sample(range(WORDS), max(1, round(rng.choice(SCATTERED) * WORDS)))
        else:
            length = round(rng.choice(BLOCKS) * WORDS)
            first = rng.randrange(WORDS - length + 1)
            spots = list(range(first, first + length))
        for spot in spots:
            edited[spot] = rng.choice(words)
        texts += [" ".join(original), " ".join(edited)]
        size += sum(len(text) for text in texts[-2:])
    return texts, np.arange(len(texts), dtype=np.int64).reshape(-1, 2)


def by_definition(texts: list[str], pairs: np.ndarray) -> np.ndarray:
    """The Jaccard similarity of each pair by Python's words and sets, float64 [m]."""
    sets: dict[int, set[tuple[str, ...]]] = {}

    def shingles(index: int) -> set[tuple[str, ...]]:
        if index not in sets:
            words = re.findall(r"\w+", texts[index].lower())
            count = max(1, len(words) - NGRAM + 1) if words else 0
            sets[index] = {tuple(words[i : i + NGRAM]) for i in range(count)}
        return sets[index]

    found = np.zeros(len(pairs))
    for row, (a, b) in enumerate(pairs.tolist()):
        x, y = shingles(a), shingles(b)
        found[row] = len(x & y) / len(x | y) if x or y else 0.0
        if row % 1000 == 0:
            sets.clear()  # pairs are sorted, so that few sets are needed again
    return found


def duplicates(options: Options) -> Result:
    """Recall over planted pairs by tenths of exact similarity; precision over all found pairs."""
    texts, pairs = planted()
    size = megabytes(texts)
    seconds = dict.fromkeys(("signatures", "candidates", "verification", "clusters"), 0.0)

    def timed(stage: str, call: Callable[[], np.ndarray]) -> np.ndarray:
        begun = time.process_time()
        found = call()
        seconds[stage] = time.process_time() - begun
        return found

    signed = timed("signatures", lambda: minhash_signatures(texts, num_perm=NUM_PERM, ngram=NGRAM, threads=1))
    candidates = timed("candidates", lambda: candidate_pairs(signed, bands=BANDS, rows=ROWS, threads=1))
    similarities = timed("verification", lambda: exact_jaccard(texts, candidates, ngram=NGRAM, threads=1))
    verified = candidates[similarities >= THRESHOLD]
    names = timed("clusters", lambda: clusters(verified, len(texts)))

    exact = by_definition(texts, pairs)
    keys = candidates[:, 0] * len(texts) + candidates[:, 1]
    met = np.isin(pairs[:, 0] * len(texts) + pairs[:, 1], keys)
    expected = 1 - (1 - exact**ROWS) ** BANDS
    error = estimated_jaccard(signed[pairs[:, 0]], signed[pairs[:, 1]]).astype(np.float64) - exact
    figures = {
        "planted_pairs": float(len(pairs)),
        "recall_error": abs(float(met.mean() - expected.mean())),
        "recall_from_080": float(met[exact >= 0.8].mean()),
        "bias": abs(float(error.mean())),
        "error_over_theory": float(np.sqrt((error**2).mean()) / np.sqrt((exact * (1 - exact)).mean() / NUM_PERM)),
        "precision": float((by_definition(texts, verified) >= THRESHOLD).mean()),
        "candidates": float(len(candidates)),
        "precision_of_candidates": len(verified) / len(candidates),
        "kept_documents": float(len(np.unique(names))),
    }
    tenths = np.minimum((exact * 10).astype(int), 9)
    for tenth in range(10):
        chosen = tenths == tenth
        if chosen.sum() >= FEWEST:
            figures[f"recall_error_0{tenth}"] = abs(float(met[chosen].mean() - expected[chosen].mean()))
    figures["worst_recall_error"] = max(value for key, value in figures.items() if key.startswith("recall_error_"))
    figures |= {f"cpu_seconds_{stage}": value for stage, value in seconds.items()}
    return Result(
        unit="MB of text a CPU second, text to clusters",
        peer_name=None,
        ours=[size / sum(seconds.values())],
        peer=[],
        figures=figures,
        settings={**facts(texts), "bands": BANDS, "rows": ROWS, "threshold": THRESHOLD, "device": "cpu"},
    )


CASES = {
    "signatures": Case(signatures, "30 MB of text to MinHash signatures; ratio of speeds to rensa's", ("cpu",)),
    "cleaning": Case(
        lambda options: cleaning(options, corpus()), "30 MB normalised, judged, scrubbed: each part", ("cpu",)
    ),
    "tokens": Case(
        lambda options: tokens(options, corpus()),
        "1.3 MB of code and hostile text to ids, against tokenizers",
        ("cpu",),
    ),
    "line": Case(
        lambda options: line(options, corpus(LINE_BYTES)),
        "compressed JSON lines to shards, all rules, compared with datatrove",
        ("cpu",),
    ),
    "processes": Case(
        lambda options: processes(options, corpus(LINE_BYTES)), "the line in two processes against one", ("cpu",)
    ),
    "memory": Case(memory, "memory for two million documents; takes ten minutes", ("cpu",)),
    "loader": Case(loader, "rows of 10^9 tokens to batches; the first batch at any position", ("cpu",)),
    "duplicates": Case(duplicates, "30 MB with planted near-duplicates: recall, bias, precision", ("cpu",)),
}
