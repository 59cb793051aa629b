"""Types of the C++ extension built from csrc/bindings.cpp."""

import numpy as np
from numpy.typing import NDArray

def simhash(blob: bytes, offsets: NDArray[np.uint64], threads: int) -> NDArray[np.uint64]: ...
def near_duplicates(
    fingerprints_a: NDArray[np.uint64], fingerprints_b: NDArray[np.uint64], radius: int
) -> NDArray[np.int64]: ...
