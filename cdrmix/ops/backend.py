"""Which implementation serves a tensor: by its device and dtype, or as the environment says."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from cdrmix.errors import ConfigError

BACKENDS = ("triton", "cpu", "reference")
HAS_NUMBA = importlib.util.find_spec("numba") is not None  # looked for once: it takes 100 us every time


def backend(x: Tensor) -> str:
    """Which implementation serves tensors like x: "triton", "cpu" (numba) or "reference" (plain PyTorch).

    Raises ConfigError, a ValueError, where CDRMIX_BACKEND names none of them or one that cannot serve the device.
    """
    forced = os.environ.get("CDRMIX_BACKEND", "")
    if forced and forced not in BACKENDS:
        raise ValueError(
            f"CDRMIX_BACKEND={forced!r} in the environment: choose one of {', '.join(BACKENDS)}, or unset it"
        )
    if x.dtype == torch.float64:
        return "reference"
    if forced == "triton" and x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "") in ("", "0"):
        raise ConfigError(
            "CDRMIX_BACKEND=triton, but the tensors are on a CPU: unset it, use a GPU, or set TRITON_INTERPRET=1 too"
        )
    if forced:
        return forced
    if x.device.type == "cuda":
        return "triton"
    return "cpu" if x.device.type == "cpu" and HAS_NUMBA else "reference"


def debugging() -> bool:
    """Whether CDRMIX_DEBUG asks for the checks that read values, and so wait for a GPU."""
    return os.environ.get("CDRMIX_DEBUG", "") not in ("", "0")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products run in: autocast's where it is on, else x's own; float64 is left alone."""
    kind = x.device.type
    narrowed = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if narrowed else x.dtype
