"""Implementations of MinHash signatures of texts: cdrmix and packages, 128 values of 5-word shingles each.

Each takes the texts as Python strings and uses one thread. Words are those of `re.findall(r"\\w+", text.lower())`,
except for gaoya, which splits and lowers by itself, and always adds the signatures to its index as well.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version

from cdrmix.data.dedup.minhash import minhash_signatures

OURS, RENSA, GAOYA, DATASKETCH = "cdrmix", "rensa R-MinHash", "gaoya", "datasketch"
NUM_PERM, NGRAM = 128, 5
BANDS, ROWS = 16, 8
WORD = re.compile(r"\w+")
BATCH = 256  # documents whose shingles exist at a time: those of 30 MB would be 4 million strings

Sign = Callable[[list[str]], object]


def shingles(text: str) -> list[str]:
    """In the order of the text, as in the packages' examples; a set would cost more and change nothing."""
    words = WORD.findall(text.lower())
    return [" ".join(words[i : i + NGRAM]) for i in range(max(1, len(words) - NGRAM + 1))] if words else []


def batches(texts: list[str]) -> Iterator[list[str]]:
    return (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))


def ours() -> Sign:
    return lambda texts: minhash_signatures(texts, num_perm=NUM_PERM, ngram=NGRAM, threads=1)


def rensa() -> Sign:
    """Full-set R-MinHash, many texts a call: the faster of its two methods, and the one that finds near-duplicates."""
    signer = importlib.import_module("rensa").RMinHash

    def sign(texts: list[str]) -> None:
        for batch in batches(texts):
            signer.digest_matrix_from_token_sets([shingles(text) for text in batch], NUM_PERM, 1)

    return sign


def gaoya() -> Sign:
    """gaoya, which takes raw text."""
    index = importlib.import_module("gaoya").minhash.MinHashStringIndex

    def sign(texts: list[str]) -> None:
        found = index(32, 0.8, BANDS, ROWS, None, "word", True, (NGRAM, NGRAM), id_container="vec")
        for number, text in enumerate(texts):
            found.insert_document(number, text)

    return sign


def datasketch() -> Sign:
    """With its own hash function, SHA-1."""
    signer = importlib.import_module("datasketch").MinHash

    def sign(texts: list[str]) -> None:
        for text in texts:
            signer(num_perm=NUM_PERM).update_batch([shingle.encode() for shingle in shingles(text)])

    return sign


PEERS: dict[str, Callable[[], Sign]] = {RENSA: rensa, GAOYA: gaoya, DATASKETCH: datasketch}


def present(without: tuple[str, ...]) -> tuple[dict[str, Sign], dict[str, str], dict[str, str]]:
    """The signers that can be measured, ours first; the version of each peer; and the reasons for the absent ones."""
    signers, versions, absent = {OURS: ours()}, {}, {}
    for name, make in PEERS.items():
        if any(part in name for part in without):
            absent[name] = "left out by --without"
            continue
        try:
            signers[name] = make()
        except ImportError as error:
            absent[name] = f"{error}; pip install 'cdrmix[peers]'"
        else:
            versions[name] = version(name.split()[0])
    return signers, versions, absent
