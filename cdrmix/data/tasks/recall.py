"""Recall of key-value pairs: among filler, with changing values, and over chunks that are read one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from cdrmix.data.tasks.example import ANSWER, Episode, Example, Fact, Length, listed, task
from cdrmix.data.tasks.rng import Rng, paragraphs
from cdrmix.errors import ConfigError


@task("recall", Length())
def recall(rng: Rng, difficulty: Length) -> Example:
    """Key-value pairs among filler. Asked: the value of one key."""
    names = rng.names(max(2, difficulty.characters // 200))
    codes = [1000 + rng.randrange(9000) for _ in names]
    facts = [f"The code of {name} is {code}." for name, code in zip(names, codes, strict=True)]
    asked = rng.randrange(len(names))
    question = f"\nQuestion: What is the code of {names[asked]}?\n{ANSWER}"
    text = rng.among_filler(facts, difficulty.characters - len(question))
    return Example(text + question, "", f" {codes[asked]}")


@task("update", Length())
def update(rng: Rng, difficulty: Length) -> Example:
    """As recall, but values change. Asked: the latest value of one key."""
    names = rng.names(max(2, difficulty.characters // 600))
    codes: dict[str, int] = {}
    facts = []
    for index in range(max(4, difficulty.characters // 200)):
        name = names[index] if index < len(names) else rng.choice(names)  # every name once, then changes
        codes[name] = 1000 + rng.randrange(9000)
        facts.append(f"From now on the code of {name} is {codes[name]}.")
    asked = rng.choice(names)
    question = f"\nQuestion: What is the code of {asked} now?\n{ANSWER}"
    text = rng.among_filler(facts, difficulty.characters - len(question))
    return Example(text + question, "", f" {codes[asked]}")


@dataclass(frozen=True)
class ChunkRecall(Length):
    """Recall over chunks of equal length: harder with more chunks, more pairs and more keys in the question."""

    chunks: int = 4
    pairs: int = 8
    queries: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries > self.pairs:
            raise ConfigError(f"difficulty: queries = {self.queries} of pairs = {self.pairs}; ask for fewer")


def chunk_episode(rng: Rng, difficulty: ChunkRecall) -> Episode:
    """Pairs at random positions in chunks. Asked after the last chunk: the values of some keys.

    The setting of MemAgent (arXiv 2507.02259), a model with a memory that is overwritten. `facts` must be remembered,
    and `asked` are needed for the answer. The chunk of a fact tells how long it must be remembered.
    """
    names = rng.names(difficulty.pairs)
    values = rng.sample(difficulty.pairs, 1000, max(10_000, 4 * difficulty.pairs))
    facts = tuple(
        Fact(name, str(value), rng.randrange(difficulty.chunks)) for name, value in zip(names, values, strict=True)
    )
    asked = tuple(facts[index] for index in rng.sample(difficulty.queries, 0, difficulty.pairs))
    keys = listed([fact.key for fact in asked])
    question = f"What is the code of {keys}?" if len(asked) == 1 else f"What are the codes of {keys}?"
    chunks = []
    for chunk in range(difficulty.chunks):
        sentences = [f"The code of {fact.key} is {fact.value}." for fact in facts if fact.chunk == chunk]
        chunks.append(rng.among_filler(sentences, difficulty.characters // difficulty.chunks - 1))
    return Episode(question, tuple(chunks), ", ".join(fact.value for fact in asked), facts, asked)


@task("chunk_recall", ChunkRecall(), episode=chunk_episode)
def chunk_recall(rng: Rng, difficulty: ChunkRecall) -> Example:
    """The same episode as one text, with one paragraph per chunk."""
    made = chunk_episode(rng, difficulty)
    return Example(f"{paragraphs(made.chunks)}\nQuestion: {made.question}\n{ANSWER}", "", f" {made.answer}")
