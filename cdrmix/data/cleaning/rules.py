"""The rules that a document can be judged by: each a named score of it, and the bound that was published.

All are formulas over the counts of csrc/statistics.hpp (which says what a word, a line, a paragraph is) but `language`.
A score is NaN where its rule does not apply, and then the document passes it. A ratio of nothing to nothing is 0.

Rules about words, and those that count lines by their words or by a Latin full stop, do not apply to texts in which
most letters are of scripts written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan): between
their white space stand whole sentences. This looks at the letters, not at the detected language, which may be wrong.
Such texts are judged by the rules about characters and lines alone; `words` in them would need a segmenter.
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


class Facts:
    """What rules look at, of n texts.

    counts: float64 [n, len(_text.STATISTICS)].
    probabilities: float64 [n], of the text's language where that is a wanted one, else 0.
    """

    def __init__(self, counts: Values, probabilities: Values) -> None:
        assert counts.shape == (len(probabilities), len(COLUMNS))
        self.counts = counts
        self.probabilities = probabilities

    def __getitem__(self, name: str) -> Values:
        """One count of every text, float64 [n]."""
        return self.counts[:, COLUMNS[name]]

    def ratio(self, part: str, whole: str) -> Values:
        """One count over another, float64 [n]; 0 where both are."""
        return self[part] / np.maximum(self[whole], 1)


class Rule(NamedTuple):
    """A document passes when its score is at least (at most) the bound, or NaN."""

    name: str
    group: str
    score: Callable[[Facts], Values]
    bound: float
    at_least: bool
    of_words: bool  # it does not apply to texts in scripts without spaces
    of_english: bool  # it does not apply to texts that are surely of another language

    @property
    def description(self) -> str:
        """What a person reads: what is measured, its source, and the default bound."""
        comparison = "at least" if self.at_least else "at most"
        return f"{inspect.cleandoc(self.score.__doc__ or '')} Kept: {comparison} {self.bound:g}."

    def passes(self, scores: NDArray[np.float32], bound: float) -> NDArray[np.bool_]:
        """Which scores, float32 [n], keep their document."""
        limit = np.float32(bound)  # scores are recorded as float32, and a verdict must follow from the record
        return np.isnan(scores) | (scores >= limit if self.at_least else scores <= limit)


RULES: Registry[Rule] = Registry("rule")
GROUPS: dict[str, list[str]] = {}  # a group's rules in the order in which they are applied


def rule(
    name: str,
    group: str,
    *,
    least: float | None = None,
    most: float | None = None,
    of_words: bool = False,
    of_english: bool = False,
) -> Callable[[Callable[[Facts], Values]], Callable[[Facts], Values]]:
    """Registers a score as a rule; its docstring is the rule's description."""
    assert (least is None) != (most is None)

    def add(score: Callable[[Facts], Values]) -> Callable[[Facts], Values]:
        bound = least if least is not None else most
        assert bound is not None
        GROUPS.setdefault(group, []).append(name)
        RULES(name)(Rule(name, group, score, bound, least is not None, of_words, of_english))
        return score

    return add


@rule("length", "length", least=200)
def length(facts: Facts) -> Values:
    """Characters. mC4 asks for lines of 200 (Xue et al. 2021, arXiv 2010.11934, section 3.1)."""
    return facts["characters"]


@rule("language", "language", least=0.65)
def language(facts: Facts) -> Values:
    """The probability of the text's language if that is a wanted one, else 0. FineWeb (arXiv 2406.17557, 3.2)."""
    return facts.probabilities


# Gopher: Rae et al. 2021, arXiv 2112.11446, section A.1.1, "quality filtering".


@rule("gopher_min_words", "gopher_quality", least=50, of_words=True)
def gopher_min_words(facts: Facts) -> Values:
    """Words, not too few. Gopher (arXiv 2112.11446, A.1.1)."""
    return facts["words"]


@rule("gopher_max_words", "gopher_quality", most=100_000, of_words=True)
def gopher_max_words(facts: Facts) -> Values:
    """Words, not too many. Gopher (arXiv 2112.11446, A.1.1)."""
    return facts["words"]


@rule("gopher_min_mean_word_length", "gopher_quality", least=3, of_words=True)
def gopher_min_mean_word_length(facts: Facts) -> Values:
    """Characters a word in the mean, not too few. Gopher (arXiv 2112.11446, A.1.1)."""
    return facts.ratio("word_characters", "words")


