"""The plastic low-rank update over rows of many chunks: the updates of all chunks at once, then A chunk by chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cdrmix.kernels.fast_weights.reference import RULES
from cdrmix.ops.backend import compute_dtype
from cdrmix.ops.checks import state_dtype
from cdrmix.ops.fast_weights import _delta, _project, plastic_commit


class PlasticChunks(NamedTuple):
    """The result for a row of chunks.

    y [B, T, O]. reads_A [B, N, r, d]: the A that each of the N chunks of the row reads. a, pending [*, r, d]: the last
    committed A, and the update so far of the unfinished chunk (decay * a at a chunk's first token).
    """

    y: Tensor
    reads_A: Tensor
    a: Tensor
    pending: Tensor


def plastic_chunks(
    x: Tensor,
    w: Tensor,
    b_up: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    a: Tensor,
    pending: Tensor,
    *,
    chunk: int,
    position: int,
    alpha: float,
    decay: float,
    limit: float,
    rule: str = "delta",
    starts: Tensor | None = None,
    prefix: int = 0,
) -> PlasticChunks:
    """`plastic_lora` for one chunk after another, with `plastic_commit(A', limit)` at each chunk's end, in one pass.

    x [B, P + T, I], w [O, I], b_up [O, r], q [B, P + T, d]; k [B, T, d], v [B, T, r]; beta [*, T], starts bool [B, T];
    a, pending: float32 [B, r, d] (float64 for float64). The first `prefix` P tokens of x neither read nor update A.
    position: tokens of the first chunk before the row, 0 to chunk - 1. Dimensions of beta in front of B are branches
    of the updates, for rows that end in the chunk in which they begin.

    For the delta rule a chunk is a linear map, A' = pending M + U, with M the product of its I - beta k k^T. M and U
    are computed for all chunks at once; M by the same rule from the identity, with values of 0. So only one product of
    [r, d] and [d, d] a chunk is sequential.
    Differentiable in all tensors but starts. Raises ValueError for an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"plastic_chunks: rule={rule!r}; choose one of {', '.join(RULES)}")
    batch, tokens = k.shape[0], k.shape[1]
    dtype, wide = compute_dtype(x), state_dtype(x)
    count = -(-(position + tokens) // chunk)
    branched = beta.ndim > 2
    assert not branched or count == 1, "branches need rows within one chunk"
    with torch.autocast(x.device.type, enabled=False):
        q, k, v, beta = (tensor.to(wide) for tensor in (q, k, v, beta))
        front, q = q[:, :prefix], q[:, prefix:]
        over = ends = None
        if starts is not None:
            begun = _grid(starts.int().unsqueeze(-1), position, chunk, count).squeeze(-1).cumsum(-1)  # [B, N, C]
            ends = begun[..., -1:, None] > 0  # chunks in which a document begins: earlier state is dropped
            over = begun > 0
            old = begun < begun[..., -1:]  # tokens of documents that end in their chunk
        q, k, v = (_grid(tensor, position, chunk, count) for tensor in (q, k, v))
        beta = _grid(beta.unsqueeze(-1), position, chunk, count).squeeze(-1)
        if starts is not None:
            beta = torch.where(old, 0.0, beta)
            k, v = (torch.where(old.unsqueeze(-1), 0.0, tensor) for tensor in (k, v))
        keep, add = _maps(rule, k, v, beta)
        reads_A = []
        for n in range(count):
            reads_A.append(a)
            if ends is not None:
                pending = torch.where(ends[:, n], 0.0, pending)
            new = add[..., n, :, :]
            if keep is None:
                pending = pending + new
            elif rule == "oja":
                pending = keep[..., n, :, :].mT @ pending + new
            else:
                pending = pending @ keep[..., n, :, :] + new
            if (n + 1) * chunk <= position + tokens:
                a = plastic_commit(pending, limit)
                pending = decay * a
            elif ends is not None:  # the rest of this chunk belongs to the new document, which reads zeros
                a = torch.where(ends[:, n], 0.0, a)
        before = torch.stack(reads_A, 1)
        reads = alpha * (q @ before.mT)
        if over is not None:
            reads = torch.where(over.unsqueeze(-1), 0.0, reads)
        reads = reads.flatten(1, 2)[:, position : position + tokens]
        if prefix:
            reads = torch.cat([alpha * (front @ before[:, 0].mT), reads], 1)
        y = _project(x.to(dtype), w.to(dtype), b_up.to(dtype), reads.to(dtype))
        return PlasticChunks(y.view(batch, -1, w.shape[0]), before, a, pending)


def _grid(tensor: Tensor, position: int, chunk: int, count: int) -> Tensor:
    """[*, T, ...] at their positions in `count` chunks, [*, count, chunk, ...]; zeros before and after."""
    tokens = tensor.shape[-2]
    padded = functional.pad(tensor, (0, 0, position, count * chunk - position - tokens))
    return padded.unflatten(-2, (count, chunk))


def _maps(rule: str, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor | None, Tensor]:
    """The map of each chunk: the factor by which it keeps A (None: 1), and the update [*, N, r, d] that it adds."""
    if rule == "hebb":
        return None, (beta.unsqueeze(-1) * v).mT @ k
    keys, values = (v, k) if rule == "oja" else (k, v)
    width, rows = keys.shape[-1], values.shape[-1]
    identity = torch.eye(width, dtype=keys.dtype, device=keys.device)
    state = functional.pad(identity, (0, 0, rows, 0))  # [rows + width, width]: zeros, then the identity
    state = state.expand(*beta.shape[:-1], rows + width, width)
    last = _delta(keys, functional.pad(values, (0, width)), beta, state)
    add, keep = last[..., :rows, :], last[..., rows:, :]
    return keep, add.mT if rule == "oja" else add
