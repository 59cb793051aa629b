"""The RWKV-7 recurrence in plain PyTorch: specification and oracle.

Shapes: B batch, T time, H heads, K key width, V value width, C chunk length, N chunks or documents.
All of it runs in float64 as well as in float32, so the other implementations are tested against it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 16  # tokens; on a CPU 16 and 32 take the same time at head width 32, and 16 is more exact


def document_starts(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Which tokens start a document inside a row, without each row's first token: bool [B, T].

    cu_seqlens: int [D + 1], document starts over the flattened B * T tokens, first 0, last B * T.
    """
    starts = torch.zeros(batch * length + 1, dtype=torch.bool, device=cu_seqlens.device)
    starts.index_fill_(0, cu_seqlens.long(), True)
    starts = starts[:-1].view(batch, length)
    starts[:, 0] = False
    return starts


def wkv7_recurrence(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RWKV-7's generalised delta rule, token by token: the definition (arXiv 2503.14456, equations 16 to 19).

        S_t = S_{t-1} diag(exp(log_w_t)) + (S_{t-1} a_t) b_t^T + v_t k_t^T
        y_t = S_t r_t

    r, log_w, k, a, b: [B, T, H, K]; v: [B, T, H, V]; state: [B, H, V, K], zero if None.
    Returns y [B, T, H, V] and the last state [B, H, V, K].
    """
    batch, length, heads, key_width = r.shape
    S = r.new_zeros(batch, heads, v.shape[-1], key_width) if state is None else state
    outputs = []
    for t in range(length):
        removed = torch.einsum("bhvk,bhk->bhv", S, a[:, t])
        S = (
            S * log_w[:, t].exp().unsqueeze(-2)
            + removed.unsqueeze(-1) * b[:, t].unsqueeze(-2)
            + v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        )
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, r[:, t]))
    return torch.stack(outputs, 1), S


class _Chunks:
    """The chunks of C tokens of a [B, T] batch, and which pairs of tokens share a document.

    inclusive, exclusive: [C, C], ones at and below the diagonal, and below it.
    causal:  [B, 1, N, 2C, 2C], 1 where query i reads write j. Rows: C of r (j <= i), then C of a (j < i);
             columns: C of k, then C of b.
    enters:  [B, 1, N, C, 1], 1 while the token's document began before the chunk: it reads the incoming state.
    leaves:  [B, 1, N, C, 1], 1 where the token's document is the chunk's last: it writes to the outgoing state.
    passes:  [B, 1, N, 1, 1], 1 where no document begins in the chunk: the incoming state decays to the outgoing one.
    The last three are None when each row is one document.
    """

    def __init__(self, like: Tensor, batch: int, length: int, chunk: int, cu_seqlens: Tensor | None) -> None:
        self.chunk, self.count = chunk, -(-length // chunk)
        self.padding = self.count * chunk - length
        triangle = torch.ones(chunk, chunk, dtype=like.dtype, device=like.device)
        self.inclusive, self.exclusive = triangle.tril(), triangle.tril(-1)
        self.causal = torch.cat([self.inclusive.repeat(1, 2), self.exclusive.repeat(1, 2)])
        self.enters: Tensor | None = None
        self.leaves: Tensor | None = None
        self.passes: Tensor | None = None
        if cu_seqlens is None:
            return
        document = document_starts(cu_seqlens, batch, length).cumsum(1)  # document 0 continues the incoming state
        if self.padding:
            document = torch.cat([document, document[:, -1:].expand(-1, self.padding)], 1)
        document = document.view(batch, 1, self.count, chunk)
        same = (document.unsqueeze(-1) == document.unsqueeze(-2)).to(like.dtype)
        self.causal = self.causal * same.repeat(1, 1, 1, 2, 2)
        before = torch.cat([torch.zeros_like(document[:, :, :1, 0]), document[:, :, :-1, -1]], 2)
        self.enters = (document == before.unsqueeze(-1)).to(like.dtype).unsqueeze(-1)
        self.leaves = (document == document[..., -1:]).to(like.dtype).unsqueeze(-1)
        self.passes = self.enters[..., -1:, :]

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H, D] -> [B, H, N, C, D], padded with zeros: a padded token writes nothing and has a decay of 1."""
        batch, _, heads, width = x.shape
        if self.padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, self.padding))
        return x.view(batch, self.count, self.chunk, heads, width).permute(0, 3, 1, 2, 4).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """[B, H, N, C, D] -> [B, T, H, D]: the inverse of split."""
        batch, heads, _, _, width = x.shape
        x = x.permute(0, 2, 3, 1, 4).reshape(batch, self.count * self.chunk, heads, width)
        return x[:, : self.count * self.chunk - self.padding]


