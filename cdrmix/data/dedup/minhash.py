r"""Near-duplicate texts: MinHash signatures, candidates by bands, exact similarity, clusters; SimHash fingerprints.

The words of a text are `re.findall(r"\w+", text.lower())` of Unicode 14, independent of the Python version, but in
scripts that are written without spaces (Han, Hiragana, Katakana, Thai, Lao, Khmer, Myanmar) each character is one. A
shingle is `ngram` consecutive words, or the whole text if it has fewer. The similarity of two texts is the Jaccard
similarity of their sets of shingles, |A and B| / |A or B|. The code is in csrc/. The results do not depend on the
number of threads, the instruction set of the processor or the order of the texts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix import _dedup

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on


BLOCK = 2**22  # fingerprints of one split that are joined at a time: 32 MiB; the join takes a multiple of that
EMPTY = 2**32 - 1  # every value of the signature of a text without words
NO_BUCKET = 2**64 - 1  # every band hash of a text without words: it is in no bucket
MAX_PERMUTATIONS = 2**16
MAX_SHINGLE_WORDS = 2**16
NEIGHBOURS = 8  # ids before an id that it is paired with in a bucket of more than `limit` ids


class PackedTexts(NamedTuple):
    """UTF-8 texts one after the other: text i is blob[offsets[i]:offsets[i + 1]].

    blob: any contiguous bytes-like object, such as a buffer of Arrow. It is not copied and must not change meanwhile.
    offsets: int64 or uint64 [n + 1], ascending; the first need not be 0, nor the last one the size of the blob.
    """

    blob: Buffer
    offsets: NDArray[np.int64] | NDArray[np.uint64]


Texts = Sequence[str] | PackedTexts


def minhash_signatures(
    texts: Texts, *, num_perm: int = 128, ngram: int = 5, seed: int = 1, threads: int = 0
) -> NDArray[np.uint32]:
    """The MinHash signature of each text, uint32 [n, num_perm] (formula: csrc/minhash.hpp; Broder 1997).

    Two signatures agree on a value with a probability of the texts' similarity. A text of no words has EMPTY as every
    value. `threads` 0 means one a core. Raises ValueError for arguments out of range, offsets that do not fit their
    blob and text that UTF-8 cannot hold (lone surrogates), TypeError for what is no text.
    """
    _check_range("num_perm", num_perm, 1, MAX_PERMUTATIONS)
    _check_range("seed", seed, 0, 2**64 - 1)
    return _dedup.minhash(_texts(texts), num_perm, _checked_ngram(ngram), seed, _count_of(threads))


def band_hashes(signatures: NDArray[np.uint32], *, bands: int = 16, rows: int = 8) -> NDArray[np.uint64]:
    """The hash of each band of each signature, uint64 [n, bands]: of the band's number and its `rows` values.

    Values beyond bands * rows are not looked at. A text without words has NO_BUCKET, and no other text has that.
    Raises ValueError for bands that do not fit the signatures, TypeError for another dtype.
    """
    _check_range("bands", bands, 1, MAX_PERMUTATIONS)
    _check_range("rows", rows, 1, MAX_PERMUTATIONS)
    return _dedup.band_hashes(np.ascontiguousarray(signatures), bands, rows)


def bucket_pairs(hashes: NDArray[np.uint64], ids: NDArray[np.int64], *, limit: int = 256) -> NDArray[np.int64]:
    """The pairs of different ids whose hashes are equal, int64 [m, 2]: first the smaller id; sorted, each one once.

    `hashes` and `ids` are of length n, in any order. NO_BUCKET equals nothing. Of more than `limit` ids with one
    hash, in ascending order, each is paired with the first `limit` ones and the NEIGHBOURS before it: all of them stay
    connected, with fewer pairs than their square. Raises ValueError for arrays that do not fit one another.
    """
    _check_range("limit", limit, 1, 2**62)
    return _dedup.bucket_pairs(np.ascontiguousarray(hashes), np.ascontiguousarray(ids), limit)


def candidate_pairs(
    signatures: NDArray[np.uint32], *, bands: int = 16, rows: int = 8, limit: int = 256, threads: int = 0
) -> NDArray[np.int64]:
    """The pairs (i, j), i < j, of signatures that agree on all of a band, int64 [m, 2], sorted, each one once.

    A pair of similarity s is among them with probability 1 - (1 - s^rows)^bands, but for the crowded bands of which
    `bucket_pairs` tells. Texts without words are in no pair. Raises ValueError as `band_hashes` does.
    """
    _check_range("bands", bands, 1, MAX_PERMUTATIONS)
    _check_range("rows", rows, 1, MAX_PERMUTATIONS)
    _check_range("limit", limit, 1, 2**62)
    return _dedup.candidate_pairs(np.ascontiguousarray(signatures), bands, rows, limit, _count_of(threads))


def estimated_jaccard(signatures_a: NDArray[np.uint32], signatures_b: NDArray[np.uint32]) -> NDArray[np.float32]:
    """The similarity of text a[i] and text b[i] by their signatures, uint32 [m, num_perm] each: float32 [m].

    The share of equal values: without bias, with a standard deviation of sqrt(s (1 - s) / num_perm). 0 where a text
    has no words. Raises ValueError for different shapes.
    """
    return _dedup.estimated_jaccard(np.ascontiguousarray(signatures_a), np.ascontiguousarray(signatures_b))


def exact_jaccard(texts: Texts, pairs: NDArray[np.int64], *, ngram: int = 5, threads: int = 0) -> NDArray[np.float64]:
    """The similarity of each pair of texts, float64 [m], of index pairs int64 [m, 2]; 0 where both have no words.

    Shingles are compared by 64-bit hashes. Needs 8 bytes a shingle of the texts that are in a pair. Raises ValueError
    for an index that is none and as `minhash_signatures` does.
    """
    return _dedup.exact_jaccard(_texts(texts), np.ascontiguousarray(pairs), _checked_ngram(ngram), _count_of(threads))


def clusters(pairs: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Of each of 0 .. n - 1 the least index that `pairs`, int64 [m, 2], connect it with, int64 [n]: its cluster's name.

    Raises ValueError for an index outside 0 .. n - 1.
    """
    _check_range("n", n, 0, 2**62)
    return _dedup.clusters(np.ascontiguousarray(pairs), n)


