"""Quality rules: each is a named score of a document with a published bound.

A score is a formula over the counts of csrc/statistics.hpp, which defines words, lines and paragraphs. The rule
`language` is the exception. If a rule does not apply, its score is NaN and the document passes. The ratio 0 / 0 is 0.

Rules about words do not apply to texts in scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese,
Tibetan), because counting their words needs a segmenter. The same holds for rules that count the words of lines or
Latin full stops. A text is of such a script if most of its letters are. The detected language is not used, because it
may be wrong. Only the rules about characters and lines apply to these texts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix import _text
from cdrmix.registry import Registry

Values = NDArray[np.float64]
COLUMNS = {name: number for number, name in enumerate(_text.STATISTICS)}


class TextStatistics:
    """The input of the rules, for n texts.

    counts: float64 [n, len(_text.STATISTICS)].
    probabilities: float64 [n], of the language of the text if it is a configured language, else 0.
    """

    def __init__(self, counts: Values, probabilities: Values) -> None:
        assert counts.shape == (len(probabilities), len(COLUMNS))
        self.counts = counts
        self.probabilities = probabilities

    def __getitem__(self, name: str) -> Values:
        """One count of every text, float64 [n]."""
        return self.counts[:, COLUMNS[name]]

    def ratio(self, part: str, whole: str) -> Values:
        """One count divided by another, float64 [n]; 0 if both are 0."""
        return self[part] / np.maximum(self[whole], 1)


class Rule(NamedTuple):
    """A document passes if its score is NaN, or at least (at most) the bound."""

    name: str
    group: str
    score: Callable[[TextStatistics], Values]
    bound: float
    at_least: bool
    needs_spaces: bool  # the rule does not apply to texts in scripts without spaces
    english_only: bool  # the rule does not apply to texts that are in another language with high probability

    @property
    def description(self) -> str:
        """What is measured, its source, and the default bound."""
        comparison = "at least" if self.at_least else "at most"
        return f"{inspect.cleandoc(self.score.__doc__ or '')} Kept: {comparison} {self.bound:g}."

    def passes(self, scores: NDArray[np.float32], bound: float) -> NDArray[np.bool_]:
        """bool [n]: whether a document with this score, float32 [n], is kept."""
        limit = np.float32(bound)  # scores are stored as float32, and the decision must follow from the stored score
        return np.isnan(scores) | (scores >= limit if self.at_least else scores <= limit)


RULES: Registry[Rule] = Registry("rule")
GROUPS: dict[str, list[str]] = {}  # a group's rules in the order in which they are applied


def rule(
    name: str,
    group: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    needs_spaces: bool = False,
    english_only: bool = False,
) -> Callable[[Callable[[TextStatistics], Values]], Callable[[TextStatistics], Values]]:
    """A decorator that registers a score as a rule. The docstring is the description of the rule."""
    assert (minimum is None) != (maximum is None)

    def add(score: Callable[[TextStatistics], Values]) -> Callable[[TextStatistics], Values]:
        bound = minimum if minimum is not None else maximum
        assert bound is not None
        GROUPS.setdefault(group, []).append(name)
        RULES(name)(Rule(name, group, score, bound, minimum is not None, needs_spaces, english_only))
        return score

    return add


@rule("length", "length", minimum=200)
def length(statistics: TextStatistics) -> Values:
    """Characters. mC4 asks for lines of 200 (Xue et al. 2021, arXiv 2010.11934, section 3.1)."""
    return statistics["characters"]


@rule("language", "language", minimum=0.65)
def language(statistics: TextStatistics) -> Values:
    """The probability of the text's language if it is a configured one, else 0. FineWeb (arXiv 2406.17557, 3.2)."""
    return statistics.probabilities


# Gopher: Rae et al. 2021, arXiv 2112.11446, section A.1.1, "quality filtering".


@rule("gopher_min_words", "gopher_quality", minimum=50, needs_spaces=True)
def gopher_min_words(statistics: TextStatistics) -> Values:
    """Words, not too few. Gopher (arXiv 2112.11446, A.1.1)."""
    return statistics["words"]


@rule("gopher_max_words", "gopher_quality", maximum=100_000, needs_spaces=True)
def gopher_max_words(statistics: TextStatistics) -> Values:
    """Words, not too many. Gopher (arXiv 2112.11446, A.1.1)."""
    return statistics["words"]


@rule("gopher_min_mean_word_length", "gopher_quality", minimum=3, needs_spaces=True)
def gopher_min_mean_word_length(statistics: TextStatistics) -> Values:
    """Mean word length in characters, not too small. Gopher (arXiv 2112.11446, A.1.1)."""
    return statistics.ratio("word_characters", "words")