def unit_lower_inverse(A: Tensor) -> Tensor:
    """(I - A)^-1 of strictly lower triangular A [..., C, C], C a power of two, by products of blocks.

    A is nilpotent: on the diagonal's 8 x 8 blocks (I - A)^-1 = (I + A)(I + A^2)(I + A^4) exactly. Two inverted blocks
    X (above) and Y (below) merge to [[X, 0], [Y A_yx X, Y]]. With blocks of 8 the terms that may cancel are at most
    binomial(7, 3) = 35 times the result. Substitution over many small matrices was 4x slower.
    """
    size = A.shape[-1]
    block = min(size, 8)
    D = torch.stack([A[..., i : i + block, i : i + block] for i in range(0, size, block)], -3)
    square = D @ D
    inverse = D + square
    inverse = inverse + D @ square
    inverse.diagonal(dim1=-2, dim2=-1).add_(1)
    inverse = inverse + (square @ square) @ inverse
    while block < size:
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = torch.stack([A[..., i + block : i + 2 * block, i : i + block] for i in range(0, size, 2 * block)], -3)
        inverse = torch.cat(
            [
                torch.cat([upper, torch.zeros_like(upper)], -1),
                torch.cat([lower @ corner @ upper, lower], -1),
            ],
            -2,
        )
        block *= 2
    return inverse.squeeze(-3)


class _Saved(NamedTuple):
    """What the chunked forward pass keeps for the backward pass; names as in `_chunked_forward`."""

    chunks: _Chunks
    v: Tensor
    U: Tensor
    scores: Tensor
    inverse: Tensor
    queries: Tensor
    keys: Tensor
    query_decay: Tensor
    key_decay: Tensor
    middle: Tensor
    total: Tensor
    through: Tensor
    leaving: Tensor
    P: Tensor
    R: Tensor
    h: Tensor


