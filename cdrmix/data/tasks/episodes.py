"""Episodes of token ids: a question and chunks that are read one at a time, made for a whole batch at once.

For experiments with small models, whose vocabulary is the task's own: keys, values, noise and a few marks, the same
ids in every kind. Episode n of a kind is a function of (seed, kind, n, difficulty, chunks) alone, on every machine:
numbers are hashed (splitmix64), and no generator carries anything from one to the next.

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
UNKNOWN = 7  # stands where a probe asks for a value
BAD = 8  # the last token of a chunk that lies
FIRST_KEY = 16

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class TokenEpisodes(NamedTuple):
    """A batch: int64 ids, PAD where nothing stands.

    fact_chunk_BF: which chunk tells a fact. asked_BF, bool: whether the answer needs it. good_BN, bool: whether a chunk
    tells the truth.
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
    """How many keys, values and ids of noise there are; the rest of what makes an episode hard is a kind's own."""

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
        """Ids in all."""
        return self.first_noise + self.noise


class Generator(NamedTuple):
    """A kind of episodes. probed: the question is `key ? key ? ...`, and each value is to be told at its key."""

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
    """Episodes `numbers` of a kind, of so many chunks of `chunk` tokens.

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
    """Rng for many episodes at once: every (name of a draw, episode) has a stream of its own."""

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
        """int64 [B, *shape], from 0 to limit - 1; limit is below 2^31, so that none is likelier by more than 2^-32."""
        return ((self.bits(name, *shape) >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)

    def permutation(self, name: str, count: int) -> Array:
        """int64 [B, count]: the numbers below `count` in random order."""
        return np.argsort(self.bits(name, count), axis=1, kind="stable")

    def bernoulli(self, name: str, share: float, *shape: int) -> Array:
        """bool [B, *shape]: each True with probability `share`."""
        return self.randrange(name, 1 << 24, *shape) < share * (1 << 24)


def _mixed(x: Array) -> Array:
    """splitmix64's finaliser (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _noise(rng: HashedRng, difficulty: Tokens, chunks: int, chunk: int) -> Array:
    return difficulty.first_noise + rng.randrange("noise", difficulty.noise, chunks, chunk)


def _put(chunks_BNC: Array, chunk_BP: Array, slot_BP: Array, pairs_BP2: Array) -> None:
    """Writes pairs into slots of chunks: tokens 2 slot and 2 slot + 1."""
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
    """Harder with more pairs. They fill the first chunks, one behind another, and noise follows."""

    pairs: int = 8
    queries: int = 8  # keys that are asked for

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_most("pairs", self.pairs, self.keys, "the keys")
        _at_most("queries", self.queries, self.pairs, "the pairs")


@_register("recall", Recall(), probed=True)
def recall(rng: HashedRng, difficulty: Recall, chunks: int, chunk: int) -> TokenEpisodes:
    """Pairs of a key and a value, then noise; the values of some keys are asked for."""
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
    """Harder with fewer good chunks among many bad ones."""

    pairs: int = 8
    queries: int = 8
    good: int = 2  # chunks that tell the truth, each its part of the pairs
    bad_pairs: int = 7  # keys that a bad chunk binds to wrong values

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_most("pairs", self.pairs, self.keys, "the keys")
        for name in ("queries", "good", "bad_pairs"):
            _at_most(name, getattr(self, name), self.pairs, "the pairs")


@_register("poisoned", Poisoned(), probed=True)
def poisoned(rng: HashedRng, difficulty: Poisoned, chunks: int, chunk: int) -> TokenEpisodes:
    """A few chunks tell pairs, all others bind the same keys to wrong values; a mark ends each of those.

    The last two tokens of a chunk are no pair: noise and the mark, or noise twice.
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
    shift = 1 + rng.randrange(
        "wrong", difficulty.values - 1, chunks, pairs
    )  # never 0 modulo the values: wrong for sure
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
    """Harder with more keys asked for and more pairs about others."""

    pairs: int = 4
    queries: int = 2
    decoys: float = 0.25  # share of the other slots that hold pairs of keys that no fact is about

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_most("pairs", self.pairs, self.keys - 1, "the keys but one")
        _at_most("queries", self.queries, self.pairs, "the pairs")


def _scattered(rng: HashedRng, difficulty: Tokens, decoys: float, facts: int, chunks: int, chunk: int) -> Array:
    """Chunks of noise and pairs about keys that are not the first `facts` of rng.permutation("keys")."""
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
    """Facts anywhere among pairs of other keys and noise; the keys asked for are known from the beginning."""
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
    """Harder with more chains to tell apart and more hops of each."""

    chains: int = 2
    hops: int = 2
    decoys: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_most("chains * hops", self.chains * self.hops, self.keys - 1, "the keys but one")


@_register("hops", Hops())
def hops(rng: HashedRng, difficulty: Hops, chunks: int, chunk: int) -> TokenEpisodes:
    """Variables: `v1 value` somewhere, `v2 v1` later, and so on; the value of one chain's last variable is asked for.

    Facts are told in the order of their chain, as in RULER's variable tracking (arXiv 2404.06654).
    """
    slots, chains, length = chunk // 2, difficulty.chains, difficulty.hops
    facts = chains * length
    _at_most("chains * hops", facts, slots * chunks, f"what {chunks} chunks of {slots} pairs hold")
    names = FIRST_KEY + rng.permutation("keys", difficulty.keys)[:, :facts].reshape(-1, chains, length)
    values = difficulty.first_value + rng.randrange("values", difficulty.values, chains, 1)
    told = np.concatenate([values, names[:, :, :-1]], axis=2)  # of each name: what it is
    index = np.sort(rng.permutation("places", slots * chunks)[:, :facts].reshape(-1, chains, length), axis=2)
    index, keys = index.reshape(-1, facts), names.reshape(-1, facts)
    pairs = _pairs(keys, told.reshape(-1, facts))
    chunks_BNC = _scattered(rng, difficulty, difficulty.decoys, facts, chunks, chunk)
    _put(chunks_BNC, index // slots, index % slots, pairs)
    asked = np.broadcast_to(np.arange(length), (rng.batch, length))  # the first chain: names are in random order
    return TokenEpisodes(
        names[:, 0, -1:],
        chunks_BNC,
        values[:, 0],
        pairs,
        index // slots,
        _asked(asked, facts),
        np.ones((rng.batch, chunks), dtype=bool),
    )