@rule("gopher_max_mean_word_length", "gopher_quality", maximum=10, needs_spaces=True)
def gopher_max_mean_word_length(statistics: TextStatistics) -> Values:
    """Mean word length in characters, not too large. Gopher (arXiv 2112.11446, A.1.1)."""
    return statistics.ratio("word_characters", "words")


@rule("gopher_hashes", "gopher_quality", maximum=0.1, needs_spaces=True)
def gopher_hashes(statistics: TextStatistics) -> Values:
    """Hash symbols per word. Gopher (arXiv 2112.11446, A.1.1)."""
    return statistics.ratio("hashes", "words")


@rule("gopher_ellipses", "gopher_quality", maximum=0.1, needs_spaces=True)
def gopher_ellipses(statistics: TextStatistics) -> Values:
    """Ellipses (... or one character) per word. Gopher (arXiv 2112.11446, A.1.1)."""
    return statistics.ratio("ellipses", "words")


@rule("gopher_bullet_lines", "gopher_quality", maximum=0.9)
def gopher_bullet_lines(statistics: TextStatistics) -> Values:
    """The share of lines that begin with a bullet point or dash. Gopher (arXiv 2112.11446, A.1.1)."""
    return statistics.ratio("bullet_lines", "lines")


@rule("gopher_ellipsis_lines", "gopher_quality", maximum=0.3)
def gopher_ellipsis_lines(statistics: TextStatistics) -> Values:
    """The share of lines that end with an ellipsis. Gopher (arXiv 2112.11446, A.1.1)."""
    return statistics.ratio("ellipsis_lines", "lines")


@rule("gopher_alphabetic_words", "gopher_quality", minimum=0.8, needs_spaces=True)
def gopher_alphabetic_words(statistics: TextStatistics) -> Values:
    """The share of words with a letter in them. Gopher (arXiv 2112.11446, A.1.1)."""
    return statistics.ratio("alphabetic_words", "words")


@rule("gopher_stop_words", "gopher_quality", minimum=2, needs_spaces=True, english_only=True)
def gopher_stop_words(statistics: TextStatistics) -> Values:
    """How many of the, be, to, of, and, that, have, with occur, in English. Gopher (arXiv 2112.11446, A.1.1)."""
    return statistics["stop_words"]


# Gopher, "repetition removal", table A1. Lines and paragraphs count as duplicates from their second occurrence on.


@rule("gopher_duplicate_lines", "gopher_repetition", maximum=0.3)
def gopher_duplicate_lines(statistics: TextStatistics) -> Values:
    """The share of lines that repeat an earlier line. Gopher (arXiv 2112.11446, table A1)."""
    return statistics.ratio("duplicate_lines", "lines")


@rule("gopher_duplicate_paragraphs", "gopher_repetition", maximum=0.3)
def gopher_duplicate_paragraphs(statistics: TextStatistics) -> Values:
    """The share of paragraphs that repeat an earlier paragraph. Gopher (arXiv 2112.11446, table A1)."""
    return statistics.ratio("duplicate_paragraphs", "paragraphs")


@rule("gopher_duplicate_line_characters", "gopher_repetition", maximum=0.2)
def gopher_duplicate_line_characters(statistics: TextStatistics) -> Values:
    """The share of the lines' characters that is in duplicate lines. Gopher (arXiv 2112.11446, table A1)."""
    return statistics.ratio("duplicate_line_characters", "line_characters")


@rule("gopher_duplicate_paragraph_characters", "gopher_repetition", maximum=0.2)
def gopher_duplicate_paragraph_characters(statistics: TextStatistics) -> Values:
    """The share of the paragraphs' characters that is in duplicate ones. Gopher (arXiv 2112.11446, table A1)."""
    return statistics.ratio("duplicate_paragraph_characters", "paragraph_characters")


def _gram(kind: str, n: int, text: str, maximum: float) -> None:
    column = f"{kind}_{n}_gram_characters"

    def score(statistics: TextStatistics) -> Values:
        return statistics.ratio(column, "word_characters")

    score.__doc__ = f"The share of the words' characters {text}. Gopher (arXiv 2112.11446, table A1)."
    rule(f"gopher_{kind}_{n}_gram", "gopher_repetition", maximum=maximum, needs_spaces=True)(score)


for _n, _most in ((2, 0.2), (3, 0.18), (4, 0.16)):
    _gram("top", _n, f"within the most frequent run of {_n} words, if it repeats", _most)
for _n, _most in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1)):
    _gram("duplicate", _n, f"within runs of {_n} words that repeat an earlier run", _most)


# C4: Raffel et al. 2020, arXiv 1910.10683, section 2.2. C4 removes pages and also single lines. Here a document fails a
# line rule if the rule would remove most of its lines.


