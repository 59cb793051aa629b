"""Matrix products whose bits do not depend on the number of CPU threads, and products that add to a float32 sum.

MKL divides a product among threads by the product's shape and the number of threads. Where a thread gets few rows, or
columns that are not a multiple of 16, MKL uses other code that rounds differently. So after `multiply_on_one_thread`
every CPU product of the calling thread runs on one thread, whoever calls it. The exceptions are those products of `mm`
and `add_product` that `is_wide` allows: these were measured to have the same bits for every number of threads
(benchmarks/LOG.md). On Intel processors this holds in MKL's strict mode only, which `strict_mode` sets.

On CUDA, cuBLAS adds its float32 accumulators to the float32 sum in the product's epilogue. So a weight's gradient is
never rounded to 16 bits, and the sum is read and written once. PyTorch offers this as addmm with out_dtype; since 2.10
the summand may be float32 while the factors are narrower (see _addmm_dtype_out_cuda in its source).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from cdrmix.kernels.common.libtorch import torch_function

BLOCK = 8192  # rows of a product that is rounded before it is added: a whole product may be as large as [V, D]
ROWS = 16  # the least rows of a product for each thread
COLUMNS = 16  # products on several threads have a multiple of so many columns
FEW = 4  # of fewer rows MKL makes a product of a matrix and vectors, with another order of summation
_here = threading.local()
# Sets MKL's number of threads for the products of the calling thread; None without MKL.
_set_mkl_threads = torch_function("MKL_Set_Num_Threads_Local", [ctypes.c_int], ctypes.c_int)
# MKL's mode of conditional numerical reproducibility: sets it, and returns it for -1.
_set_mkl_mode = torch_function("mkl_serv_cbwr_set", [ctypes.c_int], ctypes.c_int)
_mkl_mode = torch_function("mkl_serv_cbwr_get", [ctypes.c_int], ctypes.c_int)
AUTO, STRICT = 2, 0x10000  # MKL_CBWR_AUTO, MKL_CBWR_STRICT


@cache
def strict_mode() -> bool:
    """Whether wide products have the same bits with any number of threads. On Intel, asks MKL for its strict mode.

    MKL takes the mode only before the first product of a process; the environment variable MKL_CBWR=AUTO,STRICT sets it
    too. Without it this returns False, and wide products take one thread. Some shapes have other bits in strict mode,
    which costs no time. Other processors have no such mode, and do not need it (measured on AMD).
    """
    if not _is_intel():
        return True
    if _set_mkl_mode is None or _mkl_mode is None:
        return False
    _set_mkl_mode(AUTO | STRICT)
    return bool(_mkl_mode(-1) & STRICT)


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True  # unknown: one thread is always right


def multiply_on_one_thread() -> bool:
    """Runs this thread's CPU products on one MKL thread, except wide ones of this module; False where MKL is absent."""
    if _set_mkl_threads is None:
        return False
    strict_mode()  # before the first product
    torch.get_num_threads()  # a thread's first such call sets its numbers of threads, MKL's too
    _set_mkl_threads(1)
    _here.one_thread = True
    return True


def multiply_on_all_threads() -> None:
    """Ends `multiply_on_one_thread` in this thread."""
    if multiplies_on_one_thread():
        assert _set_mkl_threads is not None
        _set_mkl_threads(0)  # MKL's number for all threads of the process, which torch.set_num_threads sets
        _here.one_thread = False


def set_num_threads(number: int) -> None:
    """torch.set_num_threads, which also sets MKL's number; `multiply_on_one_thread` stays in force in this thread."""
    torch.set_num_threads(number)
    if multiplies_on_one_thread():
        multiply_on_one_thread()


@contextmanager
def restored_threads() -> Iterator[None]:
    """Restores at its end the number of CPU threads, and whether products of this thread run on one of them."""
    threads, on_one_thread = torch.get_num_threads(), multiplies_on_one_thread()
    try:
        yield
    finally:
        if on_one_thread:
            multiply_on_one_thread()
        else:
            multiply_on_all_threads()
        if torch.get_num_threads() != threads:
            set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, PyTorch has one CPU thread."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(threads)


def multiplies_on_one_thread() -> bool:
    """Whether `multiply_on_one_thread` was called in this thread."""
    return getattr(_here, "one_thread", False)


