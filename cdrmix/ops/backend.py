"""Which implementation is used for a tensor: by its device and dtype, or as the environment says."""

from __future__ import annotations

import functools
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
HAS_NUMBA = importlib.util.find_spec("numba") is not None  # a constant: each call takes 100 us
Platform = Literal["cpu", "cuda", "hip"]

_assumed: list[Platform] = []  # the innermost last


@contextmanager
def assume_platform(platform: Platform) -> Iterator[None]:
    """In this context, operators choose their implementation as if CPU tensors were on a device of that platform.

    For plans, which run a model on fake tensors: these have shapes and no values, so no kernel runs. PyTorch's CPU
    builds support fake tensors only on a CPU.
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
    """ "cuda" (NVIDIA), "hip" (AMD), "cpu" or another type of device, on which x is or is assumed to be."""
    if _assumed:
        return _assumed[-1]
    return "hip" if x.device.type == "cuda" and torch.version.hip is not None else x.device.type


def backend(x: Tensor) -> str:
    """Which implementation is used for tensors like x: "triton", "cpu" (numba) or "reference" (plain PyTorch).

    Raises ConfigError, a ValueError, where CDRMIX_BACKEND is none of them, or one that does not support the device.
    """
    forced = os.environ.get("CDRMIX_BACKEND", "")
    if forced and forced not in BACKENDS:
        raise ConfigError(
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


@functools.cache
def kernels_of(operator: str, implementation: str) -> ModuleType:
    """The module cdrmix.kernels.<operator>.<implementation>, imported on first use.

    implementation: a result of `backend`, or a part of it, such as triton_route.
    """
    return importlib.import_module(f"cdrmix.kernels.{operator}.{implementation}")


def check_served(device: torch.device) -> None:
    """Raises ConfigError for a GPU that the kernels do not support, if they would be used."""
    if device.type == "cuda" and os.environ.get("CDRMIX_BACKEND", "") in ("", "triton"):
        kernels_of("common", "triton_helpers").architecture(device)


def debugging() -> bool:
    """Whether CDRMIX_DEBUG turns on the checks that read values, and so wait for a GPU."""
    return os.environ.get("CDRMIX_DEBUG", "") not in ("", "0")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on, except for float64; else x's own."""
    kind = x.device.type
    narrowed = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if narrowed else x.dtype
