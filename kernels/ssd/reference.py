"""The SSD scan in plain PyTorch: specification and oracle. It is linear attention with one decay a head and token.

Shapes: B batch, T time, G groups of heads, H heads, R = H / G heads a group, K key width, V value width, C tokens a
chunk, N chunks, D documents. All of it runs in float64 as well as in float32.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 32  # tokens; on a CPU 32 and 64 are within a tenth of each other, and 16 is slower
# The least log decay. Its exponential is 0 in every dtype, as that of -inf; but 0 times -inf would be NaN.
LOWEST = -1e6


def ssd_scan_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None = None, exclusive: bool = False
) -> tuple[Tensor, Tensor]:
    """Linear attention with a scalar decay, token by token: the definition (arXiv 2405.21060, section 5; 2307.08621).

        S_t = exp(log_decay_t) S_{t-1} + v_t k_t^T
        y_t = S_t q_t, or S_{t-1} q_t if exclusive, that is, before the token's decay and write

    q, k: [B, T, G, K]; v: [B, T, H, V], where head h uses group h // (H / G); log_decay: [B, T, H] <= 0, may be -inf;
    state: [B, H, V, K], zero if None. Returns y [B, T, H, V] and the last state [B, H, V, K].
    """
    batch, length, heads, value_width = v.shape
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    S = v.new_zeros(batch, heads, value_width, k.shape[-1]) if state is None else state
    outputs = []
    for t in range(length):
        before = S
        S = S * log_decay[:, t].exp()[..., None, None] + v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append(torch.einsum("bhvk,bhk->bhv", before if exclusive else S, q[:, t]))
    return torch.stack(outputs, 1), S


class _Chunks:
    """The chunks of C tokens of all documents: each document has its own chunks, and its last one is padded.

    tokens: int64 [N, C], positions among the B * T tokens; for padding that of the document's last. inside: bool [N,
    C]. first, counts: int64 [D], a document's first chunk and its number of chunks.
    """

    def __init__(self, like: Tensor, cu_seqlens: Tensor | None, chunk: int) -> None:
        batch, length = like.shape[:2]
        starts = range(0, (batch + 1) * length, length) if cu_seqlens is None else cu_seqlens.tolist()
        spans = list(itertools.pairwise(starts))
        begins = [(at, end) for start, end in spans for at in range(start, end, chunk)]
        where = torch.tensor(begins, device=like.device)
        tokens = where[:, :1] + torch.arange(chunk, device=like.device)
        self.inside = tokens < where[:, 1:]
        self.tokens = torch.minimum(tokens, where[:, 1:] - 1)
        self.counts = torch.tensor([-(-(end - start) // chunk) for start, end in spans], device=like.device)
        self.first = self.counts.cumsum(0) - self.counts
        self.longest = int(self.counts.max())

    def split(self, x: Tensor) -> Tensor:
        """[B, T, heads, width] -> [N, heads, C, width], padded with zeros: a padded token writes and decays nothing."""
        pieces = x.flatten(0, 1)[self.tokens] * self.inside[..., None, None]
        return pieces.transpose(1, 2).contiguous()

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """[N, heads, C, width] -> the shape of `like`, [B, T, heads, width]: the inverse of split."""
        joined = x.new_empty(like.shape[0] * like.shape[1], *x.shape[1::2])
        joined[self.tokens[self.inside]] = x.transpose(1, 2)[self.inside]
        return joined.view(like.shape)

    def scan(self, start: Tensor, through: Tensor, writes: Tensor, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """S' = through S + writes from chunk to chunk: S before every chunk [N, H, V, K], and the last [D, H, V, K].

        start: [D, H, V, K]; through: [N, H, 1, 1]; writes: [N, H, V, K]; reverse: from the last chunk to the first.
        """
        state, before = start.clone(), torch.empty_like(writes)
        for n in range(self.longest):
            documents = (self.counts > n).nonzero().squeeze(1)
            chunk = self.first[documents] + (self.counts[documents] - 1 - n if reverse else n)
            before[chunk] = state[documents]
            state[documents] = through[chunk] * state[documents] + writes[chunk]
        return before, state


class _Pieces(NamedTuple):
    """The inputs by chunk, with G and R as separate dimensions, and the decay factors.

    q, k: [N, G, 1, C, K]; v: [N, G, R, C, V]
    weights: [N, G, R, C, C], e^(sum of the log decays between j's write and i's read), 0 where i does not read j
    entering, leaving: [N, G, R, C, 1], e^(sum from the chunk's start to the read; from after the write to its end)
    through: [N, G, R, 1, 1], e^(sum over the chunk)
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    entering: Tensor
    leaving: Tensor
    through: Tensor


def _triangles(like: Tensor, chunk: int, exclusive: bool) -> tuple[Tensor, Tensor]:
    """[C, C]: reads_ij = 1 where i reads token j's write (after j's decay), and later_ij = 1 for i > j."""
    ones = torch.ones(chunk, chunk, dtype=like.dtype, device=like.device)
    later = ones.tril(-1)
    return later if exclusive else ones.tril(), later


def _pieces(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, chunks: _Chunks, reads: Tensor, later: Tensor
) -> _Pieces:
    """Every exponent is a sum of log decays, never a difference of two sums: exact for any decay.

    The sums are products with triangular matrices, because torch.cumsum would have no fixed order on a GPU.
    """
    groups = q.shape[2]
    q, k, v, log = (chunks.split(x) for x in (q, k, v, log_decay.clamp_min(LOWEST).unsqueeze(-1)))
    q, k, v, log = (x.unflatten(1, (groups, -1)) for x in (q, k, v, log))
    weights = torch.matmul(reads, log * later).exp() * reads  # sum over l: token l decays the write of j if l > j
    entering = torch.matmul(reads, log).exp()
    leaving = torch.matmul(later.mT, log).exp()
    return _Pieces(q, k, v, weights, entering, leaving, log.sum(-2, keepdim=True).exp())


def _states(pieces: _Pieces, chunks: _Chunks, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before every chunk [N, G, R, V, K], and the last ones [D, H, V, K]."""
    _, k, v, _, _, leaving, through = pieces
    writes = ((v * leaving).mT @ k).flatten(1, 2)
    start = writes.new_zeros(len(chunks.counts), *writes.shape[1:]) if state is None else state
    before, last = chunks.scan(start, through.flatten(1, 2), writes)
    return before.unflatten(1, (*k.shape[1:2], -1)), last


def ssd_scan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    chunk: int | None,
    exclusive: bool,
    save: bool,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`ssd_scan_recurrence` by chunks, as matrix products: y, the last states (empty unless wanted), nothing kept.

        y = e^g (q S^T) + (q k^T * weights) v        g, h: sums of log decays up to the read, and after the write
        S' = e^G S + (v e^h)^T k

    Shapes as in `ssd_scan_recurrence`; cu_seqlens: int [D + 1], document starts over the B * T tokens, which include
    every row's start; None: each row is one document. state: [D, H, V, K], the state before each document; None: zeros.
    """
    del save
    chunks = _Chunks(v, cu_seqlens, chunk or CHUNK)
    pieces = _pieces(q, k, v, log_decay, chunks, *_triangles(v, chunk or CHUNK, exclusive))
    before, last = _states(pieces, chunks, state)
    y = (pieces.q @ before.mT) * pieces.entering + ((pieces.q @ pieces.k.mT) * pieces.weights) @ pieces.v
    return chunks.join(y.flatten(1, 2), v), last if return_state else last.new_empty(0), []


def ssd_scan_backward(
    dy: Tensor,
    dlast: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    *,
    chunk: int | None,
    exclusive: bool,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, log_decay and the state (empty if None); the states are computed again.

    The gradient of a log decay is the sum of the terms that contain it. The difference of the reads' and the writes'
    sums would be shorter, but would cancel where the decay is strong.
    """
    del saved
    chunks = _Chunks(v, cu_seqlens, chunk or CHUNK)
    reads, later = _triangles(v, chunk or CHUNK, exclusive)
    pieces = _pieces(q, k, v, log_decay, chunks, reads, later)
    q_, k_, v_, weights, entering, leaving, through = pieces
    before, _ = _states(pieces, chunks, state)
    dy = chunks.split(dy).unflatten(1, (q_.shape[1], -1))
    dread = dy * entering
    end = torch.zeros_like(before[:1].flatten(1, 2)).expand(len(chunks.counts), -1, -1, -1) if dlast is None else dlast
    dafter, dstate = chunks.scan(end, through.flatten(1, 2), (dread.mT @ q_).flatten(1, 2), reverse=True)
    dafter = dafter.unflatten(1, before.shape[1:3])

    scores = (q_ @ k_.mT) * weights
    dscores = (dy @ v_.mT) * weights
    read, written = dread @ before, (v_ * leaving) @ dafter  # the gradients of q and of k through the state
    dq = (dscores @ k_ + read).sum(2)
    dk = (dscores.mT @ q_ + written).sum(2)
    dv = scores.mT @ dy + (k_ @ dafter.mT) * leaving
    within = (reads.mT @ ((dy @ v_.mT) * scores) * later).sum(-1, keepdim=True)
    dlog = (
        within
        + reads.mT @ (read * q_).sum(-1, keepdim=True)
        + later @ (written * k_).sum(-1, keepdim=True)
        + through * (before * dafter).sum((-2, -1), keepdim=True)
    )
    dv, dlog = (x.flatten(1, 2) for x in (dv, dlog))
    return (
        chunks.join(dq, q),
        chunks.join(dk, k),
        chunks.join(dv, v),
        chunks.join(dlog, log_decay.unsqueeze(-1)).squeeze(-1),
        dy.new_empty(0) if state is None else dstate,
    )


def ssd_scan_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """One token: q, k [B, G, K], v [B, H, V], log_decay [B, H], state [B, H, V, K] -> y [B, H, V], the new state."""
    q, k, v, log_decay = (x.unsqueeze(1) for x in (q, k, v, log_decay))
    y, new = ssd_scan_recurrence(q, k, v, log_decay, state, exclusive)
    return y.squeeze(1), new


def ssd_scan_saved_shapes(
    q: tuple[int, ...],
    v: tuple[int, ...],
    documents: int,
    packed: bool,
    dtype: torch.dtype,
    *,
    chunk: int | None,
    save: bool,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Empty: nothing is kept for the backward pass, at any sizes. q, v: their shapes."""
    del q, v, documents, packed, dtype, chunk, save
    return []
