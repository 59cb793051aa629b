"""Implementations of the cross-entropy of a linear map: cdrmix's operator, PyTorch in three ways, and Liger-Kernel.

Each takes hidden [R, D], weight [V, D] and targets [R], and returns the sum of the rows' losses.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from cdrmix import ops

OURS = "cdrmix"
PLAIN = "PyTorch, linear and cross_entropy"
WIDENED = f"{PLAIN} in float32"
CHUNKED = "PyTorch, linear_cross_entropy"
LIGER = "Liger-Kernel"
LIGER_FLOAT32 = f"{LIGER}, sums in float32"

Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden, weight, targets -> loss


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), targets, reduction="sum")


def widened(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), targets, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's own by chunks, with its default policies for the device and dtype."""
    options = torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, sums: torch.dtype | None = None) -> Tensor:
    """sums: dtype in which the weight's gradient is summed; None: the weight's dtype, Liger's default."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=sums)(weight, hidden, targets)


def implementations(device: str) -> tuple[dict[str, Call], dict[str, str]]:
    """The implementations that can be measured, ours first, and the reasons for the absent ones."""
    found: dict[str, Call] = {OURS: ops.linear_cross_entropy, PLAIN: plain}
    absent = {}
    if hasattr(functional, "linear_cross_entropy"):
        found[CHUNKED] = chunked
    else:
        absent[CHUNKED] = f"PyTorch {torch.__version__} has none; 2.13 has"
    if device != "cuda":
        absent[LIGER] = "its kernels are for GPUs"
    elif not importlib.util.find_spec("liger_kernel"):
        absent[LIGER] = "liger_kernel not installed"
    else:
        found |= {LIGER_FLOAT32: functools.partial(liger, sums=torch.float32), LIGER: liger}
    if device == "cuda":
        found[WIDENED] = widened
    return found, absent