def simhash(texts: Iterable[str] | PackedTexts, *, threads: int = 0) -> NDArray[np.uint64]:
    """The fingerprint of each text's word frequencies, uint64 [n] (csrc/simhash.hpp; Charikar 2002).

    Texts that share nearly all of their words differ in few bits: a cheap estimate, not proof. `threads` 0 means one a
    core. Raises ValueError and TypeError as `minhash_signatures` does.
    """
    return _dedup.simhash(_texts(texts), _count_of(threads))


def near_duplicates(
    fingerprints_a: NDArray[np.uint64], fingerprints_b: NDArray[np.uint64], *, radius: int = 3
) -> NDArray[np.int64]:
    """Every pair (i, j) of fingerprints within `radius` bits, int64 [m, 2], sorted.

    Raises ValueError for a radius outside 0..63 or arrays of more than one dimension, TypeError for another dtype.
    """
    return _dedup.near_duplicates(fingerprints_a, fingerprints_b, radius)


def contaminated(held_out: NDArray[np.uint64], training: NDArray[np.uint64], *, radius: int = 3) -> NDArray[np.bool_]:
    """Which of the held-out fingerprints have a training fingerprint within `radius` bits, bool [n].

    Equal fingerprints are joined once, so that boilerplate repeated n times costs one pair, not n * n.
    """
    unique, inverse = np.unique(held_out, return_inverse=True)
    pairs = near_duplicates(unique, np.unique(training), radius=radius)
    is_paired = np.zeros(len(unique), dtype=np.bool_)
    is_paired[pairs[:, 0]] = True
    return is_paired[inverse]


class FingerprintFile:
    """Any number of fingerprints in an open binary file of their own, 8 bytes each, read back in blocks."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def add(self, fingerprints: NDArray[np.uint64]) -> None:
        """Append an array, uint64 [n]."""
        self._file.write(fingerprints.tobytes())

    def blocks(self) -> Iterator[NDArray[np.uint64]]:
        """All that were added, in order, in arrays of BLOCK; what is added meanwhile is not seen."""
        position, end = 0, self._file.seek(0, os.SEEK_END)
        while position < end:
            self._file.seek(position)
            block = np.frombuffer(self._file.read(min(8 * BLOCK, end - position)), np.uint64)
            position += block.nbytes
            yield block


def count_contaminated(held_out: FingerprintFile, training: FingerprintFile, *, radius: int = 3) -> int:
    """How many of the held-out fingerprints have a training one within `radius` bits, block by block."""
    count = 0
    for block in held_out.blocks():
        found = np.zeros(len(block), np.bool_)
        for other in training.blocks():
            found |= contaminated(block, other, radius=radius)
        count += int(found.sum())
    return count


def _texts(texts: Iterable[str] | PackedTexts) -> _dedup.Texts:
    """The texts as the extension takes them."""
    if isinstance(texts, PackedTexts):
        return _dedup.Texts(texts.blob, texts.offsets)
    if isinstance(texts, str):
        raise TypeError("texts must be a sequence of strings, not one string; put it into a list")
    return _dedup.Texts(texts if isinstance(texts, list | tuple) else list(texts))


def _count_of(threads: int) -> int:
    """How many threads to start at most: as many as there are cores for 0."""
    _check_range("threads", threads, 0, 4096)
    return threads or len(os.sched_getaffinity(0))


def _checked_ngram(ngram: int) -> int:
    _check_range("ngram", ngram, 1, MAX_SHINGLE_WORDS)
    return ngram


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must be in {least}..{most}; found {value}")
