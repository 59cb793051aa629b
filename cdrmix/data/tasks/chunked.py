"""Episodes of text in chunks beyond recall: chunks with false facts, and chains of variables."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from cdrmix.data.tasks.example import ANSWER, Episode, Example, Fact, Length, listed, task
from cdrmix.data.tasks.recall import ChunkRecall
from cdrmix.data.tasks.rng import Rng, joined, paragraphs
from cdrmix.errors import ConfigError

LIE = "None of this is true."  # the last sentence of a chunk with false facts


@dataclass(frozen=True)
class Poisoned(ChunkRecall):
    """Recall over chunks, some of which have false values for the keys of others; harder with more of them."""

    bad: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bad >= self.chunks:
            raise ConfigError(f"difficulty: bad = {self.bad} of chunks = {self.chunks}; one must tell the truth")


def poisoned_episode(rng: Rng, difficulty: Poisoned) -> Episode:
    """As `chunk_recall`, but bad chunks have other codes for the same names, and their last sentence says so.

    The bad chunks are a random subset. Facts are in good chunks. A bad chunk has as many keys as a good chunk on
    average.
    """
    bad = tuple(sorted(rng.sample(difficulty.bad, 0, difficulty.chunks)))
    good = [chunk for chunk in range(difficulty.chunks) if chunk not in bad]
    names = rng.names(difficulty.pairs)
    values = rng.sample(2 * difficulty.pairs, 1000, max(10_000, 8 * difficulty.pairs))
    true, false = values[: difficulty.pairs], values[difficulty.pairs :]
    facts = tuple(Fact(name, str(value), rng.choice(good)) for name, value in zip(names, true, strict=True))
    asked = tuple(facts[index] for index in rng.sample(difficulty.queries, 0, difficulty.pairs))
    keys = listed([fact.key for fact in asked])
    question = f"What is the code of {keys}?" if len(asked) == 1 else f"What are the codes of {keys}?"
    lies = max(1, difficulty.pairs // len(good))
    chunks = []
    for chunk in range(difficulty.chunks):
        if chunk in bad:
            indices = rng.sample(lies, 0, difficulty.pairs)
            told = [f"The code of {names[index]} is {false[index]}." for index in indices]
        else:
            told = [f"The code of {fact.key} is {fact.value}." for fact in facts if fact.chunk == chunk]
        length = difficulty.characters // difficulty.chunks - 1 - (len(LIE) + 1 if chunk in bad else 0)
        text = rng.among_filler(told, length)
        chunks.append(joined([*filter(None, [text]), LIE]) if chunk in bad else text)
    answer = ", ".join(fact.value for fact in asked)
    return Episode(question, tuple(chunks), answer, facts, asked, bad, (LIE, "The code of "))


@task("poisoned_recall", Poisoned(), episode=poisoned_episode)
def poisoned_recall(rng: Rng, difficulty: Poisoned) -> Example:
    """The same episode as one text, with one paragraph per chunk. The last sentence of a paragraph decides."""
    made = poisoned_episode(rng, difficulty)
    return Example(f"{paragraphs(made.chunks)}\nQuestion: {made.question}\n{ANSWER}", "", f" {made.answer}")


@dataclass(frozen=True)
class ChunkHops(Length):
    """Chains of variables over chunks: harder with more chunks and with longer and more chains."""

    chunks: int = 4
    hops: int = 2  # assignments of a chain: the first gives a number, each other the variable before
    chains: int = 2


def hops_episode(rng: Rng, difficulty: ChunkHops) -> Episode:
    """`Let a = 1234.` somewhere, `Let b = a.` in the same chunk or a later one, and so on; the last one's value is
    asked for behind the last chunk: variable tracking as RULER's (arXiv 2404.06654), over chunks."""
    names = rng.names(difficulty.chains * difficulty.hops)
    values = rng.sample(difficulty.chains, 1000, 10_000)
    facts: list[Fact] = []
    for chain, value in enumerate(values):
        own = names[chain * difficulty.hops : (chain + 1) * difficulty.hops]
        indices = sorted(rng.randrange(difficulty.chunks) for _ in own)
        told = [str(value), *(before for before, _ in pairwise(own))]
        facts += [Fact(name, what, index) for name, what, index in zip(own, told, indices, strict=True)]
    asked = tuple(facts[: difficulty.hops])
    chunks = []
    for chunk in range(difficulty.chunks):
        told = [f"Let {fact.key} = {fact.value}." for fact in facts if fact.chunk == chunk]
        chunks.append(rng.among_filler(told, difficulty.characters // difficulty.chunks - 1))
    question = f"What is the value of {asked[-1].key}?"
    return Episode(question, tuple(chunks), str(values[0]), tuple(facts), asked, (), ("Let ",))


@task("chunk_hops", ChunkHops(), episode=hops_episode)
def chunk_hops(rng: Rng, difficulty: ChunkHops) -> Example:
    """The same episode as one text, a chunk a paragraph."""
    made = hops_episode(rng, difficulty)
    return Example(f"{paragraphs(made.chunks)}\nQuestion: {made.question}\n{ANSWER}", "", f" {made.answer}")