def _chunked_forward(
    r: Tensor,
    log_w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, _Saved]:
    """RWKV-7 by chunks: an affine map for each chunk, and one scan over chunks; `state` is the state before each row.

    Within a chunk, with g the inclusive and e the exclusive cumulative log decay and h = S^T [K, V] at its start:
        U = (I - A_ab)^-1 (A_ak V + a e^e h)         the S_{t-1} a_t of its tokens
        y = r e^g h + A_qk V + A_qb U
        h' = e^(g_C) h + (k e^(g_C - g))^T V + (b e^(g_C - g))^T U
    So y = P h + O and h' = R h + Q, where P, O, R, Q do not depend on h: only h' = R h + Q is sequential.
    A_qk_ij = sum_K r_i k_j e^(g_i - g_j) and the three similar matrices come from one product of
    [r e^(g - m); a e^(e - m)] with [k e^(m - g); b e^(m - g)], with m the log decay in the middle of the chunk. So the
    exponents cover half a chunk, and float32 holds them for |log_w| C / 2 < 88.
    """

    batch, length, heads, key_width = r.shape
    value_width = v.shape[-1]
    chunks = _Chunks(r, batch, length, chunk, cu_seqlens)
    r, log_w, k, v, a, b = (chunks.split(x) for x in (r, log_w, k, v, a, b))
    g = chunks.inclusive @ log_w  # torch.cumsum would have no fixed order on a GPU
    middle = g[..., chunk // 2 - 1 : chunk // 2, :]
    total = g[..., -1:, :]
    query_decay = torch.cat([g - middle, g - log_w - middle], -2).exp_()
    key_decay = (middle - g).exp_()
    queries = torch.cat([r, a], -2).mul_(query_decay)  # r then a: [B, H, N, 2C, K]
    keys = torch.cat([k * key_decay, b * key_decay], -2)  # k then b
    scores = torch.matmul(queries, keys.mT).mul_(chunks.causal)
    entering = queries * middle.exp()
    leaving = keys * (total - middle).exp()
    if chunks.enters is not None and chunks.leaves is not None:
        entering *= chunks.enters.repeat(1, 1, 1, 2, 1)
        leaving *= chunks.leaves.repeat(1, 1, 1, 2, 1)
    inverse = unit_lower_inverse(scores[..., chunk:, chunk:])
    W, U = inverse @ entering[..., chunk:, :], inverse @ (scores[..., chunk:, :chunk] @ v)
    values = torch.cat([v, U], -2)
    through = total.exp() if chunks.passes is None else total.exp() * chunks.passes
    R = leaving[..., chunk:, :].mT @ W
    R.diagonal(dim1=-2, dim2=-1).add_(through.squeeze(-2))
    Q = leaving.mT @ values
    P = entering[..., :chunk, :] + scores[..., :chunk, chunk:] @ W

    h = r.new_empty(chunks.count + 1, batch * heads, key_width, value_width)
    h[0] = 0 if state is None else state.mT.reshape(batch * heads, key_width, value_width)
    R_by_chunk = R.view(batch * heads, chunks.count, key_width, key_width)
    Q_by_chunk = Q.view(batch * heads, chunks.count, key_width, value_width)
    for n in range(chunks.count):
        torch.baddbmm(Q_by_chunk[:, n], R_by_chunk[:, n], h[n], out=h[n + 1])
    h_in = h[:-1].transpose(0, 1).reshape(batch, heads, chunks.count, key_width, value_width)
    y = (scores[..., :chunk, :] @ values).add_(P @ h_in)
    U = torch.add(U, W @ h_in)

    saved = _Saved(
        chunks,
        v,
        U,
        scores,
        inverse,
        queries,
        keys,
        query_decay,
        key_decay,
        middle,
        total,
        through,
        leaving,
        P,
        R,
        h_in,
    )
    last = h[-1].view(batch, heads, key_width, value_width).mT
    return chunks.join(y), last.contiguous(), saved


def _chunked_backward(saved: _Saved, dy: Tensor, dlast: Tensor | None) -> tuple[Tensor, ...]:
    """The adjoint of `_chunked_forward`: gradients of r, log_w, k, v, a, b and the state."""
    chunks, v, U, scores, inverse, queries, keys, query_decay, key_decay, middle, total, through, leaving, P, R, h = (
        saved
    )
    chunk = chunks.chunk
    batch, heads, count, key_width, value_width = h.shape
    dy = chunks.split(dy)

    dh = h.new_empty(count + 1, batch * heads, key_width, value_width)
    dh[count] = 0 if dlast is None else dlast.mT.reshape(batch * heads, key_width, value_width)
    read = (P.mT @ dy).view(batch * heads, count, key_width, value_width)
    R_by_chunk = R.view(batch * heads, count, key_width, key_width)
    for n in range(count - 1, -1, -1):
        torch.baddbmm(read[:, n], R_by_chunk[:, n].mT, dh[n + 1], out=dh[n])
    dh_out = dh[1:].transpose(0, 1).reshape(batch, heads, count, key_width, value_width)
    dstate = dh[0].view(batch, heads, key_width, value_width).mT.contiguous()

    # values = [V; U]: their gradient through y and h', then through the triangular system.
    dvalues = scores[..., :chunk, :].mT @ dy + leaving @ dh_out
    Z = inverse.mT @ dvalues[..., chunk:, :]
    dv = dvalues[..., :chunk, :] + scores[..., chunk:, :chunk].mT @ Z
    dreads = torch.cat([dy, Z], -2)  # of the rows of r and the rows of a
    values = torch.cat([v, U], -2)
    dscores = torch.matmul(dreads, values.mT).mul_(chunks.causal)
    dentering = dreads @ h.mT
    dleaving = values @ dh_out.mT
    if chunks.enters is not None and chunks.leaves is not None:
        dentering *= chunks.enters.repeat(1, 1, 1, 2, 1)
        dleaving *= chunks.leaves.repeat(1, 1, 1, 2, 1)
    dqueries = torch.matmul(dscores, keys).add_(dentering.mul_(middle.exp()))
    dkeys = dscores.mT @ queries

    # The exponent of a query has +g (e for a), that of a key -g, and that of a write to the next state g_C - g.
    # The part of the next state is summed over the tokens before, not as a total minus the tokens after,
    # which would cancel where the decay is strong.
    from_query = dqueries * queries
    from_key = dkeys * keys
    dleaving.mul_((total - middle).exp())
    from_leaving = dleaving * keys
    from_leaving = from_leaving[..., :chunk, :] + from_leaving[..., chunk:, :]
    later = from_query[..., :chunk, :] + from_query[..., chunk:, :]
    later -= from_key[..., :chunk, :] + from_key[..., chunk:, :]
    suffix = chunks.inclusive.mT @ later - from_query[..., chunk:, :]  # a_t reads the state before w_t is applied
    prefix = chunks.exclusive @ from_leaving
    dlog_w = suffix + prefix + (h * dh_out).sum(-1).unsqueeze(-2) * through

    dqueries.mul_(query_decay)
    dkeys.add_(dleaving)
    gradients = (
        dqueries[..., :chunk, :],
        dlog_w,
        dkeys[..., :chunk, :] * key_decay,
        dv,
        dqueries[..., chunk:, :],
        dkeys[..., chunk:, :] * key_decay,
    )
    return *(chunks.join(x) for x in gradients), dstate


class _Wkv7(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, log_w, k, v, a, b, state, cu_seqlens, chunk):  # type: ignore[no-untyped-def]
        y, last, saved = _chunked_forward(r, log_w, k, v, a, b, state, cu_seqlens, chunk)
        ctx.chunks, ctx.has_state = saved.chunks, state is not None
        ctx.save_for_backward(*saved[1:])
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dlast):  # type: ignore[no-untyped-def]
        *gradients, dstate = _chunked_backward(_Saved(ctx.chunks, *ctx.saved_tensors), dy, dlast)
        return *gradients, dstate if ctx.has_state else None, None, None


