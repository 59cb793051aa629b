"""Matrix products that add to a float32 sum what their 16-bit factors give: gradients of weights.

CUDA's library adds its float32 accumulators to the sum as it writes them, so a weight's gradient is rounded to 16 bits
nowhere and the sum is read and written once. PyTorch has it as addmm with out_dtype; since 2.10 the summand may be
float32 beside narrower factors (read in its source: _addmm_dtype_out_cuda).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 8192  # rows of a product that is rounded before it is added: not all at once, which may be a second [V, D]


def add_product(sum_OI: Tensor, left_NO: Tensor, right_NI: Tensor) -> None:
    """sum += left^T right, in place: the same bits every time.

    sum: float32 or of the factors' dtype, which is one. Where the library cannot add what is wider than its factors,
    a CPU's factors are made wide, and elsewhere each block of the product is rounded to the factors' dtype.
    """
    if sum_OI.dtype == left_NO.dtype:
        sum_OI.addmm_(left_NO.mT, right_NI)
    elif not len(left_NO):
        return
    elif left_NO.is_cuda and torch.version.hip is None and torch.__version__ >= "2.10":
        torch.addmm(sum_OI, left_NO.mT, right_NI, out_dtype=sum_OI.dtype, out=sum_OI)
    elif left_NO.device.type == "cpu":
        sum_OI.addmm_(left_NO.to(sum_OI.dtype).mT, right_NI.to(sum_OI.dtype))
    else:
        for first in range(0, len(sum_OI), BLOCK):
            block = slice(first, first + BLOCK)
            sum_OI[block] += left_NO[:, block].mT @ right_NI
