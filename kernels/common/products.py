"""Matrix products on a CPU whose bits no number of threads changes, and products that add to a float32 sum.

MKL shares a product out over threads by its shape and their number, and where a thread's part is a few rows or ends
beside a multiple of 16 columns it takes other code, which rounds otherwise. So after `multiply_on_one_thread` every
product of this thread takes one, whoever asks for it, save those of `mm` and `add_product` that are wide enough: these
were found to have the same bits on one thread and on every other number (benchmarks/LOG.md).

CUDA's library adds its float32 accumulators to the sum as it writes them, so a weight's gradient is rounded to 16 bits
nowhere and the sum is read and written once. PyTorch has it as addmm with out_dtype; since 2.10 the summand may be
float32 beside narrower factors (read in its source: _addmm_dtype_out_cuda).
"""

from __future__ import annotations

import ctypes
import threading

import torch
from torch import Tensor

from cdrmix.kernels.common.libtorch import torch_function

BLOCK = 8192  # rows of a product that is rounded before it is added: not all at once, which may be a second [V, D]
ROWS = 16  # of a product's for each thread that shares in it
COLUMNS = 16  # what its columns are a multiple of
_here = threading.local()
# What sets MKL's number of threads for the products of the calling thread; None without MKL.
_set_mkl_threads = torch_function("MKL_Set_Num_Threads_Local", [ctypes.c_int], ctypes.c_int)


def multiply_on_one_thread() -> bool:
    """Has this thread's products on a CPU take one thread, but for wide ones here; False where that cannot be had."""
    if _set_mkl_threads is None:
        return False
    torch.get_num_threads()  # a thread's first such call settles its numbers, MKL's too
    _set_mkl_threads(1)
    _here.one_thread = True
    return True


def set_num_threads(number: int) -> None:
    """torch.set_num_threads, which tells MKL too; a thread whose products take one thread keeps to that."""
    torch.set_num_threads(number)
    if multiplies_on_one_thread():
        multiply_on_one_thread()


def multiplies_on_one_thread() -> bool:
    """Whether `multiply_on_one_thread` was called in this thread."""
    return getattr(_here, "one_thread", False)


def is_wide(rows: int, columns: int) -> bool:
    """Whether a product [rows, columns] may take two threads or more: by its shape, not by their number."""
    return rows >= 2 * ROWS and columns >= COLUMNS


class _Shared:
    """PyTorch's number of threads, while it is entered, for MKL's products of so many rows, where these are enough."""

    __slots__ = ("_threads",)

    def __init__(self, rows: int) -> None:
        threads = torch.get_num_threads()
        self._threads = threads if ROWS * threads <= rows else 1

    def __enter__(self) -> None:
        if self._threads > 1 and _set_mkl_threads is not None:
            _set_mkl_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        if self._threads > 1 and _set_mkl_threads is not None:
            _set_mkl_threads(1)


def mm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left [M, K] right [K, N], on any device: the same bits with any number of threads after `multiply_on_one_thread`.

    A wide product of float32 on a CPU takes PyTorch's number of threads. Columns beside a multiple of 16 are a product
    of their own, on one thread.
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
    """sum += left^T right, in place: the same bits every time.

    sum: float32 or of the factors' dtype, which is one. Where the library cannot add what is wider than its factors,
    a CPU's factors are made wide, and elsewhere each block of the product is rounded to the factors' dtype.
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
