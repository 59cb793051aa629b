"""MinHash, bands, exact similarity and clusters against their definitions in Python, and on planted duplicates."""

from __future__ import annotations

import random
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import reference_words
from hypothesis import given
from hypothesis import strategies as st
from reference_words import BITS, mixed

from cdrmix import _dedup
from cdrmix.data.dedup.minhash import (
    EMPTY,
    NEIGHBOURS,
    NO_BUCKET,
    PackedTexts,
    band_hashes,
    bucket_pairs,
    candidate_pairs,
    clusters,
    estimated_jaccard,
    exact_jaccard,
    minhash_signatures,
)


def shingles(text: str, ngram: int = 5) -> set[tuple[str, ...]]:
    of_text = reference_words.words(text)
    return {tuple(of_text[i : i + ngram]) for i in range(max(1, len(of_text) - ngram + 1))} if of_text else set()


def jaccard(a: str, b: str, ngram: int = 5) -> float:
    x, y = shingles(a, ngram), shingles(b, ngram)
    return len(x & y) / len(x | y) if x | y else 0.0


def packed(texts: list[str]) -> PackedTexts:
    """With other bytes before the first text and behind the last."""
    blobs = [text.encode() for text in texts]
    return PackedTexts(b"before" + b"".join(blobs) + b"behind", np.cumsum([6, *map(len, blobs)]))


# ---- signatures ----


def reference_signature(text: str, num_perm: int, ngram: int, seed: int) -> list[int]:
    """The formula of csrc/minhash.hpp; the hashes of shingles are held to theirs in test_words.py."""
    xs = [int(value) >> 32 for value in _dedup.shingle_hashes(_dedup.Texts([text]), ngram)[0]]
    draws = [mixed((mixed(seed) + j * 0x9E3779B97F4A7C15) & BITS) >> 32 for j in range(1, 2 * num_perm + 1)]
    permutations = zip((a | 1 for a in draws[::2]), draws[1::2], strict=True)
    return [min(((a * x + b) % 2**32 for x in xs), default=EMPTY) for a, b in permutations]


words = st.sampled_from(["the", "Model", "learns", "ÀÉ", "x1", "_", "日本", "İ"]) | st.text(max_size=4)
documents = st.lists(st.lists(words, max_size=40).map(" ".join), max_size=5)


@given(
    documents, st.integers(1, 9) | st.sampled_from([63, 64, 65, 130]), st.integers(1, 6), st.sampled_from([0, 1, BITS])
)
def test_signatures_are_those_of_the_definition(texts: list[str], num_perm: int, ngram: int, seed: int) -> None:
    found = minhash_signatures(texts, num_perm=num_perm, ngram=ngram, seed=seed)
    assert found.dtype == np.uint32
    assert found.shape == (len(texts), num_perm)
    assert found.tolist() == [reference_signature(text, num_perm, ngram, seed) for text in texts]


@pytest.mark.parametrize("num_perm", [1, 128, 200])
def test_instruction_sets_and_threads_give_the_same_bits(num_perm: int) -> None:
    sets = _dedup.instruction_sets()
    assert sets[0] == "portable"
    texts, _ = planted(0.9, 40)
    texts = [*texts, "", "one", "word " * 20_000]
    expected = _dedup.minhash(_dedup.Texts(texts), num_perm, 5, 1, 1, "portable")
    for name in sets:
        np.testing.assert_array_equal(_dedup.minhash(_dedup.Texts(texts), num_perm, 5, 1, 1, name), expected)
    for threads in (0, 2, 3, 16):
        np.testing.assert_array_equal(minhash_signatures(texts, num_perm=num_perm, threads=threads), expected)
    order = np.random.default_rng(3).permutation(len(texts))
    np.testing.assert_array_equal(minhash_signatures([texts[i] for i in order], num_perm=num_perm), expected[order])


