"""Temporary memory of the kernels of an operator while they run, for the operators that need most.

The formulas follow the functions that launch the kernels. Routed experts store the hidden rows between their two
products. The loss has a chunk of logits. CPU kernels compute in float32 and copy narrower tensors. Other operators need
less than the routed experts of the same model, and not at the same time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cdrmix.kernels.cross_entropy import reference as reference_loss
from cdrmix.ops.backend import Platform


def workspace(operator: Any, args: tuple[Any, ...], results: Any, platform: Platform) -> int:
    """Temporary bytes of an operator while it runs, without arguments and results; 0 for operators of PyTorch."""
    if operator.namespace != "cdrmix":
        return 0
    size = 0
    if operator._opname == "linear_cross_entropy":
        size = _loss(args[0], args[1], args[7], platform)
    elif platform != "cpu" and operator._opname == "moe_experts":
        x_TD, _, w_down, weights_TK = args[:4]
        size = weights_TK.numel() * sum(w_down.shape[1:]) * x_TD.itemsize
    elif platform != "cpu" and operator._opname == "moe_experts_backward":
        x_TD, w_up, w_down, weights_TK = args[1:5]
        again = w_up.shape[2] if args[9] else 0
        size = weights_TK.numel() * (again + w_up.shape[2] + sum(w_down.shape[1:])) * x_TD.itemsize
    elif operator._opname.startswith("moe_experts"):
        size = _experts_on_cpu(args, operator._opname == "moe_experts_backward")
    if platform == "cpu":
        size += sum(4 * x.numel() for x in tree_leaves((args, results)) if isinstance(x, Tensor) and _narrow(x.dtype))
    return size


def _experts_on_cpu(args: tuple[Any, ...], backward: bool) -> int:
    """One expert is computed at a time. The largest is assumed to have twice the even share of rows."""
    w_up, w_down, weights_TK = args[2:5] if backward else args[1:4]
    experts, hidden, width = w_down.shape
    columns = w_up.shape[2]
    rows = min(weights_TK.numel(), 2 * weights_TK.numel() // experts)
    return 4 * rows * (3 * width + 2 * hidden + columns if backward else 2 * width + hidden)


def _narrow(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _loss(hidden: Tensor, weight: Tensor, dtype: torch.dtype, platform: Platform) -> int:
    """The logits of a chunk, and the weight in the dtype of the products if it has another dtype."""
    rows, (vocabulary, width) = hidden.numel() // hidden.shape[-1], weight.shape
    cast = weight.numel() * dtype.itemsize if weight.dtype != dtype else 0
    if platform == "cpu":
        wide = max(dtype.itemsize, 4)
        most = max(1, reference_loss.CHUNK_BYTES // (vocabulary * wide * reference_loss.LEAST_ROWS))
        chunk = min(rows, reference_loss.MOST_ROWS, most * reference_loss.LEAST_ROWS)
        # Per chunk: hidden states; logits, and again in float32 if they are narrower; gradients of the logits.
        return cast + chunk * (width * dtype.itemsize + vocabulary * (wide if not _narrow(dtype) else 8))
    from cdrmix.kernels.cross_entropy import triton as cross_entropy

    chunk = cross_entropy.chunk_rows(rows, width, vocabulary, dtype.itemsize, rounded=weight.dtype != torch.float32)
    return cast + chunk * vocabulary * dtype.itemsize
