"""Cross-entropy of a linear map in plain PyTorch: specification, oracle, and the parts that have no kernel.

Shapes: N rows (tokens), K target sets that share their rows' logits, D model, V vocabulary. For a row with logits
l = W h and lse = logsumexp(l), each set has a weight w and a target t; eps is the smoothing and z the z-loss factor:
    loss = w (lse - (1 - eps) l_t - eps / V sum_v l_v + z lse^2)     smoothing: arXiv 1512.00567, section 7
    dl_v = sum over sets of w ((1 + 2 z lse) p_v - (1 - eps) [v = t] - eps / V),  p = softmax(l)
A target counts if it is not ignore_index and its weight is not 0. Rows without a target that counts are never read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cdrmix.kernels.common import products

MOST_ROWS = 512  # rows of a chunk: from about 256 rows on, its product with the weight runs at full speed
LEAST_ROWS = 32  # rows of larger chunks are a multiple of it
CHUNK_BYTES = 1 << 26  # of a chunk's logits: 320 rows at V 50,272; with 512, peak memory was 0.130 of plain PyTorch's
BLOCK_V = 8192  # rows of a product that is rounded before it is added


def counted(targets_KN: Tensor, weights_KN: Tensor | None, ignore_index: int) -> Tensor:
    """Which targets add to the loss: bool [K, N]."""
    found = targets_KN != ignore_index
    return found if weights_KN is None else found & (weights_KN != 0)


def add_product(sum_VD: Tensor, dlogits_NV: Tensor, hidden_ND: Tensor) -> None:
    """sum += dlogits^T hidden, in place; sum may be float32 while the factors are narrower."""
    if sum_VD.dtype == dlogits_NV.dtype:
        products.add_product(sum_VD, dlogits_NV, hidden_ND)
        return
    for first in range(0, len(sum_VD), BLOCK_V):  # in blocks: the whole product is a second [V, D]
        block = slice(first, first + BLOCK_V)
        sum_VD[block] += dlogits_NV[:, block].mT @ hidden_ND


def softmax_rows(
    logits_NV: Tensor,
    targets_NK: Tensor,
    scales_NK: Tensor,
    *,
    z_loss: float,
    label_smoothing: float,
    wants_gradient: bool,
) -> Tensor:
    """losses [N, K] of rows of logits; where gradients are wanted, they overwrite the logits.

    targets: in [0, V); scales: the targets' weights, 0 where a target does not count.
    """
    top = logits_NV.amax(-1, keepdim=True)
    logits_NV -= top
    score = logits_NV.gather(-1, targets_NK) * (1 - label_smoothing)
    if label_smoothing:
        score += logits_NV.mean(-1, keepdim=True) * label_smoothing
    exponentials = logits_NV.exp_()
    total = exponentials.sum(-1, keepdim=True)
    log_total = total.log()
    lse = top + log_total
    if wants_gradient:
        both = scales_NK.sum(-1, keepdim=True)
        dlogits = exponentials.mul_(both * (1 + 2 * z_loss * lse) / total)
        if label_smoothing:
            dlogits -= both * (label_smoothing / logits_NV.shape[1])
        for at, share in zip(targets_NK.split(1, -1), (scales_NK * (1 - label_smoothing)).split(1, -1), strict=True):
            dlogits.scatter_(-1, at, dlogits.gather(-1, at) - share)  # one set at a time: sets may share a target
    return scales_NK * (log_total - score + z_loss * lse.square())


def cross_entropy_forward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_KN: Tensor,
    weights_KN: Tensor | None,
    *,
    z_loss: float,
    label_smoothing: float,
    ignore_index: int,
    wants_hidden: bool,
    wants_weight: bool,
    rounded: bool = False,
    softmax_rows: Callable[..., Tensor] = softmax_rows,
) -> tuple[Tensor, Tensor, Tensor]:
    """losses [K, N], and the gradients of their sum: dhidden [N, D] and dweight [V, D], each empty unless wanted.

    hidden: its dtype is that of the products and of dhidden; weight is cast to it. losses and dweight are at least
        float32.
    rounded: whether dweight will be rounded to 16 bits; only the GPU's chunk size depends on it.
    softmax_rows: computes losses and gradients of a chunk's logits, as `softmax_rows` of this module does.
    The gradients of a chunk of rows are computed while its logits exist; dweight is summed over chunks in order.
    """
    accumulate = torch.promote_types(hidden_ND.dtype, torch.float32)
    V, weight_VD = len(weight_VD), weight_VD.to(hidden_ND.dtype)
    counted_KN = counted(targets_KN, weights_KN, ignore_index)
    losses_KN = hidden_ND.new_zeros(targets_KN.shape, dtype=accumulate)
    dhidden_ND = torch.zeros_like(hidden_ND) if wants_hidden else hidden_ND.new_empty(0)
    dweight_VD = hidden_ND.new_zeros(weight_VD.shape if wants_weight else 0, dtype=accumulate)
    if weights_KN is None:
        scales_KN = counted_KN.to(accumulate)
    else:
        scales_KN = torch.where(counted_KN, weights_KN.to(accumulate), 0.0)
    allowed_KN = torch.where(counted_KN, targets_KN, 0)

    wants_gradient = wants_hidden or wants_weight
    rows = counted_KN.any(0).nonzero().flatten()
    size = min(MOST_ROWS, max(1, CHUNK_BYTES // (V * accumulate.itemsize * LEAST_ROWS)) * LEAST_ROWS)
    memory = hidden_ND.new_empty(min(size, len(rows)), V)
    for chunk in rows.split(size) if len(rows) else ():
        hidden, target, scale = hidden_ND[chunk], allowed_KN[:, chunk].mT, scales_KN[:, chunk].mT
        logits = products.mm(hidden, weight_VD.mT, out=memory[: len(chunk)]).to(accumulate)
        losses_KN[:, chunk] = softmax_rows(
            logits, target, scale, z_loss=z_loss, label_smoothing=label_smoothing, wants_gradient=wants_gradient
        ).mT
        if not wants_gradient:
            continue
        dlogits = logits.to(hidden.dtype)
        if wants_hidden:
            dhidden_ND[chunk] = products.mm(dlogits, weight_VD)
        if wants_weight:
            add_product(dweight_VD, dlogits, hidden)
    return losses_KN, dhidden_ND, dweight_VD
