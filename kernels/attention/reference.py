"""Causal softmax attention over documents in plain PyTorch: specification and oracle, with quadratic memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, visible_BS: Tensor | None = None
) -> Tensor:
    """Softmax attention of each token to its document's tokens up to itself (arXiv 1706.03762, equation 1).

        y_t = sum_s softmax_s(q_t . k_s / sqrt(N)) v_s over the tokens s <= t of t's document

    q: [B, T, H, N]; k, v: [B, S, G, N] with S >= T: the queries belong to the last T tokens. Head h uses keys and
    values of head h // (H / G). cu_seqlens: int [D + 1], document starts over the flattened tokens, and then T = S;
    None: each row is one document. visible_BS: bool, of one query a row, the keys that it sees; None: as above.
    Returns [B, T, H, N].
    """
    batch, length, heads, width = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    visible_BTS = visible(batch, length, k.shape[1], cu_seqlens, q.device)
    if visible_BS is not None:
        visible_BTS = visible_BS.unsqueeze(1)
    scores = torch.einsum("bthn,bshn->bhts", q, k) / math.sqrt(width)
    weights = scores.masked_fill(~visible_BTS.unsqueeze(1), float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshn->bthn", weights, v)


def visible(batch: int, queries: int, keys: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Which keys each query sees: bool [B, T, S]; the first dimension is 1 where cu_seqlens is None."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries).unsqueeze(0)
    if cu_seqlens is None:
        return seen
    tokens = torch.arange(batch * keys, device=device)
    document = torch.searchsorted(cu_seqlens.long(), tokens, right=True).view(batch, keys)
    return seen & (document.unsqueeze(2) == document.unsqueeze(1))
