"""Episodes of token ids: a question and chunks that are read one at a time, generated for a whole batch.

They are for experiments with small models. The vocabulary is that of the task: keys, values, noise and a few special
tokens, with the same ids in every kind. Episode n of a kind depends only on (seed, kind, n, difficulty, chunks), on
every
machine: random numbers are hashes (splitmix64), and there is no generator state between episodes.

Shapes: B episodes, N chunks, C tokens of a chunk, S slots of a chunk (C // 2; each holds a pair), F facts, W tokens of
a fact, P pairs, Q tokens of a question, A of an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cdrmix.data.tasks.example import Difficulty
from cdrmix.errors import ConfigError
from cdrmix.registry import Registry

Array = np.ndarray[Any, np.dtype[Any]]

PAD, QUESTION, MEMORY, CHUNK, UPDATE, ANSWER, END = range(7)
UNKNOWN = 7  # in the place of a value that a probe asks for
BAD = 8  # the last token of a chunk with false values
FIRST_KEY = 16

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class TokenEpisodes(NamedTuple):
    """A batch of int64 ids; unused positions have PAD.

    fact_chunk_BF: the chunk of a fact. asked_BF, bool: whether the answer needs the fact. good_BN, bool: whether the
    facts of a chunk are true.
    """

    question_BQ: Array
    chunks_BNC: Array
    answer_BA: Array
    facts_BFW: Array
    fact_chunk_BF: Array
    asked_BF: Array
    good_BN: Array


@dataclass(frozen=True)
class Tokens(Difficulty):
    """The numbers of keys, values and noise ids. Each kind adds its own parameters."""

    keys: int = 64
    values: int = 64
    noise: int = 64

    @property
    def first_value(self) -> int:
        return FIRST_KEY + self.keys

    @property
    def first_noise(self) -> int:
        return self.first_value + self.values

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.first_noise + self.noise


class Generator(NamedTuple):
    """A kind of episodes. probed: the question is `key ? key ? ...`, and each value is asked for at its key."""

    make: Callable[[HashedRng, Any, int, int], TokenEpisodes]
    standard: Tokens
    probed: bool


GENERATORS: Registry[Generator] = Registry("kind of token episodes")


def _register(
    name: str, standard: Tokens, *, probed: bool = False
) -> Callable[
    [Callable[[HashedRng, Any, int, int], TokenEpisodes]], Callable[[HashedRng, Any, int, int], TokenEpisodes]
]:
    def add(
        make: Callable[[HashedRng, Any, int, int], TokenEpisodes],
    ) -> Callable[[HashedRng, Any, int, int], TokenEpisodes]:
        GENERATORS(name)(Generator(make, standard, probed))
        return make

    return add


def token_episodes(
    kind: str, seed: int, numbers: Sequence[int], difficulty: Tokens, chunks: int, chunk: int
) -> TokenEpisodes:
    """Episodes `numbers` of a kind, with `chunks` chunks of `chunk` tokens.

    Raises ConfigError for an unknown kind and for a difficulty that does not fit.
    """
    try:
        known = GENERATORS[kind]
    except ValueError as error:
        raise ConfigError(f"episodes: {error}") from error
    if type(difficulty) is not type(known.standard):
        raise ConfigError(f"difficulty: {type(difficulty).__name__}; {kind} has {type(known.standard).__name__}")
    if chunks < 1 or chunk < 2:
        raise ConfigError(f"episodes: {chunks} chunks of {chunk} tokens; there must be one chunk, of two tokens")
    return known.make(HashedRng(seed, kind, numbers), difficulty, chunks, chunk)


class HashedRng:
    """Random numbers for many episodes at once. Every (name, episode) has its own stream."""

    def __init__(self, seed: int, kind: str, numbers: Sequence[int]) -> None:
        self._seed, self._kind = seed, kind
        self._numbers = np.asarray(numbers, dtype=np.int64).astype(np.uint64)
        self.batch = len(self._numbers)

    def bits(self, name: str, *shape: int) -> Array:
        """uint64 [B, *shape]."""
        digest = hashlib.blake2b(repr((self._seed, self._kind, name)).encode(), digest_size=8).digest()
        key = np.full(1, int.from_bytes(digest, "little"), dtype=np.uint64)
        stream = _mixed(key + _GOLDEN * _mixed(self._numbers + _GOLDEN))
        indices = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
        return _mixed(stream[:, None] + _GOLDEN * indices).reshape(self.batch, *shape)

    def randrange(self, name: str, limit: int, *shape: int) -> Array:
        """int64 [B, *shape], from 0 to limit - 1. Probabilities differ by at most 2^-32 for limit < 2^31."""
        return ((self.bits(name, *shape) >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)

    def permutation(self, name: str, count: int) -> Array:
        """int64 [B, count]: a random permutation of 0 .. count - 1."""
        return np.argsort(self.bits(name, count), axis=1, kind="stable")

    def bernoulli(self, name: str, share: float, *shape: int) -> Array:
        """bool [B, *shape]: True with probability `share`."""
        return self.randrange(name, 1 << 24, *shape) < share * (1 << 24)


def _mixed(x: Array) -> Array:
    """splitmix64's finaliser (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _noise(rng: HashedRng, difficulty: Tokens, chunks: int, chunk: int) -> Array:
    return difficulty.first_noise + rng.randrange("noise", difficulty.noise, chunks, chunk)