@rule("c4_sentences", "c4", minimum=5)
def c4_sentences(statistics: TextStatistics) -> Values:
    """Sentences. C4 (arXiv 1910.10683, 2.2; five as in its release, the paper has three)."""
    return statistics["sentences"]


@rule("c4_lorem_ipsum", "c4", maximum=0)
def c4_lorem_ipsum(statistics: TextStatistics) -> Values:
    """How often lorem ipsum occurs. C4 (arXiv 1910.10683, 2.2)."""
    return statistics["lorem_ipsum"]


@rule("c4_curly_brackets", "c4", maximum=0)
def c4_curly_brackets(statistics: TextStatistics) -> Values:
    """Curly brackets, a sign of code. C4 (arXiv 1910.10683, 2.2)."""
    return statistics["curly_brackets"]


@rule("c4_terminal_punctuation", "c4", minimum=0.5)
def c4_terminal_punctuation(statistics: TextStatistics) -> Values:
    """The share of lines that end with . ! ? or a quotation mark, not with an ellipsis. C4 (arXiv 1910.10683, 2.2)
    removes the other lines. FineWeb (arXiv 2406.17557, 3.5) left this rule out because it removes 30 % of the text.
    """
    return (statistics["terminal_lines"] - statistics["ellipsis_lines"]) / np.maximum(statistics["lines"], 1)


@rule("c4_narrow_lines", "c4", maximum=0.5, needs_spaces=True)
def c4_narrow_lines(statistics: TextStatistics) -> Values:
    """The share of lines with fewer than three words. C4 (arXiv 1910.10683, 2.2) removes those lines."""
    return statistics.ratio("narrow_lines", "lines")


@rule("c4_javascript", "c4", maximum=0.5)
def c4_javascript(statistics: TextStatistics) -> Values:
    """The share of lines that mention Javascript. C4 (arXiv 1910.10683, 2.2) removes those lines."""
    return statistics.ratio("javascript_lines", "lines")


@rule("c4_policy", "c4", maximum=0.5)
def c4_policy(statistics: TextStatistics) -> Values:
    """The share of lines that mention terms of use, privacy or cookies. C4 (arXiv 1910.10683, 2.2) removes them."""
    return statistics.ratio("policy_lines", "lines")


# FineWeb: Penedo et al. 2024, arXiv 2406.17557, section 3.6, the rules that it adds to those above.


@rule("fineweb_terminal_punctuation", "fineweb", minimum=0.12)
def fineweb_terminal_punctuation(statistics: TextStatistics) -> Values:
    """The share of lines that end with a mark of punctuation. FineWeb (arXiv 2406.17557, 3.6)."""
    return statistics.ratio("terminal_lines", "lines")


@rule("fineweb_short_lines", "fineweb", maximum=0.67)
def fineweb_short_lines(statistics: TextStatistics) -> Values:
    """The share of lines of at most 30 characters. FineWeb (arXiv 2406.17557, 3.6)."""
    return statistics.ratio("short_lines", "lines")


@rule("fineweb_duplicate_line_characters", "fineweb", maximum=0.01)
def fineweb_duplicate_line_characters(statistics: TextStatistics) -> Values:
    """The share of the lines' characters that is in duplicate lines. FineWeb (arXiv 2406.17557, 3.6; its release)."""
    return statistics.ratio("duplicate_line_characters", "line_characters")


@rule("fineweb_newlines", "fineweb", maximum=0.3, needs_spaces=True)
def fineweb_newlines(statistics: TextStatistics) -> Values:
    """Newlines per word. FineWeb (arXiv 2406.17557, 3.6; its release)."""
    return statistics.ratio("newlines", "words")


# Code: Codex (Chen et al. 2021, arXiv 2107.03374, section 3.1) and StarCoder (Li et al. 2023, arXiv 2305.06161, 3.1).


@rule("code_mean_line", "code", maximum=100)
def code_mean_line(statistics: TextStatistics) -> Values:
    """Mean line length in characters, empty lines included. Codex (arXiv 2107.03374, 3.1)."""
    return statistics["characters"] / (statistics["newlines"] + 1)


@rule("code_longest_line", "code", maximum=1000)
def code_longest_line(statistics: TextStatistics) -> Values:
    """Characters of the longest line. Codex (arXiv 2107.03374, 3.1)."""
    return statistics["longest_line"]


@rule("code_alphanumeric", "code", minimum=0.25)
def code_alphanumeric(statistics: TextStatistics) -> Values:
    """The share of letters and digits among the characters. StarCoder (arXiv 2305.06161, 3.1)."""
    return statistics.ratio("alphanumeric_characters", "characters")


@rule("code_generated", "code", maximum=0)
def code_generated(statistics: TextStatistics) -> Values:
    """How often the first five lines state that the file is generated. Codex (arXiv 2107.03374, 3.1)."""
    return statistics["generated_marks"]