@rule("gopher_max_mean_word_length", "gopher_quality", most=10, of_words=True)
def gopher_max_mean_word_length(facts: Facts) -> Values:
    """Characters a word in the mean, not too many. Gopher (arXiv 2112.11446, A.1.1)."""
    return facts.ratio("word_characters", "words")


@rule("gopher_hashes", "gopher_quality", most=0.1, of_words=True)
def gopher_hashes(facts: Facts) -> Values:
    """Hash symbols a word. Gopher (arXiv 2112.11446, A.1.1)."""
    return facts.ratio("hashes", "words")


@rule("gopher_ellipses", "gopher_quality", most=0.1, of_words=True)
def gopher_ellipses(facts: Facts) -> Values:
    """Ellipses (... or one character) a word. Gopher (arXiv 2112.11446, A.1.1)."""
    return facts.ratio("ellipses", "words")


@rule("gopher_bullet_lines", "gopher_quality", most=0.9)
def gopher_bullet_lines(facts: Facts) -> Values:
    """The share of lines that begin with a bullet point or dash. Gopher (arXiv 2112.11446, A.1.1)."""
    return facts.ratio("bullet_lines", "lines")


@rule("gopher_ellipsis_lines", "gopher_quality", most=0.3)
def gopher_ellipsis_lines(facts: Facts) -> Values:
    """The share of lines that end with an ellipsis. Gopher (arXiv 2112.11446, A.1.1)."""
    return facts.ratio("ellipsis_lines", "lines")


@rule("gopher_alphabetic_words", "gopher_quality", least=0.8, of_words=True)
def gopher_alphabetic_words(facts: Facts) -> Values:
    """The share of words with a letter in them. Gopher (arXiv 2112.11446, A.1.1)."""
    return facts.ratio("alphabetic_words", "words")


@rule("gopher_stop_words", "gopher_quality", least=2, of_words=True, of_english=True)
def gopher_stop_words(facts: Facts) -> Values:
    """How many of the, be, to, of, and, that, have, with occur, in English. Gopher (arXiv 2112.11446, A.1.1)."""
    return facts["stop_words"]


# Gopher, "repetition removal", table A1. Lines and paragraphs count as duplicates from their second occurrence on.


@rule("gopher_duplicate_lines", "gopher_repetition", most=0.3)
def gopher_duplicate_lines(facts: Facts) -> Values:
    """The share of lines that stood further up already. Gopher (arXiv 2112.11446, table A1)."""
    return facts.ratio("duplicate_lines", "lines")


@rule("gopher_duplicate_paragraphs", "gopher_repetition", most=0.3)
def gopher_duplicate_paragraphs(facts: Facts) -> Values:
    """The share of paragraphs that stood further up already. Gopher (arXiv 2112.11446, table A1)."""
    return facts.ratio("duplicate_paragraphs", "paragraphs")


@rule("gopher_duplicate_line_characters", "gopher_repetition", most=0.2)
def gopher_duplicate_line_characters(facts: Facts) -> Values:
    """The share of the lines' characters that is in duplicate lines. Gopher (arXiv 2112.11446, table A1)."""
    return facts.ratio("duplicate_line_characters", "line_characters")


@rule("gopher_duplicate_paragraph_characters", "gopher_repetition", most=0.2)
def gopher_duplicate_paragraph_characters(facts: Facts) -> Values:
    """The share of the paragraphs' characters that is in duplicate ones. Gopher (arXiv 2112.11446, table A1)."""
    return facts.ratio("duplicate_paragraph_characters", "paragraph_characters")


def _gram(kind: str, n: int, text: str, most: float) -> None:
    column = f"{kind}_{n}_gram_characters"

    def score(facts: Facts) -> Values:
        return facts.ratio(column, "word_characters")

    score.__doc__ = f"The share of the words' characters {text}. Gopher (arXiv 2112.11446, table A1)."
    rule(f"gopher_{kind}_{n}_gram", "gopher_repetition", most=most, of_words=True)(score)


for _n, _most in ((2, 0.2), (3, 0.18), (4, 0.16)):
    _gram("top", _n, f"within the most frequent run of {_n} words, if it repeats", _most)
for _n, _most in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1)):
    _gram("duplicate", _n, f"within runs of {_n} words that stood further up already", _most)


# C4: Raffel et al. 2020, arXiv 1910.10683, section 2.2. C4 drops pages for what is within them, and single lines; for
# the latter, a document fails here when most of its lines would be dropped.


