"""Multi-query associative recall (MQAR) with zoology's parameters (Arora et al., arXiv 2312.04927, figure 2).

A sequence begins with key-value pairs. Then every key occurs once more, and the model must predict its value. Its
position is drawn from a power law over slots of two tokens after the pairs: slot g = 1, 2 ... has a probability in
proportion to g^(a - 1). Slots are drawn for one key after another, each slot at most once. Keys are ids of the lower
half of the vocabulary, values of the upper half; 0 fills all other positions. The paper uses 64 to 512 tokens with 4 to
64 pairs (PUBLISHED_SIZES), a = 0.01 and 8192 ids.

As text, every id is a word of three syllables. Each repeated key is followed by its value, so that the text can be
trained on. The prompt ends with the last repeated key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from cdrmix.data.tasks.example import ANSWER, IGNORED, Example, TextDifficulty, TokenExample, task
from cdrmix.data.tasks.rng import SYLLABLES, Rng
from cdrmix.errors import ConfigError

PUBLISHED_SIZES = [(64, 4), (128, 8), (256, 16), (512, 64)]  # tokens and pairs
WORD = 7  # characters of a token as text, with its space
BLANK = 0


@dataclass(frozen=True)
class Mqar(TextDifficulty):
    """Harder with more pairs, in more tokens.

    noise: positions without pair and query have a random id instead of 0 (random_non_queries of zoology). It is never a
    key, because that would be a query without an answer.
    """

    tokens: int = 64
    pairs: int = 4
    vocabulary: int = 8192
    power_a: float = 0.01
    noise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens % 2 or 4 * self.pairs > self.tokens:
            raise ConfigError(
                f"difficulty: {self.pairs} pairs in {self.tokens} tokens; tokens must be even and at least 4 a pair"
            )
        if self.vocabulary // 2 <= self.pairs or self.vocabulary > len(SYLLABLES) ** 3:
            raise ConfigError(
                f"difficulty: vocabulary = {self.vocabulary} for {self.pairs} pairs; it must be more than "
                f"{2 * self.pairs + 1} and at most {len(SYLLABLES) ** 3:,}, the words of three syllables"
            )

    def at_length(self, characters: int) -> Self:
        """The largest published size that fits the length, or the smallest one."""
        fitting = [rung for rung in PUBLISHED_SIZES if WORD * rung[0] <= characters] or PUBLISHED_SIZES[:1]
        return replace(self, tokens=fitting[-1][0], pairs=fitting[-1][1])


def mqar_tokens(rng: Rng, difficulty: Mqar) -> TokenExample:
    """Inputs and targets of `tokens` ids. Every repeated key has a target."""
    half, pairs = difficulty.vocabulary // 2, difficulty.pairs
    keys = rng.sample(pairs, 1, half)
    values = rng.sample(pairs, half, difficulty.vocabulary)
    context = 2 * pairs
    slots = (difficulty.tokens - context) // 2
    weights = [gap ** (difficulty.power_a - 1) for gap in range(1, slots + 1)]
    inputs = [BLANK] * difficulty.tokens
    targets = [IGNORED] * difficulty.tokens
    inputs[:context:2], inputs[1:context:2] = keys, values
    for key, value, slot in zip(keys, values, rng.weighted_sample(pairs, weights), strict=True):
        index = context + 2 * slot
        inputs[index], targets[index] = key, value
    if difficulty.noise:
        excluded = {BLANK, *keys}
        for index in range(context, difficulty.tokens):
            while targets[index] == IGNORED and inputs[index] in excluded:
                inputs[index] = rng.randrange(difficulty.vocabulary)
    return TokenExample(inputs, targets, difficulty.vocabulary)


def word_of(token: int) -> str:
    """The word of an id: its digits in the base of the number of syllables."""
    count = len(SYLLABLES)
    return SYLLABLES[token // count**2] + SYLLABLES[token // count % count] + SYLLABLES[token % count]


@task("mqar", Mqar(), tokens=mqar_tokens)
def mqar(rng: Rng, difficulty: Mqar) -> Example:
    """The same sequence as words. Asked: the value of the last key."""
    made = mqar_tokens(rng, difficulty)
    tokens, last = list(made.inputs), 0
    for index, target in enumerate(made.targets):
        if target != IGNORED:
            last = index
            tokens[index + 1] = target  # queries are at even positions, so the next position is free
    words = [word_of(token) for token in tokens[: last + 2]]
    prompt = f"Pairs: {' '.join(words[: last + 1])}\nQuestion: What is the next word?\n{ANSWER}"
    return Example(prompt, "", f" {words[-1]}")
