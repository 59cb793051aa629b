"""How the element-wise numba kernels are compiled, and what they share: exp and sigmoid in vector lanes, threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba.core.compiler import Compiler
from torch import Tensor

from cdrmix.kernels.common.cpu import compile_cached, run_parts

SERIAL_WORK = 1 << 17  # elements below which waking a second thread does not pay
ONE, ZERO = np.float32(1), np.float32(0)
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1 / math.log(2)), np.float32(355 / 512), np.float32(math.log(2) - 355 / 512)
ROUND = np.float32(1.5 * 2**23)  # added to |x| < 2^22 it leaves round(x) in the low bits
C2, C3, C4, C5, C6, C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))


class _NoAlias(Compiler):
    """Promises LLVM that what a kernel writes overlaps nothing else it is given, as numba does in its own prange.

    Without that LLVM checks every pair of rows at run time and, above eight pairs, leaves the loop scalar: the
    streams' backward pass took 5 times as long (2,048 tokens of width 128).
    """

    def __init__(
        self, typingctx: Any, targetctx: Any, library: Any, args: Any, return_type: Any, flags: Any, locals: Any
    ) -> None:
        flags.noalias = True
        super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)


def compiled(function: Callable[..., Any], fastmath: frozenset[str] = frozenset({"contract"})) -> Any:
    """An element-wise kernel, compiled on first use and kept on disk."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath), "pipeline_class": _NoAlias}
    return compile_cached(function, options)


def with_sums(function: Callable[..., Any]) -> Any:
    """Compiled with sums in vector lanes: in another order than written, but always in the same."""
    return compiled(function, frozenset({"contract", "reassoc"}))


@compiled
def exp(x):  # type: ignore[no-untyped-def]
    """exp(x) for x <= 0, to 1.1 units in the last place; exp(-87) = 1.6e-38 below -87; NaN stays NaN.

    x = n ln 2 + q with |q| <= ln(2) / 2, and exp(q)'s Taylor series: q^8 / 8!, the first term left out, is 5e-9 of
    it, a twelfth of a unit. math.exp would be a call an element, 5 times slower.
    """
    if x < np.float32(-87):  # max() would lose a NaN
        x = np.float32(-87)
    shifted = np.float32(x * LOG2_E + ROUND)
    n = shifted - ROUND
    q = (x - n * LN2_HIGH) - n * LN2_LOW
    series = ((((C7 * q + C6) * q + C5) * q + C4) * q + C3) * q + C2
    power = np.int32((shifted.view(np.int32) + np.int32(127)) << np.int32(23))  # 2^n: the exponent's bits
    return (series * (q * q) + q + ONE) * power.view(np.float32)


@compiled
def sigmoid(z):  # type: ignore[no-untyped-def]
    """sigmoid(z), sigmoid(-z), and their product, the slope: none cancels where a sigmoid is near 1."""
    small = exp(-abs(z))
    larger = ONE / (ONE + small)
    smaller = small * larger
    return (larger, smaller, larger * smaller) if z >= 0 else (smaller, larger, larger * smaller)


def array(x: Tensor, *shape: int) -> Any:
    """Numba's view of a tensor, in another shape."""
    assert x.is_contiguous()
    assert x.device.type == "cpu"
    assert x.dtype in (torch.float32, torch.int64, torch.bool)
    return x.detach().view(shape).numpy()


def run(kernel: Any, elements: int, *arguments: Any) -> None:
    """A kernel over all pieces, each thread taking every so manieth of them."""
    threads = torch.get_num_threads() if elements > SERIAL_WORK else 1
    run_parts(lambda number: kernel(number, threads, *arguments), threads)