@rule("c4_sentences", "c4", least=5)
def c4_sentences(facts: Facts) -> Values:
    """Sentences. C4 (arXiv 1910.10683, 2.2; five as in its release, the paper has three)."""
    return facts["sentences"]


@rule("c4_lorem_ipsum", "c4", most=0)
def c4_lorem_ipsum(facts: Facts) -> Values:
    """How often lorem ipsum occurs. C4 (arXiv 1910.10683, 2.2)."""
    return facts["lorem_ipsum"]


@rule("c4_curly_brackets", "c4", most=0)
def c4_curly_brackets(facts: Facts) -> Values:
    """Curly brackets, for they speak of code. C4 (arXiv 1910.10683, 2.2)."""
    return facts["curly_brackets"]


@rule("c4_terminal_punctuation", "c4", least=0.5)
def c4_terminal_punctuation(facts: Facts) -> Values:
    """The share of lines that end with . ! ? or a quotation mark, not with an ellipsis. C4 (arXiv 1910.10683, 2.2)
    drops the other lines; FineWeb (arXiv 2406.17557, 3.5) left this rule out, for it costs 30 % of the text.
    """
    return (facts["terminal_lines"] - facts["ellipsis_lines"]) / np.maximum(facts["lines"], 1)


@rule("c4_narrow_lines", "c4", most=0.5, of_words=True)
def c4_narrow_lines(facts: Facts) -> Values:
    """The share of lines of less than three words. C4 (arXiv 1910.10683, 2.2) drops those lines."""
    return facts.ratio("narrow_lines", "lines")


@rule("c4_javascript", "c4", most=0.5)
def c4_javascript(facts: Facts) -> Values:
    """The share of lines that speak of Javascript. C4 (arXiv 1910.10683, 2.2) drops those lines."""
    return facts.ratio("javascript_lines", "lines")


@rule("c4_policy", "c4", most=0.5)
def c4_policy(facts: Facts) -> Values:
    """The share of lines that speak of terms of use, privacy or cookies. C4 (arXiv 1910.10683, 2.2) drops them."""
    return facts.ratio("policy_lines", "lines")


# FineWeb: Penedo et al. 2024, arXiv 2406.17557, section 3.6, the rules that it adds to those above.


@rule("fineweb_terminal_punctuation", "fineweb", least=0.12)
def fineweb_terminal_punctuation(facts: Facts) -> Values:
    """The share of lines that end with a mark of punctuation. FineWeb (arXiv 2406.17557, 3.6)."""
    return facts.ratio("terminal_lines", "lines")


@rule("fineweb_short_lines", "fineweb", most=0.67)
def fineweb_short_lines(facts: Facts) -> Values:
    """The share of lines of at most 30 characters. FineWeb (arXiv 2406.17557, 3.6)."""
    return facts.ratio("short_lines", "lines")


@rule("fineweb_duplicate_line_characters", "fineweb", most=0.01)
def fineweb_duplicate_line_characters(facts: Facts) -> Values:
    """The share of the lines' characters that is in duplicate lines. FineWeb (arXiv 2406.17557, 3.6; its release)."""
    return facts.ratio("duplicate_line_characters", "line_characters")


@rule("fineweb_newlines", "fineweb", most=0.3, of_words=True)
def fineweb_newlines(facts: Facts) -> Values:
    """Newlines a word. FineWeb (arXiv 2406.17557, 3.6; its release)."""
    return facts.ratio("newlines", "words")


# Code: Codex (Chen et al. 2021, arXiv 2107.03374, section 3.1) and StarCoder (Li et al. 2023, arXiv 2305.06161, 3.1).


@rule("code_mean_line", "code", most=100)
def code_mean_line(facts: Facts) -> Values:
    """Characters a line in the mean, empty lines too. Codex (arXiv 2107.03374, 3.1)."""
    return facts["characters"] / (facts["newlines"] + 1)


@rule("code_longest_line", "code", most=1000)
def code_longest_line(facts: Facts) -> Values:
    """Characters of the longest line. Codex (arXiv 2107.03374, 3.1)."""
    return facts["longest_line"]


@rule("code_alphanumeric", "code", least=0.25)
def code_alphanumeric(facts: Facts) -> Values:
    """The share of letters and digits among the characters. StarCoder (arXiv 2305.06161, 3.1)."""
    return facts.ratio("alphanumeric_characters", "characters")


@rule("code_generated", "code", most=0)
def code_generated(facts: Facts) -> Values:
    """How often the first five lines say that a program wrote this (auto-generated). Codex (arXiv 2107.03374, 3.1)."""
    return facts["generated_marks"]