@given(documents)
def test_texts_may_be_packed(texts: list[str]) -> None:
    blob, offsets = packed(texts)
    expected = minhash_signatures(texts, num_perm=16)
    for bytes_like in (blob, bytearray(blob), memoryview(blob), np.frombuffer(blob, np.uint8)):
        for integers in (np.int64, np.uint64):
            found = minhash_signatures(PackedTexts(bytes_like, offsets.astype(integers)), num_perm=16)
            np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(minhash_signatures(tuple(texts), num_perm=16), expected)


def test_seeds_give_different_permutations() -> None:
    one, other = (minhash_signatures(["some words of a text"], seed=seed) for seed in (1, 2))
    assert not np.any(one == other)


# ---- planted near-duplicates ----


@cache
def natural_words() -> list[str]:
    """About 400,000 words of the Python standard library."""
    folder = Path(re.__file__).parent.parent
    paths = sorted(path for path in folder.glob("*.py") if path.stat().st_size > 10_000)
    return [word for path in paths for word in path.read_text(encoding="utf-8").split()][:400_000]


def planted(similarity: float, count: int, length: int = 120) -> tuple[list[str], np.ndarray]:
    """`count` passages and an edited copy of each, of about that similarity; the pairs, int64 [count, 2].

    Replaced words lie apart or in one block. Each takes about five shingles (or, in a block, one) from both sides, so
    that a share e of lost shingles leaves a similarity of (1 - e) / (1 + e).
    """
    rng = random.Random(round(similarity * 1000))
    source, texts, pairs = natural_words(), [], []
    lost = (1 - similarity) / (1 + similarity) * length
    for number in range(count):
        start = rng.randrange(len(source) - length)
        original = source[start : start + length]
        edited = list(original)
        if number % 2:
            spots = rng.sample(range(length), max(1, round(lost / 5)))
        else:
            first = rng.randrange(max(1, length - round(lost)))
            spots = list(range(first, min(length, first + max(1, round(lost) - 4))))
        for spot in spots:
            edited[spot] = f"edit{rng.randrange(10**6)}"
        pairs.append((len(texts), len(texts) + 1))
        texts += [" ".join(original), " ".join(edited)]
    return texts, np.array(pairs)


SIMILARITIES = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.95)
COUNT = 800