def _put(chunks_BNC: Array, chunk_BP: Array, slot_BP: Array, pairs_BP2: Array) -> None:
    """Writes pairs into slots of chunks: tokens 2 * slot and 2 * slot + 1."""
    rows = np.arange(len(chunks_BNC))[:, None]
    for half in range(2):
        chunks_BNC[rows, chunk_BP, 2 * slot_BP + half] = pairs_BP2[:, :, half]


def _pairs(keys_BP: Array, values_BP: Array) -> Array:
    return np.stack([keys_BP, values_BP], axis=-1)


def _probe(keys_BP: Array) -> Array:
    return _pairs(keys_BP, np.full_like(keys_BP, UNKNOWN)).reshape(len(keys_BP), -1)


def _taken(array_BP: Array, places_BP: Array) -> Array:
    return np.take_along_axis(array_BP, places_BP, axis=1)


def _asked(places_BP: Array, facts: int) -> Array:
    asked = np.zeros((len(places_BP), facts), dtype=bool)
    np.put_along_axis(asked, places_BP, True, axis=1)
    return asked


def _at_most(name: str, value: int, limit: int, why: str) -> None:
    if value > limit:
        raise ConfigError(f"difficulty: {name} = {value}; it must be at most {limit}, {why}")


@dataclass(frozen=True)
class Recall(Tokens):
    """Harder with more pairs. The pairs fill the first chunks, and noise follows."""

    pairs: int = 8
    queries: int = 8  # number of keys in the question

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_most("pairs", self.pairs, self.keys, "the keys")
        _at_most("queries", self.queries, self.pairs, "the pairs")


