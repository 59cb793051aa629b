"""The data suite's cases of the loader: tokens a second, and the first batch at any position of 10^9 tokens.

The files of tokens are sparse, so the system reads zeros without waiting for a disk. Every step reads rows that were
not read before. Documents have DOCUMENT tokens; because short documents cost more per token, there is a figure for them
too.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from cases import Options, Result

from cdrmix.config.schema_data import CurriculumStage
from cdrmix.data.curriculum import Mixture
from cdrmix.data.loader import TrainLoader
from cdrmix.data.shards import Split, Stratum

TOKENS, SHARD_TOKENS, ROW_LENGTH = 10**9, 10**8, 2048
DOCUMENT, SHORT_DOCUMENT = 500, 100
BATCH_ROWS, MICRO_BATCH_ROWS = 256, 8
STEPS = 8  # of a sample
STRATA = 24


def sparse_split(folder: Path, document: int) -> Callable[[], Split]:
    """Opens a split of TOKENS zeros in rows that are full of documents of `document` tokens."""
    folder.mkdir()
    names = []
    for number in range(TOKENS // SHARD_TOKENS):
        names.append(f"train.tokens-{number:05d}.bin")
        with (folder / names[-1]).open("wb") as file:
            file.truncate(2 * SHARD_TOKENS)
    whole, rest = divmod(ROW_LENGTH, document)
    of_row = np.array([document] * whole + [rest] * (rest > 0), "<i4")
    rows = TOKENS // ROW_LENGTH - 1
    lengths = np.tile(of_row, rows)
    (np.cumsum(lengths, dtype="<i8") - lengths).astype("<i8").tofile(folder / "train.segment-starts.bin")
    lengths.tofile(folder / "train.segment-lengths.bin")
    (np.arange(rows + 1) * len(of_row)).astype("<i8").tofile(folder / "train.rows.bin")
    np.array([0, TOKENS - 1], "<i8").tofile(folder / "train.documents.bin")
    stratum = Stratum("text", 0, 0, rows, TOKENS, 1)
    counts = {"documents": 1, "tokens": TOKENS, "text_bytes": 4 * TOKENS, "rows": rows}
    entry = {**counts, "weights": [1.0], "shards": names, "strata": [stratum._asdict()]}
    index = {"vocab_size": 50272, "row_length": ROW_LENGTH, "end_of_text_id": 0, "shard_tokens": SHARD_TOKENS}
    return lambda: Split(SimpleNamespace(path=folder), "train", entry, {**index, "dtype": "<u2"})


def mixture(split: Split) -> Mixture:
    """A curriculum of three stages over STRATA strata, into which the rows are divided."""
    edges = np.linspace(0, split.rows, STRATA + 1).astype(int).tolist()
    strata = [
        Stratum(f"d{number}", 0, first, last - first, 0, 0) for number, (first, last) in enumerate(pairwise(edges))
    ]
    stages = [
        CurriculumStage(until=until, domains={f"d{n}": 1.0 + (n * step) % 7 for n in range(STRATA)})
        for step, until in ((3, 0.3), (5, 0.8), (2, 1.0))
    ]
    return Mixture(stages, strata, total_rows=4 * split.rows, seed=1)


def loader_of(split: Split, order: Mixture | None = None) -> TrainLoader:
    return TrainLoader(
        split, row_length=ROW_LENGTH, batch_rows=BATCH_ROWS, micro_batch_rows=MICRO_BATCH_ROWS, seed=1, mixture=order
    )


def tokens_a_second(loader: TrainLoader, first: int) -> float:
    """Tokens a second of CPU time over STEPS steps from `first` on."""
    begun = time.process_time()
    tokens = sum(batch.ids_BT.numel() for step in range(first, first + STEPS) for batch in loader.micro_batches(step))
    return tokens / (time.process_time() - begun)


def loader(options: Options) -> Result:
    """Speed over rows not read before, and the slowest of five first batches, each of a newly opened split."""
    folder = Path(tempfile.mkdtemp(prefix="cdrmix-loader-"))
    try:
        opened = sparse_split(folder / "long", DOCUMENT)
        split, short = opened(), sparse_split(folder / "short", SHORT_DOCUMENT)()
        order = mixture(split)
        loader_of(split, order).micro_batches(0)  # the first calls of libraries
        epoch = split.rows // BATCH_ROWS
        samples = [tokens_a_second(loader_of(split), number * STEPS) for number in range(options.blocks)]
        mixed = [tokens_a_second(loader_of(split, order), number * STEPS) for number in range(options.blocks)]
        firsts = []
        for step in (1, epoch // 3, epoch - 1, 1000 * epoch + 7, 10**9):
            begun = time.perf_counter()
            loader_of(opened()).micro_batches(step)
            firsts.append(1000 * (time.perf_counter() - begun))
        figures = {
            "tokens_a_second": float(np.median(samples)),
            "tokens_a_second_mixed": float(np.median(mixed)),
            "tokens_a_second_short": tokens_a_second(loader_of(short), 0),
            "first_batch_milliseconds": max(firsts),
        }
    finally:
        shutil.rmtree(folder)
    settings = {"tokens": TOKENS, "row_length": ROW_LENGTH, "document": DOCUMENT, "batch_rows": BATCH_ROWS}
    return Result("tokens a CPU second", None, samples, [], figures=figures, settings={**settings, "device": "cpu"})
