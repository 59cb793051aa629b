"""Which implementation serves a tensor: by its device and dtype, or as the environment says."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from cdrmix.errors import ConfigError

BACKENDS = ("triton", "cpu", "reference")
HAS_NUMBA = importlib.util.find_spec("numba") is not None  # looked for once: it takes 100 us every time
Platform = Literal["cpu", "cuda", "hip"]

_assumed: list[Platform] = []  # the innermost last


@contextmanager
def assume_platform(platform: Platform) -> Iterator[None]:
    """Within it, operators choose their implementation as if CPU tensors were on a device of that platform.

    For plans, which send fake tensors through a model: these have shapes and no numbers, so no kernel runs. PyTorch's
    CPU builds have fake tensors on a CPU alone.
    """
    _assumed.append(platform)
    try:
        yield
    finally:
        _assumed.pop()


def platform_is_assumed() -> bool:
    """Whether `assume_platform` is in force."""
    return bool(_assumed)


def platform_of(x: Tensor) -> str:
    """ "cuda" (NVIDIA), "hip" (AMD), "cpu" or another type of device: where x is, or is assumed to be."""
    if _assumed:
        return _assumed[-1]
    return "hip" if x.device.type == "cuda" and torch.version.hip is not None else x.device.type


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
    platform = platform_of(x)
    if forced == "triton" and platform == "cpu" and os.environ.get("TRITON_INTERPRET", "") in ("", "0"):
        raise ConfigError(
            "CDRMIX_BACKEND=triton, but the tensors are on a CPU: unset it, use a GPU, or set TRITON_INTERPRET=1 too"
        )
    if forced:
        return forced
    if platform in ("cuda", "hip"):
        return "triton"
    return "cpu" if platform == "cpu" and HAS_NUMBA else "reference"


def kernels_of(operator: str, implementation: str) -> ModuleType:
    """The module cdrmix.kernels.<operator>.<implementation>, imported when it is first needed.

    implementation: what `backend` gives, or a part of one, such as triton_route.
    """
    return importlib.import_module(f"cdrmix.kernels.{operator}.{implementation}")


def check_served(device: torch.device) -> None:
    """Raises ConfigError for a GPU that the kernels do not serve, where these would be used."""
    if device.type == "cuda" and os.environ.get("CDRMIX_BACKEND", "") in ("", "triton"):
        kernels_of("common", "triton_helpers").architecture(device)


def debugging() -> bool:
    """Whether CDRMIX_DEBUG asks for the checks that read values, and so wait for a GPU."""
    return os.environ.get("CDRMIX_DEBUG", "") not in ("", "0")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products run in: autocast's where it is on, else x's own; float64 is left alone."""
    kind = x.device.type
    narrowed = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if narrowed else x.dtype
