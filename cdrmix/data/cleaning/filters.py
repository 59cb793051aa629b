"""The filter: applies the configured rules to documents and records the score of every rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix import _text
from cdrmix.config.schema_data import Filters
from cdrmix.data.cleaning import language
from cdrmix.data.cleaning.rules import GROUPS, RULES, Rule, TextStatistics
from cdrmix.errors import ConfigError
from cdrmix.registry import nearest


class FilterResult(NamedTuple):
    """The result of a chain of rules for n documents.

    first_failed: int16 [n], the number of the first rule that the document fails; -1 if it passes all.
    scores: float32 [n, rules], also of filtered documents; NaN if a rule does not apply.
    languages: the detected ISO 639 code of each document; "und" if it has no text.
    """

    first_failed: NDArray[np.int16]
    scores: NDArray[np.float32]
    languages: list[str]


class FilterChain:
    """The rules of a configuration in their order. Groups are replaced by their rules; each rule occurs once.

    Raises ConfigError for an unknown name, and for a bound of a rule that is unknown or not used.
    """

    def __init__(self, section: Filters, key: str = "data.filters") -> None:
        self.names = _expanded(section.rules, key)
        for name in section.bounds:
            if name not in RULES.names():
                raise ConfigError(
                    _unknown(f"{key}.bounds", name, RULES.names(), f"{key}.rules has {', '.join(self.names) or 'none'}")
                )
            if name not in self.names:
                raise ConfigError(f"{key}.bounds: {name!r} is not in {key}.rules; add it there or remove its bound")
        if "language" in self.names and (unknown := set(section.languages) - set(language.model().labels)):
            raise ConfigError(
                f"{key}.languages: {', '.join(sorted(unknown))}: not ISO 639 codes of the language model, which has: "
                f"{', '.join(sorted(language.model().labels))}"
            )
        self._rules: list[Rule] = [RULES[name] for name in self.names]
        self._languages = sorted(set(section.languages))
        self._language_score = section.language_score
        configured = {"language": section.language_score, **section.bounds}
        self._bounds = [configured.get(rule.name, rule.bound) for rule in self._rules]

    def apply(self, texts: Sequence[str]) -> FilterResult:
        """Applies the rules to normalised texts. The result of a text does not depend on the other texts.

        Raises UnicodeEncodeError for lone surrogates.
        """
        languages, probabilities = language.detect(texts)
        if not self._rules:
            return FilterResult(np.full(len(texts), -1, np.int16), np.empty((len(texts), 0), np.float32), languages)
        counts = _text.statistics(texts)
        codes = np.array(languages, dtype=np.str_)
        statistics = TextStatistics(
            counts, np.where(np.isin(codes, self._languages), probabilities, 0.0).astype(np.float64)
        )
        foreign = (codes != "en") & (probabilities >= self._language_score)
        unspaced = 2 * statistics["unspaced_characters"] > statistics["alphabetic_characters"]

        scores = np.empty((len(texts), len(self._rules)), dtype=np.float32)
        first_failed = np.full(len(texts), -1, dtype=np.int16)
        for number, (rule, bound) in enumerate(zip(self._rules, self._bounds, strict=True)):
            column = rule.score(statistics)
            if rule.needs_spaces:
                column = np.where(unspaced, np.nan, column)
            if rule.english_only:
                column = np.where(foreign, np.nan, column)
            scores[:, number] = column
            failed = ~rule.passes(scores[:, number], bound)
            first_failed[failed & (first_failed < 0)] = number
        return FilterResult(first_failed, scores, languages)


def _expanded(names: Iterable[str], key: str) -> list[str]:
    expanded: dict[str, None] = {}
    for name in names:
        if name in GROUPS:
            expanded.update(dict.fromkeys(GROUPS[name]))
        elif name in RULES.names():
            expanded[name] = None
        else:
            listed = f"groups of rules: {', '.join(sorted(GROUPS))}; rules: {', '.join(RULES.names())}"
            raise ConfigError(_unknown(f"{key}.rules", name, [*GROUPS, *RULES.names()], listed))
    return list(expanded)


def _unknown(key: str, name: str, known: Iterable[str], listed: str) -> str:
    close = nearest(name, known) or next((other for other in sorted(known) if name in other), None)
    hint = f" Did you mean {close!r}?" if close else ""
    return f"{key}: unknown rule {name!r}; {listed}.{hint}"