@cache
def measured(bands: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every planted pair: the similarity by definition, by signature, and whether it is a candidate."""
    exact, estimated, met = [], [], []
    for similarity in SIMILARITIES:
        texts, pairs = planted(similarity, COUNT)
        signatures = minhash_signatures(texts, num_perm=bands * rows)
        candidates = set(map(tuple, candidate_pairs(signatures, bands=bands, rows=rows).tolist()))
        exact += [jaccard(texts[a], texts[b]) for a, b in pairs]
        estimated.append(estimated_jaccard(signatures[pairs[:, 0]], signatures[pairs[:, 1]]))
        met += [(a, b) in candidates for a, b in pairs.tolist()]
    return np.array(exact), np.concatenate(estimated).astype(np.float64), np.array(met)


@pytest.mark.parametrize(("bands", "rows"), [(16, 8), (14, 9), (20, 5)])
def test_recall_follows_the_curve(bands: int, rows: int) -> None:
    """1 - (1 - s^rows)^bands within 0.03, over all pairs and within tenths of similarity.

    Of n pairs the mean's standard deviation is at most 0.5 / sqrt(n): 0.006 over all. A tenth with 450 pairs or more
    has 0.024 at worst, so that it is held to 3 of them where these are more than 0.03.
    """
    exact, _, met = measured(bands, rows)
    expected = 1 - (1 - exact**rows) ** bands
    assert abs(met.mean() - expected.mean()) < 0.03
    compared = 0
    for low, high in pairwise(np.arange(0.2, 1.01, 0.1)):
        chosen = (exact >= low) & (exact < high + 1e-9)
        if chosen.sum() < 450:
            continue
        compared += 1
        deviation = np.sqrt((expected[chosen] * (1 - expected[chosen])).sum()) / chosen.sum()
        assert abs(met[chosen].mean() - expected[chosen].mean()) < max(0.03, 3 * deviation), (low, high)
    assert compared >= 5
    if (bands, rows) == (16, 8):
        assert met[exact >= 0.8].mean() >= 0.98


def test_estimates_have_no_bias_and_the_error_of_theory() -> None:
    """Over 6400 pairs the mean's own standard deviation is 0.0005, that of the root mean square 1 %."""
    exact, estimated, _ = measured(16, 8)
    error = estimated - exact
    assert abs(error.mean()) < 0.005
    theory = np.sqrt((exact * (1 - exact)).mean() / 128)
    assert 0.9 * theory < np.sqrt((error**2).mean()) < 1.1 * theory


def test_verification_finds_the_pairs_by_definition() -> None:
    texts = planted(0.7, 300)[0] + planted(0.8, 300)[0] + planted(0.9, 300)[0]
    pairs = candidate_pairs(minhash_signatures(texts))
    found = exact_jaccard(texts, pairs)
    expected = np.array([jaccard(texts[a], texts[b]) for a, b in pairs.tolist()])
    np.testing.assert_array_equal(found, expected)  # both divide the same two whole numbers
    assert 0.2 < (found >= 0.8).mean() < 0.95  # there was something to decide


# ---- scripts without spaces ----

SCRIPTS = {
    "Han": [chr(code) for code in range(0x4E00, 0x5200)],
    "kana": [chr(code) for code in (*range(0x3041, 0x3097), *range(0x30A1, 0x30FB))],
    "Thai": [chr(code) for code in (*range(0xE01, 0xE3B), *range(0xE40, 0xE4F))],
    "Lao": [*"ກຂຄງຈຊຍດຕຖທນບປຜຝພຟມຢຣລວສຫອຮະັາິີຶືຸູົຼເແໂໃໄ່້"],
    "Khmer": [chr(code) for code in range(0x1780, 0x17D4) if code not in (0x17B4, 0x17B5)],
    "Myanmar": [chr(code) for code in range(0x1000, 0x1040)],
}


def copied(script: str, count: int, length: int = 400) -> list[str]:
    """`count` texts, each before a copy with up to 24 other characters; clauses of 10 to 30 characters."""
    rng = random.Random(script)
    texts = []
    for _ in range(count):
        text = rng.choices(SCRIPTS[script], k=length)
        for comma in range(rng.randint(10, 30), length, rng.randint(10, 30)):
            text[comma] = "、" if script in ("Han", "kana") else " "
        edited = list(text)
        for spot in rng.sample(range(length), rng.randint(1, 24)):
            edited[spot] = rng.choice(SCRIPTS[script])
        texts += ["".join(text), "".join(edited)]
    return texts


@pytest.mark.parametrize("script", SCRIPTS)
def test_recall_follows_the_curve_in_scripts_without_spaces(script: str) -> None:
    """Over 300 pairs of similarity 0.5 to 1. The mean's standard deviation is 0.02 here; 4 of them are allowed."""
    texts = copied(script, 300)
    pairs = np.arange(len(texts)).reshape(-1, 2)
    signatures = minhash_signatures(texts)
    found = set(map(tuple, candidate_pairs(signatures).tolist()))
    exact = np.array([jaccard(texts[a], texts[b]) for a, b in pairs])
    np.testing.assert_array_equal(exact_jaccard(texts, pairs), exact)
    assert exact.min() < 0.65
    assert exact.max() > 0.95
    expected = 1 - (1 - exact**8) ** 16
    met = np.array([tuple(pair) in found for pair in pairs.tolist()])
    for chosen in (exact < 0.8, exact >= 0.8):
        deviation = np.sqrt((expected[chosen] * (1 - expected[chosen])).sum()) / chosen.sum()
        assert abs(met[chosen].mean() - expected[chosen].mean()) < 4 * deviation + 0.005
    assert met[exact >= 0.85].mean() >= 0.98


@pytest.mark.parametrize("script", SCRIPTS)
def test_four_other_characters_do_not_hide_a_duplicate(script: str) -> None:
    """Of 2,000 without a space or a mark, which are one word of Python's."""
    rng = random.Random(script)
    text = rng.choices(SCRIPTS[script], k=2000)
    edited = [*text]
    for spot in (100, 700, 1300, 1900):
        edited[spot] = rng.choice([letter for letter in SCRIPTS[script] if letter != text[spot]])
    both = ["".join(text), "".join(edited)]
    assert candidate_pairs(minhash_signatures(both)).tolist() == [[0, 1]]
    assert exact_jaccard(both, np.array([[0, 1]]))[0] == pytest.approx((1996 - 20) / (1996 + 20), abs=0.02)


# ---- exact similarity ----


@given(documents, st.integers(1, 6), st.randoms(use_true_random=False))
def test_exact_similarity_is_that_of_the_sets(texts: list[str], ngram: int, rng: random.Random) -> None:
    pairs = [(rng.randrange(len(texts)), rng.randrange(len(texts))) for _ in range(6)] if texts else []
    found = exact_jaccard(texts, np.array(pairs, np.int64).reshape(-1, 2), ngram=ngram)
    assert found.dtype == np.float64
    assert found.tolist() == [jaccard(texts[a], texts[b], ngram) for a, b in pairs]


def test_exact_similarity_depends_neither_on_threads_nor_on_packing() -> None:
    texts, pairs = planted(0.6, 50)
    expected = exact_jaccard(texts, pairs, threads=1)
    for threads in (2, 7):
        np.testing.assert_array_equal(exact_jaccard(packed(texts), pairs, threads=threads), expected)


def test_what_has_no_words_resembles_nothing() -> None:
    texts = ["", " .,", "word", "", "word"]
    signatures = minhash_signatures(texts)
    assert (signatures == EMPTY).all(axis=1).tolist() == [True, True, False, True, False]
    assert candidate_pairs(signatures).tolist() == [[2, 4]]
    assert (band_hashes(signatures) == NO_BUCKET).all(axis=1).tolist() == [True, True, False, True, False]
    pairs = np.array([[0, 1], [0, 3], [0, 2], [2, 4]])
    assert exact_jaccard(texts, pairs).tolist() == [0, 0, 0, 1]
    assert estimated_jaccard(signatures[pairs[:, 0]], signatures[pairs[:, 1]]).tolist() == [0, 0, 0, 1]


# ---- bands and buckets ----


def reference_bucket_pairs(hashes: list[int], ids: list[int], limit: int) -> list[list[int]]:
    buckets = defaultdict(set)
    for value, name in zip(hashes, ids, strict=True):
        if value != NO_BUCKET:
            buckets[value].add(name)
    found = {
        (a, b)
        for bucket in buckets.values()
        for (i, a), (j, b) in combinations(enumerate(sorted(bucket)), 2)
        if i < limit or j - i <= NEIGHBOURS
    }
    return [list(pair) for pair in sorted(found)]


hash_values = st.sampled_from([0, 1, 2, 2**63, NO_BUCKET - 1, NO_BUCKET])
entries = st.lists(st.tuples(hash_values, st.integers(-5, 40) | st.just(2**40)), max_size=120)


@given(entries, st.integers(1, 12) | st.just(256))
def test_bucket_pairs_are_those_of_the_definition(entries: list[tuple[int, int]], limit: int) -> None:
    hashes, ids = [value for value, _ in entries], [name for _, name in entries]
    found = bucket_pairs(np.array(hashes, np.uint64), np.array(ids, np.int64), limit=limit)
    assert found.dtype == np.int64
    assert found.shape[1] == 2
    assert found.tolist() == reference_bucket_pairs(hashes, ids, limit)


@pytest.mark.parametrize("limit", [1, 5, 49, 50, 51])
def test_a_crowded_bucket_has_the_pairs_of_the_definition(limit: int) -> None:
    ids = np.random.default_rng(2).permutation(50) * 3
    found = bucket_pairs(np.full(50, 9, np.uint64), ids, limit=limit)
    assert found.tolist() == reference_bucket_pairs([9] * 50, ids.tolist(), limit)


def test_many_buckets_in_any_order() -> None:
    """More entries than are sorted at once, of hashes spread over all 64 bits."""
    rng = np.random.default_rng(5)
    hashes = rng.integers(0, 2**64, 6000, np.uint64)[rng.integers(0, 6000, 20_000)]
    ids = rng.permutation(20_000)
    found = bucket_pairs(hashes, ids)
    assert found.tolist() == reference_bucket_pairs(hashes.tolist(), ids.tolist(), 256)
    order = rng.permutation(20_000)
    np.testing.assert_array_equal(bucket_pairs(hashes[order], ids[order]), found)


@pytest.mark.parametrize(("bands", "rows"), [(1, 1), (4, 3), (1, 12), (12, 1)])
def test_candidates_are_the_pairs_of_all_bands(bands: int, rows: int) -> None:
    signatures = np.random.default_rng(7).integers(0, 3, (60, 12), np.uint32)
    signatures[[3, 8]] = EMPTY
    hashes = band_hashes(signatures, bands=bands, rows=rows)
    assert hashes.shape == (60, bands)
    assert hashes.dtype == np.uint64
    expected = set()
    for band in range(bands):
        rows_of_band = [tuple(values) for values in signatures[:, band * rows : (band + 1) * rows].tolist()]
        same = {
            (i, j) for i, j in combinations(range(60), 2) if rows_of_band[i] == rows_of_band[j] and {i, j} != {3, 8}
        }
        by_hash = bucket_pairs(hashes[:, band], np.arange(60))
        assert set(map(tuple, by_hash.tolist())) == same
        expected |= same
    for threads in (1, 2, 5):
        found = candidate_pairs(signatures, bands=bands, rows=rows, threads=threads)
        assert found.tolist() == [list(pair) for pair in sorted(expected)]


def test_equal_values_in_different_bands_have_different_hashes() -> None:
    hashes = band_hashes(np.full((1, 32), 7, np.uint32), bands=8, rows=4)
    assert len(set(hashes[0].tolist())) == 8


def test_crowded_bands_stay_connected() -> None:
    """1000 equal signatures: far fewer pairs than their half million, and one cluster."""
    signatures = np.tile(minhash_signatures(["the same few words over and over"]), (1000, 1))
    pairs = candidate_pairs(signatures, limit=10)
    assert len(pairs) < 20 * 1000
    assert set(clusters(pairs, 1000).tolist()) == {0}


@given(documents)
def test_estimates_are_shares_of_equal_values(texts: list[str]) -> None:
    signatures = minhash_signatures(texts, num_perm=24)
    found = estimated_jaccard(signatures, signatures[::-1])
    assert found.dtype == np.float32
    expected = ((signatures == signatures[::-1]) & (signatures != EMPTY)).mean(axis=1, dtype=np.float32)
    np.testing.assert_array_equal(found, expected)


# ---- clusters ----


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_clusters_are_the_components(graph: tuple[int, list[tuple[int, int]]]) -> None:
    n, edges = graph
    names = list(range(n))
    for _ in range(n):  # the least name spreads by one edge at least each time
        for a, b in edges:
            names[a] = names[b] = min(names[a], names[b])
    found = clusters(np.array(edges, np.int64).reshape(-1, 2), n)
    assert found.dtype == np.int64
    assert found.tolist() == names


def test_a_long_chain_in_the_worst_order_is_one_cluster() -> None:
    n = 200_000
    chain = np.stack([np.arange(n - 1), np.arange(1, n)], axis=1)
    for pairs in (chain, chain[::-1], np.random.default_rng(1).permutation(chain)):
        assert not clusters(pairs, n).any()


# ---- arguments ----


def test_nothing_gives_nothing() -> None:
    none = minhash_signatures([])
    assert none.shape == (0, 128)
    assert candidate_pairs(none).shape == (0, 2)
    assert band_hashes(none).shape == (0, 16)
    assert bucket_pairs(np.zeros(0, np.uint64), np.zeros(0, np.int64)).shape == (0, 2)
    assert estimated_jaccard(none, none).shape == (0,)
    assert exact_jaccard([], np.zeros((0, 2), np.int64)).shape == (0,)
    assert clusters(np.zeros((0, 2), np.int64), 0).shape == (0,)
    assert clusters(np.zeros((0, 2), np.int64), 3).tolist() == [0, 1, 2]


signature = np.zeros((2, 8), np.uint32)
index_pair = np.array([[0, 1]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: minhash_signatures(["a"], num_perm=0), "num_perm"),
        (lambda: minhash_signatures(["a"], num_perm=2**40), "num_perm"),
        (lambda: minhash_signatures(["a"], ngram=0), "ngram"),
        (lambda: minhash_signatures(["a"], ngram=2**40), "ngram"),
        (lambda: minhash_signatures(["a"], seed=-1), "seed"),
        (lambda: minhash_signatures(["a"], threads=-1), "threads"),
        (lambda: minhash_signatures(["fine", "\ud800"]), "surrogates"),
        (lambda: exact_jaccard(["a", "b"], index_pair, ngram=0), "ngram"),
        (lambda: exact_jaccard(["a"], index_pair), "index 1 of 1"),
        (lambda: exact_jaccard(["a", "b"], -index_pair), "index -1 of 2"),
        (lambda: exact_jaccard(["a", "b"], np.array([0, 1])), "2 dimensions"),
        (lambda: exact_jaccard(["a", "b"], np.zeros((1, 3), np.int64)), "two columns"),
        (lambda: clusters(index_pair, 1), "index 1 of 1"),
        (lambda: clusters(index_pair, -1), "n must be"),
        (lambda: candidate_pairs(signature, bands=2, rows=5), "bands=2 and rows=5"),
        (lambda: candidate_pairs(signature, bands=0), "bands"),
        (lambda: candidate_pairs(signature, limit=0), "limit"),
        (lambda: candidate_pairs(signature[0]), "2 dimensions"),
        (lambda: band_hashes(signature, bands=2**15, rows=2**15), "bands=32768"),
        (lambda: bucket_pairs(np.zeros(2, np.uint64), np.zeros(1, np.int64)), "2 hashes, but 1 ids"),
        (lambda: estimated_jaccard(signature, signature[:, :4]), "same shape"),
        (lambda: _dedup.minhash(_dedup.Texts(["a"]), 8, 5, 1, 1, "abacus"), "abacus"),
    ],
)
def test_wrong_values_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: minhash_signatures("one string"),
        lambda: minhash_signatures([b"bytes"]),  # type: ignore[list-item]
        lambda: minhash_signatures(PackedTexts("a string", np.array([0, 1]))),  # type: ignore[arg-type]
        lambda: minhash_signatures(PackedTexts(b"text", np.array([0, 4], np.int32))),  # type: ignore[arg-type]
        lambda: band_hashes(signature.astype(np.int64)),  # type: ignore[arg-type]
        lambda: clusters(index_pair.astype(np.float64), 2),  # type: ignore[arg-type]
    ],
)
def test_wrong_kinds_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([], "one element more"),
        ([0, 3, 2, 4], "not decrease"),
        ([-1, 4], "not be negative"),
        ([0, 5], "4 bytes"),
        ([[0, 4]], "1 dimension"),
    ],
)
def test_malformed_offsets_are_refused(offsets: list, message: str) -> None:
    for function in (minhash_signatures, lambda texts: exact_jaccard(texts, index_pair)):
        with pytest.raises(ValueError, match=message):
            function(PackedTexts(b"text", np.array(offsets, np.int64)))
    with pytest.raises(ValueError, match="contiguous"):
        minhash_signatures(PackedTexts(np.zeros((4, 4), np.uint8)[:, ::2], np.array([0, 1])))


def test_a_blob_stays_while_it_is_read() -> None:
    """Another thread cannot resize it while it is read; afterwards it can."""
    blob = bytearray(b"word " * 2_000_000)
    texts = _dedup.Texts(blob, np.array([0, len(blob)]))
    reader = threading.Thread(target=_dedup.minhash, args=(texts, 128, 5, 1, 1))
    reader.start()
    with pytest.raises(BufferError):
        blob.clear()
    reader.join()
    del reader, texts
    blob.clear()
