"""C functions of PyTorch's CPU library and of the libraries it is linked with."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import torch


def torch_function(name: str, arguments: list[Any], result: Any) -> Any:
    """The function of this name with ctypes' argument and result types; None where this PyTorch does not have it."""
    if sys.platform != "linux":
        return None
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = getattr(ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_NOLOAD), name)
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = arguments, result
    return found
