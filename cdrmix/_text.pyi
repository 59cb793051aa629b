"""Types of the C++ extension built from csrc/text_bindings.cpp."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STATISTICS: tuple[str, ...]

def statistics(texts: Sequence[str]) -> NDArray[np.float64]: ...
def personal(text: str) -> list[tuple[str, int, int]]: ...

class LanguageModel:
    labels: tuple[str, ...]
    def __init__(self, file: bytes) -> None: ...
    def predict(self, texts: Sequence[str], most: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...