def wkv7(
    r: Tensor,
    log_w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = True,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7's recurrence (see `wkv7_recurrence`) by chunks of `chunk` tokens, as matrix products.

    r, log_w, k, a, b: [B, T, H, K] with log_w <= 0; v: [B, T, H, V].
    cu_seqlens: int [N + 1], document starts over the flattened B * T tokens, which include every row's start; None:
    each row is one document, N = B. state: [N, H, V, K], the state before each document; None: zeros.
    Returns y [B, T, H, V] and each document's last state [N, H, V, K]; differentiable in all inputs but cu_seqlens.
    """
    if cu_seqlens is None:
        y, last = _Wkv7.apply(r, log_w, k, v, a, b, state, None, chunk)
        return y, last if return_state else None
    if state is None and not return_state:
        return _Wkv7.apply(r, log_w, k, v, a, b, None, cu_seqlens, chunk)[0], None
    batch, length, heads, key_width = r.shape
    flat = [x.reshape(1, batch * length, *x.shape[2:]) for x in (r, log_w, k, v, a, b)]
    outputs, lasts = [], []
    for document, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        initial = r.new_zeros(1, heads, v.shape[-1], key_width) if state is None else state[document : document + 1]
        if start < end:
            y, initial = _Wkv7.apply(*(x[:, start:end] for x in flat), initial, None, chunk)
            outputs.append(y)
        lasts.append(initial)
    return torch.cat(outputs, 1).view(*v.shape), torch.cat(lasts) if return_state else None


def wkv7_forward(
    r: Tensor,
    log_w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    chunk: int | None,
    save: bool,
    recompute: bool,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`wkv7` with the signature that the operator calls: y, the last states (empty unless wanted), nothing kept."""
    del save, recompute
    y, last = wkv7(
        r, log_w, k, v, a, b, state=state, cu_seqlens=cu_seqlens, return_state=return_state, chunk=chunk or CHUNK
    )
    return y, y.new_empty(0) if last is None else last, []


def wkv7_backward(
    dy: Tensor,
    dlast: Tensor | None,
    r: Tensor,
    log_w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    *,
    chunk: int | None,
    recompute: bool,
) -> tuple[Tensor, ...]:
    """The gradients of r, log_w, k, v, a, b and the state (empty if None); the forward pass is computed again."""
    del saved, recompute
    chunk, inputs, none = chunk or CHUNK, (r, log_w, k, v, a, b), dy.new_empty(0)
    if cu_seqlens is None or (state is None and dlast is None):
        *gradients, dstate = _chunked_backward(_chunked_forward(*inputs, state, cu_seqlens, chunk)[2], dy, dlast)
        # Clones: an operator's outputs must not share memory, and the gradients of r and a are halves of one tensor.
        return *(dx.clone() for dx in gradients), none if state is None else dstate
    flat = [x.reshape(1, -1, *x.shape[2:]) for x in (*inputs, dy)]
    pieces, dstates = [], []
    for document, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        here = slice(document, document + 1)
        initial = None if state is None else state[here]
        dstate = dy.new_zeros(1, dy.shape[2], dy.shape[3], r.shape[3]) if dlast is None else dlast[here]
        if start < end:
            r, log_w, k, v, a, b, dy_here = (x[:, start:end] for x in flat)
            saved_here = _chunked_forward(r, log_w, k, v, a, b, initial, None, chunk)[2]
            *gradients, dstate = _chunked_backward(saved_here, dy_here, dstate)
            pieces.append(gradients)
        dstates.append(dstate)
    joined = [torch.cat(parts, 1).view(x.shape) for parts, x in zip(zip(*pieces, strict=True), inputs, strict=True)]
    return *joined, none if state is None else torch.cat(dstates)


def wkv7_step(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: r, log_w, k, a, b [B, H, K], v [B, H, V], state [B, H, V, K] -> y [B, H, V], the new state."""
    r, log_w, k, v, a, b = (x.unsqueeze(1) for x in (r, log_w, k, v, a, b))
    y, new = wkv7_recurrence(r, log_w, k, v, a, b, state)
    return y.squeeze(1), new


def wkv7_saved_shapes(
    batch: int,
    length: int,
    heads: int,
    key_width: int,
    value_width: int,
    documents: int,
    packed: bool,
    dtype: torch.dtype,
    *,
    chunk: int | None,
    save: bool,
    recompute: bool,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Empty: nothing is kept for the backward pass, at any sizes."""
    del batch, length, heads, key_width, value_width, documents, packed, dtype, chunk, save, recompute
    return []


class _TokenShift(torch.autograd.Function):
    """x_{t-1} with its adjoint; autograd's slices would fill and add a whole tensor each."""

    @staticmethod
    def forward(ctx, x_BTD, last_BD, starts_BT1):  # type: ignore[no-untyped-def]
        shifted = torch.empty_like(x_BTD)
        shifted[:, 1:] = x_BTD[:, :-1]
        shifted[:, 0] = 0 if last_BD is None else last_BD
        ctx.starts_BT1, ctx.has_last = starts_BT1, last_BD is not None
        return shifted if starts_BT1 is None else shifted.masked_fill_(starts_BT1, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BTD):  # type: ignore[no-untyped-def]
        if ctx.starts_BT1 is not None:
            dy_BTD = dy_BTD.masked_fill(ctx.starts_BT1, 0)
        dx_BTD = torch.empty_like(dy_BTD)
        dx_BTD[:, :-1] = dy_BTD[:, 1:]
        dx_BTD[:, -1] = 0
        return dx_BTD, dy_BTD[:, 0] if ctx.has_last else None, None


def token_shift(x_BTD: Tensor, last_BD: Tensor | None = None, starts_BT1: Tensor | None = None) -> Tensor:
    """Each token's predecessor x_{t-1}; `last_BD` (or zero) for the first token; zero where a document starts.

    starts_BT1: bool [B, T, 1], True where a document starts inside a row. Differentiable in x and last.
    """
    return _TokenShift.apply(x_BTD, last_BD, starts_BT1)