def is_wide(rows: int, columns: int) -> bool:
    """Whether a product [rows, columns] may use two threads or more; it depends on the shape alone."""
    return rows >= 2 * ROWS and columns >= COLUMNS


def product_of_rows(x_RI: Tensor, weight_IO: Tensor) -> Tensor:
    """x @ weight outside of training, so that the bits of a row do not depend on the number of rows.

    Rows of zeros make them FEW, and columns beyond a multiple of COLUMNS are a separate product. Measured to suffice
    for 1 to 128 rows. Only for float32 on a CPU after `multiply_on_one_thread`; else it is PyTorch's product.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not _is_ours(x_RI):
        return x_RI @ weight_IO
    rows, columns = x_RI.shape[0], weight_IO.shape[1]
    if 0 < rows < FEW:
        x_RI = torch.cat([x_RI, x_RI.new_zeros(FEW - rows, x_RI.shape[1])])
    if is_wide(rows, columns):
        return mm(x_RI, weight_IO)
    whole = columns - columns % COLUMNS
    if whole in (0, columns):
        y = torch.mm(x_RI, weight_IO)
    else:
        y = torch.cat([torch.mm(x_RI, weight_IO[:, :whole]), torch.mm(x_RI, weight_IO[:, whole:])], 1)
    return y if len(y) == rows else y[:rows]


class _Shared:
    """While entered, MKL uses PyTorch's number of threads, if the product has ROWS rows for each of them."""

    __slots__ = ("_threads",)

    def __init__(self, rows: int) -> None:
        threads = torch.get_num_threads()
        self._threads = threads if ROWS * threads <= rows and strict_mode() else 1

    def __enter__(self) -> None:
        if self._threads > 1 and _set_mkl_threads is not None:
            _set_mkl_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        if self._threads > 1 and _set_mkl_threads is not None:
            _set_mkl_threads(1)


def mm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left [M, K] @ right [K, N] on any device; after `multiply_on_one_thread` the bits do not depend on the threads.

    A wide float32 product on a CPU uses PyTorch's number of threads. The columns beyond the last multiple of 16 are a
    separate product on one thread.
    """
    rows, columns = left.shape[0], right.shape[1]
    if not _is_ours(left) or not is_wide(rows, columns):
        return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
    assert out is None or out.shape == (rows, columns)
    whole = columns - columns % COLUMNS
    if whole == columns:
        with _Shared(rows):
            return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
    y = left.new_empty(rows, columns) if out is None else out
    with _Shared(rows):
        torch.mm(left, right[:, :whole], out=y[:, :whole])
    torch.mm(left, right[:, whole:], out=y[:, whole:])
    return y


def add_product(sum_OI: Tensor, left_NO: Tensor, right_NI: Tensor) -> None:
    """sum += left^T @ right, in place, with the same bits every time.

    sum: float32, or the dtype of the factors, which both have. Where the library cannot add narrow factors to a wider
    sum, a CPU casts the factors to the sum's dtype, and a GPU rounds each block of the product to the factors' dtype.
    """
    if sum_OI.device.type == "cpu":
        _add_product_cpu(sum_OI, left_NO.to(sum_OI.dtype).mT, right_NI.to(sum_OI.dtype))
    elif sum_OI.dtype == left_NO.dtype:
        sum_OI.addmm_(left_NO.mT, right_NI)
    elif not len(left_NO):
        return
    elif left_NO.is_cuda and torch.version.hip is None and torch.__version__ >= "2.10":
        torch.addmm(sum_OI, left_NO.mT, right_NI, out_dtype=sum_OI.dtype, out=sum_OI)
    else:
        for first in range(0, len(sum_OI), BLOCK):
            block = slice(first, first + BLOCK)
            sum_OI[block] += left_NO[:, block].mT @ right_NI


def _add_product_cpu(sum_OI: Tensor, left_ON: Tensor, right_NI: Tensor) -> None:
    rows, columns = sum_OI.shape
    if not _is_ours(sum_OI) or not is_wide(rows, columns):
        sum_OI.addmm_(left_ON, right_NI)
        return
    whole = columns - columns % COLUMNS
    with _Shared(rows):
        sum_OI[:, :whole].addmm_(left_ON, right_NI[:, :whole])
    if whole < columns:
        sum_OI[:, whole:].addmm_(left_ON, right_NI[:, whole:])


def _is_ours(x: Tensor) -> bool:
    return multiplies_on_one_thread() and x.device.type == "cpu" and x.dtype == torch.float32
