"""SimHash fingerprints: threads, small edits, the join against brute force. Their definition: test_words.py."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdrmix import _dedup
from cdrmix.config.schema import Config
from cdrmix.data.dedup.minhash import contaminated, near_duplicates, simhash
from cdrmix.data.prepare import prepare

BITS = 2**64 - 1


def test_the_result_does_not_depend_on_threads() -> None:
    documents = [f"document {i} holds the number {i * i} " * (i % 17) for i in range(1000)]
    expected = simhash(documents, threads=1)
    for threads in (2, 3, 16):
        np.testing.assert_array_equal(simhash(documents, threads=threads), expected)


def test_small_edits_change_few_bits() -> None:
    words = [f"word{i}" for i in range(300)]
    original, edited, other = simhash(
        [" ".join(words), " ".join([*words, "one", "more"]), " ".join(words[::-1] + ["x"] * 300)]
    )
    distances = [int(original ^ fingerprint).bit_count() for fingerprint in (edited, other)]
    assert distances[0] <= 3 < distances[1]


# Fingerprints that lie close together, so that pairs exist at every radius, and ones anywhere.
clustered = st.builds(
    lambda base, flips: base ^ sum({1 << bit for bit in flips}),
    st.sampled_from([0, BITS, 0x0123456789ABCDEF]),
    st.lists(st.integers(0, 63), max_size=6),
)
fingerprint_arrays = st.lists(clustered | st.integers(0, BITS), max_size=30).map(lambda x: np.array(x, dtype=np.uint64))


# Two bits apart, one in each half: of three blocks only the middle one is equal.
FAR = np.array([1 << 63 | 1], dtype=np.uint64)


@example(FAR, np.zeros(1, dtype=np.uint64), 2)
@given(fingerprint_arrays, fingerprint_arrays, st.integers(0, 6) | st.sampled_from([15, 31, 62, 63]))
def test_the_join_is_brute_force(a: np.ndarray, b: np.ndarray, radius: int) -> None:
    expected = [
        (i, j) for i, x in enumerate(a.tolist()) for j, y in enumerate(b.tolist()) if (x ^ y).bit_count() <= radius
    ]
    found = near_duplicates(a, b, radius=radius)
    assert found.dtype == np.int64
    assert found.shape == (len(expected), 2)
    assert found.tolist() == [list(pair) for pair in expected]
    assert contaminated(a, b, radius=radius).tolist() == [i in {pair[0] for pair in expected} for i in range(len(a))]


def test_nothing_gives_nothing() -> None:
    none = simhash([])
    assert none.shape == (0,)
    assert near_duplicates(none, none).shape == (0, 2)
    assert contaminated(none, simhash(["text"])).shape == (0,)
    assert simhash(["", " .,\n"]).tolist() == [0, 0]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="threads"):
        simhash(["text"], threads=-1)
    with pytest.raises(ValueError, match="surrogates"):
        simhash(["\ud800"])
    some = simhash(["text"])
    for radius in (-1, 64):
        with pytest.raises(ValueError, match=f"radius .* {radius}"):
            near_duplicates(some, some, radius=radius)
    with pytest.raises(TypeError):
        near_duplicates(some.astype(np.float64), some)  # never rounded in silence


def test_other_threads_run_meanwhile() -> None:
    """The GIL is released: a second thread counts while the first hashes, though it may not be switched to by force."""
    documents, counted, stop = ["many words in a text " * 1_000_000], [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    texts = _dedup.Texts(documents)
    interval = sys.getswitchinterval()
    other = threading.Thread(target=count)
    other.start()
    try:
        sys.setswitchinterval(60)
        before = counted[0]
        _dedup.simhash(texts, 1)
        meanwhile = counted[0] - before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        other.join()
    assert meanwhile > 100


def test_the_preparation_counts_held_out_near_duplicates(make_config: Callable[..., Config], tmp_path: Path) -> None:
    """Forty texts of their own and forty more, each with a twin in capitals: other bytes, the same words."""
    originals = [" ".join(f"word{number * 1000 + i}" for i in range(50)) for number in range(80)]
    path = tmp_path / "twins.jsonl"
    texts = [*originals, *(text.upper() for text in originals[40:])]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = make_config(
        {"kind": "jsonl", "paths": [str(path)]}, dedup={"near_duplicates": False}
    )  # which would drop the twins
    shards = prepare(config, say=lambda line: None)
    training = set(shards.train.text())
    held_out = list(shards.valid.text())
    expected = sum(text.swapcase() in training for text in held_out)
    assert 0 < expected < len(held_out)
    assert shards.report["held_out_near_duplicates"] == expected