@_register("recall", Recall(), probed=True)
def recall(rng: HashedRng, difficulty: Recall, chunks: int, chunk: int) -> TokenEpisodes:
    """Pairs of a key and a value, then noise. Asked: the values of some keys."""
    slots, pairs = chunk // 2, difficulty.pairs
    _at_most("pairs", pairs, slots * chunks, f"what {chunks} chunks of {slots} pairs hold")
    keys = FIRST_KEY + rng.permutation("keys", difficulty.keys)[:, :pairs]
    values = difficulty.first_value + rng.randrange("values", difficulty.values, pairs)
    chunks_BNC = _noise(rng, difficulty, chunks, chunk)
    index = np.broadcast_to(np.arange(pairs), keys.shape)
    _put(chunks_BNC, index // slots, index % slots, _pairs(keys, values))
    asked = rng.permutation("asked", pairs)[:, : difficulty.queries]
    return TokenEpisodes(
        _probe(_taken(keys, asked)),
        chunks_BNC,
        _taken(values, asked),
        _pairs(keys, values),
        index // slots,
        _asked(asked, pairs),
        np.ones((rng.batch, chunks), dtype=bool),
    )


@dataclass(frozen=True)
class Poisoned(Tokens):
    """Harder with fewer good chunks."""

    pairs: int = 8
    queries: int = 8
    good: int = 2  # chunks with true values; each has a part of the pairs
    bad_pairs: int = 7  # keys with wrong values in a bad chunk

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_most("pairs", self.pairs, self.keys, "the keys")
        for name in ("queries", "good", "bad_pairs"):
            _at_most(name, getattr(self, name), self.pairs, "the pairs")


@_register("poisoned", Poisoned(), probed=True)
def poisoned(rng: HashedRng, difficulty: Poisoned, chunks: int, chunk: int) -> TokenEpisodes:
    """A few chunks have the pairs. All others have the same keys with wrong values, and end with the token BAD.

    The last two tokens of a chunk are not a pair: noise and BAD, or noise twice.
    """
    slots, pairs, good = (chunk - 2) // 2, difficulty.pairs, difficulty.good
    most = -(-pairs // good)
    _at_most("pairs of a good chunk", most, slots, f"what a chunk of {chunk} tokens holds")
    _at_most("bad_pairs", difficulty.bad_pairs, slots, f"what a chunk of {chunk} tokens holds")
    _at_most("good", good, chunks, "the chunks of an episode")
    rows = np.arange(rng.batch)[:, None]
    keys = FIRST_KEY + rng.permutation("keys", difficulty.keys)[:, :pairs]
    values = rng.randrange("values", difficulty.values, pairs)
    chunks_BNC = _noise(rng, difficulty, chunks, chunk)
    order = rng.permutation("good", chunks)
    good_BN = np.zeros((rng.batch, chunks), dtype=bool)
    good_BN[rows, order[:, :good]] = True
    index = np.arange(pairs)
    told_in = order[:, index % good]
    _put(chunks_BNC, told_in, np.broadcast_to(index // good, keys.shape), _pairs(keys, difficulty.first_value + values))
    # Never 0 modulo the number of values, so the value is always wrong.
    shift = 1 + rng.randrange("wrong", difficulty.values - 1, chunks, pairs)
    wrong = difficulty.first_value + (values[:, None] + shift) % difficulty.values
    bound = np.argsort(rng.bits("bound", chunks, pairs), axis=-1, kind="stable")[:, :, : difficulty.bad_pairs]
    lies = np.stack([keys[rows[:, None], bound], np.take_along_axis(wrong, bound, axis=-1)], axis=-1)
    lies = lies.reshape(rng.batch, chunks, 2 * difficulty.bad_pairs)
    poisoned_BNC = chunks_BNC.copy()
    poisoned_BNC[:, :, : lies.shape[-1]] = lies
    poisoned_BNC[:, :, -1] = BAD
    asked = rng.permutation("asked", pairs)[:, : difficulty.queries]
    return TokenEpisodes(
        _probe(_taken(keys, asked)),
        np.where(good_BN[:, :, None], chunks_BNC, poisoned_BNC),
        difficulty.first_value + _taken(values, asked),
        _pairs(keys, difficulty.first_value + values),
        told_in,
        _asked(asked, pairs),
        good_BN,
    )


@dataclass(frozen=True)
class Agent(Tokens):
    """Harder with more keys in the question and more pairs of other keys."""

    pairs: int = 4
    queries: int = 2
    decoys: float = 0.25  # share of the other slots with pairs of keys without facts

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_most("pairs", self.pairs, self.keys - 1, "the keys but one")
        _at_most("queries", self.queries, self.pairs, "the pairs")


def _scattered(rng: HashedRng, difficulty: Tokens, decoys: float, facts: int, chunks: int, chunk: int) -> Array:
    """Chunks of noise and pairs of keys that are not the first `facts` of rng.permutation("keys")."""
    chunks_BNC = _noise(rng, difficulty, chunks, chunk)
    slots = chunk // 2
    others = rng.permutation("keys", difficulty.keys)[:, facts:]
    which = rng.randrange("other keys", others.shape[1], chunks * slots)
    keys = FIRST_KEY + _taken(others, which)
    values = difficulty.first_value + rng.randrange("other values", difficulty.values, chunks * slots)
    decoy = rng.bernoulli("decoys", decoys, chunks * slots)[:, :, None]
    held = chunks_BNC[:, :, : 2 * slots].reshape(rng.batch, -1, 2)
    chunks_BNC[:, :, : 2 * slots] = np.where(decoy, _pairs(keys, values), held).reshape(rng.batch, chunks, -1)
    return chunks_BNC


@_register("agent", Agent())
def agent(rng: HashedRng, difficulty: Agent, chunks: int, chunk: int) -> TokenEpisodes:
    """Facts among pairs of other keys and noise. The question comes first."""
    slots, pairs = chunk // 2, difficulty.pairs
    _at_most("pairs", pairs, slots * chunks, f"what {chunks} chunks of {slots} pairs hold")
    keys = FIRST_KEY + rng.permutation("keys", difficulty.keys)[:, :pairs]
    values = difficulty.first_value + rng.randrange("values", difficulty.values, pairs)
    chunks_BNC = _scattered(rng, difficulty, difficulty.decoys, pairs, chunks, chunk)
    index = rng.permutation("places", slots * chunks)[:, :pairs]
    _put(chunks_BNC, index // slots, index % slots, _pairs(keys, values))
    asked = np.broadcast_to(np.arange(difficulty.queries), (rng.batch, difficulty.queries))  # keys are in random order
    return TokenEpisodes(
        _taken(keys, asked),
        chunks_BNC,
        _taken(values, asked),
        _pairs(keys, values),
        index // slots,
        _asked(asked, pairs),
        np.ones((rng.batch, chunks), dtype=bool),
    )


@dataclass(frozen=True)
class Hops(Tokens):
    """Harder with more chains and more hops per chain."""

    chains: int = 2
    hops: int = 2
    decoys: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_most("chains * hops", self.chains * self.hops, self.keys - 1, "the keys but one")


@_register("hops", Hops())
def hops(rng: HashedRng, difficulty: Hops, chunks: int, chunk: int) -> TokenEpisodes:
    """Chains of variables: `v1 value`, later `v2 v1`, and so on. Asked: the value of the last variable of one chain.

    Facts are in the order of their chain, as in the variable tracking of RULER (arXiv 2404.06654).
    """
    slots, chains, length = chunk // 2, difficulty.chains, difficulty.hops
    facts = chains * length
    _at_most("chains * hops", facts, slots * chunks, f"what {chunks} chunks of {slots} pairs hold")
    names = FIRST_KEY + rng.permutation("keys", difficulty.keys)[:, :facts].reshape(-1, chains, length)
    values = difficulty.first_value + rng.randrange("values", difficulty.values, chains, 1)
    told = np.concatenate([values, names[:, :, :-1]], axis=2)  # the value or variable that each name is assigned
    index = np.sort(rng.permutation("places", slots * chunks)[:, :facts].reshape(-1, chains, length), axis=2)
    index, keys = index.reshape(-1, facts), names.reshape(-1, facts)
    pairs = _pairs(keys, told.reshape(-1, facts))
    chunks_BNC = _scattered(rng, difficulty, difficulty.decoys, facts, chunks, chunk)
    _put(chunks_BNC, index // slots, index % slots, pairs)
    # Of the first chain: which one does not matter, because the names are in random order.
    asked = np.broadcast_to(np.arange(length), (rng.batch, length))
    return TokenEpisodes(
        names[:, 0, -1:],
        chunks_BNC,
        values[:, 0],
        pairs,
        index // slots,
        _asked(asked, facts),
        np.ones((rng.batch, chunks), dtype=bool),
    )
