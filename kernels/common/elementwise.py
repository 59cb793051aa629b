"""How element-wise numba kernels are compiled and run, and the exp and sigmoid that LLVM vectorizes in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba.core.compiler import Compiler
from torch import Tensor

from cdrmix.kernels.common.cpu import compile_cached, run_parts

SERIAL_WORK = 1 << 17  # with at most so many elements a second thread costs more than it saves
ONE, ZERO = np.float32(1), np.float32(0)
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1 / math.log(2)), np.float32(355 / 512), np.float32(math.log(2) - 355 / 512)
ROUND = np.float32(1.5 * 2**23)  # x + ROUND holds round(x) in its low bits, for |x| < 2^22
C2, C3, C4, C5, C6, C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))


class _NoAlias(Compiler):
    """Promises LLVM that the arrays a kernel writes overlap no other argument, as numba promises in its own prange.

    Without the promise LLVM checks every pair of rows at run time, and above eight pairs it does not vectorize the
    loop: the backward pass of the time-mix streams took 5 times as long (2,048 tokens of width 128).
    """

    def __init__(
        self, typingctx: Any, targetctx: Any, library: Any, args: Any, return_type: Any, flags: Any, locals: Any
    ) -> None:
        flags.noalias = True
        super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)


def compiled(function: Callable[..., Any], fastmath: frozenset[str] = frozenset({"contract"})) -> Any:
    """Compiles an element-wise kernel on first use and keeps it on disk."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath), "pipeline_class": _NoAlias}
    return compile_cached(function, options)


def with_sums(function: Callable[..., Any]) -> Any:
    """`compiled`, with sums vectorized: LLVM chooses the order of the terms, and it is the same in every run."""
    return compiled(function, frozenset({"contract", "reassoc"}))


@compiled
def exp(x):  # type: ignore[no-untyped-def]
    """exp(x) for x <= 0, to 1.1 units in the last place; exp(-87) = 1.6e-38 below -87; NaN stays NaN.

    x = n ln 2 + q with |q| <= ln(2) / 2, and the Taylor series of exp(q). The first omitted term, q^8 / 8!, is 5e-9 of
    exp(q), a twelfth of a unit in the last place. math.exp would be one call an element, 5 times slower.
    """
    if x < np.float32(-87):  # max() would lose a NaN
        x = np.float32(-87)
    shifted = np.float32(x * LOG2_E + ROUND)
    n = shifted - ROUND
    q = (x - n * LN2_HIGH) - n * LN2_LOW
    series = ((((C7 * q + C6) * q + C5) * q + C4) * q + C3) * q + C2
    power = np.int32((shifted.view(np.int32) + np.int32(127)) << np.int32(23))  # the bits of the float 2^n
    return (series * (q * q) + q + ONE) * power.view(np.float32)


@compiled
def sigmoid(z):  # type: ignore[no-untyped-def]
    """sigmoid(z), sigmoid(-z), and their product, which is the derivative; none loses digits by cancellation."""
    small = exp(-abs(z))
    larger = ONE / (ONE + small)
    smaller = small * larger
    return (larger, smaller, larger * smaller) if z >= 0 else (smaller, larger, larger * smaller)


def array(x: Tensor, *shape: int) -> Any:
    """The tensor as a numpy array of the given shape, in the same memory."""
    assert x.is_contiguous()
    assert x.device.type == "cpu"
    assert x.dtype in (torch.float32, torch.int64, torch.bool)
    return x.detach().view(shape).numpy()


def run(kernel: Any, elements: int, *arguments: Any) -> None:
    """Runs kernel(first, stride, *arguments) on one or all threads; thread i takes the pieces i, i + stride, ..."""
    threads = torch.get_num_threads() if elements > SERIAL_WORK else 1
    run_parts(lambda number: kernel(number, threads, *arguments), threads)
