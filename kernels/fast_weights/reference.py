"""The plastic low-rank update in plain PyTorch: its definition, and its two operators as matrix products.

Shapes: T tokens, I inputs and O outputs of the projection, r its low rank, d width of the keys; S branches that share
rows, R rows, N independent updates, K key and V value width, C tokens of a piece, P pieces. All of it runs in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdrmix.kernels.common.products import mm
from cdrmix.kernels.rwkv7.reference import unit_lower_inverse

RULES = ("hebb", "delta", "oja")
PIECE = 64  # tokens for which the delta rule's triangular system is solved at once


def plastic_lora_loop(
    x: Tensor,
    w: Tensor,
    b_up: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    a_state: Tensor,
    *,
    alpha: float,
    decay: float,
    rule: str = "delta",
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One chunk, token by token: the definition.

        y_t = W x_t + alpha B A q_t          with A from before the chunk
        A' = decay A, then for every token in order
            hebb:   A' += beta_t v_t k_t^T                      (differentiable plasticity, arXiv 1804.02464)
            delta:  A' += beta_t (v_t - A' k_t) k_t^T           (fast weight programmers, arXiv 2102.11174)
            oja:    A' += beta_t v_t (k_t - A'^T v_t)^T         (Oja 1982: k_t less what v_t already explains of it)

    x [*, T, I]; w [O, I]; b_up [O, r]; q, k [*, T, d]; v [*, T, r]; beta [*, T]; a_state [*, r, d]. starts: bool
    [*, T]; before a token where it is True, A and A' are set to zero. Returns y [*, T, O] and A' [*, r, d].
    """
    read, written, reads = a_state, decay * a_state, []
    for t in range(x.shape[-2]):
        key, value, rate = k[..., t, :], v[..., t, :], beta[..., t, None, None]
        if starts is not None:
            here = starts[..., t, None, None]
            read, written = torch.where(here, 0.0, read), torch.where(here, 0.0, written)
        reads.append(torch.einsum("...rd,...d->...r", read, q[..., t, :]))
        if rule == "delta":
            value = value - torch.einsum("...rd,...d->...r", written, key)
        elif rule == "oja":
            key = key - torch.einsum("...rd,...r->...d", written, value)
        written = written + rate * (value.unsqueeze(-1) * key.unsqueeze(-2))
    return x @ w.mT + alpha * (torch.stack(reads, -2) @ b_up.mT), written


def step(
    y: Tensor,
    own: Tensor,
    last: Tensor,
    b_up: Tensor,
    rate: Tensor,
    a: Tensor,
    pending: Tensor,
    *,
    alpha: float,
    floor: float,
    gated: bool,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """One token: adds alpha B A q to y [B, O] in place, and returns `pending` after its update, and the next `last`.

    The other arguments are those of `ops.plastic_step`.
    """
    width, gates = a.shape[-1], int(gated)
    carried, here, v, _ = own.tensor_split([width + gates, width + 2 * gates, width + 2 * gates + a.shape[1]], -1)
    keys = torch.stack([last[:, :width], carried[:, :width]], 1)
    k, q = (keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + floor)).unsqueeze(-1).unbind(1)
    beta = 2 * torch.sigmoid(rate).expand(len(y), 1)
    if gated:
        beta = beta * torch.sigmoid(last[:, width:] + here)
    y += alpha * ((a @ q).squeeze(-1) @ b_up.mT)
    v = v.unsqueeze(-1)
    if rule == "delta":
        v = v - pending @ k
    elif rule == "oja":
        k = k - pending.mT @ v
    return torch.baddbmm(pending, beta.unsqueeze(-1) * v, k.mT), carried.contiguous()


def project_forward(x: Tensor, w: Tensor, b_up: Tensor, reads: Tensor) -> Tensor:
    """y [S, R, O] = x w^T + reads b_up^T for x [R, I], w [O, I], b_up [O, r], reads [S, R, r]; one product x w^T."""
    base = mm(x, w.mT)
    if len(reads) == 1:
        return base.addmm_(reads[0], b_up.mT).unsqueeze(0)
    y = base.new_empty(len(reads), *base.shape)
    for branch, out in zip(reads, y, strict=True):
        torch.addmm(base, branch, b_up.mT, out=out)
    return y


def project_backward(
    dy: Tensor, x: Tensor, w: Tensor, b_up: Tensor, reads: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, w, b_up and reads; empty where `wanted`, in that order, is False.

    db_up is computed as (reads^T dy)^T: dy^T reads takes 1.8 times as long on a CPU at O 1,024, r 16.
    """
    rows, none = dy.flatten(0, 1), dy.new_empty(0)
    base = dy[0] if len(dy) == 1 else dy.sum(0)
    return (
        mm(base, w) if wanted[0] else none,
        mm(base.mT, x) if wanted[1] else none.clone(),
        (reads.flatten(0, 1).mT @ rows).mT.contiguous() if wanted[2] else none.clone(),
        (rows @ b_up).view(reads.shape) if wanted[3] else none.clone(),
    )


def _pieces(x: Tensor, piece: int) -> Tensor:
    """[N, T, ...] -> [N, P, C, ...], padded with zeros: a token with zero rate, key and value changes no state."""
    missing = -x.shape[1] % piece
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)
    return x.view(x.shape[0], -1, piece, *x.shape[2:])


def piece_length(tokens: int) -> int:
    """Tokens of a piece: PIECE, or the least power of two that holds all tokens."""
    return min(PIECE, 1 << (tokens - 1).bit_length())


def delta_forward(k: Tensor, v: Tensor, beta: Tensor, state: Tensor, *, save: bool) -> tuple[Tensor, list[Tensor]]:
    """The delta rule's last state, by pieces of at most PIECE tokens (the WY form, arXiv 2406.06484).

        S_t = S_{t-1} + beta_t (v_t - S_{t-1} k_t) k_t^T
    Within a piece, with S_0 the state before it:
        U = (I + tril(diag(beta) K K^T, -1))^-1 diag(beta) (V - K S_0^T) ;  S = S_0 + U^T K

    k [N, T, K]; v [N, T, V]; beta [N, T]; state [N, V, K]. Returns S [N, V, K] and, if `save`, what `delta_backward`
    needs of every piece: S_0, V - K S_0^T, U, K K^T and the inverse, with the shapes of `delta_saved_shapes`.
    """
    piece = piece_length(k.shape[1])
    k, v, beta = _pieces(k, piece), _pieces(v, piece), _pieces(beta, piece)
    gram = k @ k.mT
    inverse = unit_lower_inverse((gram * -beta.unsqueeze(-1)).tril_(-1))
    solved = inverse * beta.unsqueeze(-2)
    states = state.new_empty(len(state), k.shape[1] + 1, *state.shape[1:])
    states[:, 0] = state
    errors, updates = torch.empty_like(v), torch.empty_like(v)
    before, *after = states.unbind(1)
    for key, value, solve, error, update, behind in zip(
        *(x.unbind(1) for x in (k, v, solved, errors, updates)), after, strict=True
    ):
        torch.baddbmm(value, key, before.mT, alpha=-1, out=error)
        torch.bmm(solve, error, out=update)
        before = torch.baddbmm(before, update.mT, key, out=behind)
    return states[:, -1].clone(), [states, errors, updates, gram, inverse] if save else []


def delta_saved_shapes(k: Tensor, v: Tensor) -> list[tuple[int, ...]]:
    """Shapes of what `delta_forward` saves."""
    (N, T, K), V = k.shape, v.shape[-1]
    C = piece_length(T)
    P = -(-T // C)
    return [(N, P + 1, V, K), (N, P, C, V), (N, P, C, V), (N, P, C, C), (N, P, C, C)]


def delta_backward(
    dlast: Tensor, k: Tensor, v: Tensor, beta: Tensor, saved: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of k, v, beta and the state: the adjoint of `delta_forward`, from the last piece to the first."""
    states, errors, updates, gram, inverse = saved
    tokens, piece = k.shape[1], gram.shape[-1]
    k, rates = _pieces(k, piece), _pieces(beta, piece).unsqueeze(-1)
    dstates, dright, dvalues = torch.empty_like(states), torch.empty_like(errors), torch.empty_like(errors)
    dstates[:, -1] = dlast
    *before, dstate = dstates.unbind(1)
    pieces = zip(*(x.unbind(1) for x in (k, rates, inverse, dright, dvalues)), before, strict=True)
    for key, rate, solve, right, value, ahead in reversed(list(pieces)):
        torch.bmm(solve.mT, key @ dstate.mT, out=right)  # the gradient of diag(beta) (V - K S_0^T)
        torch.mul(rate, right, out=value)
        dstate = torch.baddbmm(dstate, value.mT, key, alpha=-1, out=ahead)
    dlower = (dright @ updates.mT).tril_(-1).neg_()  # of tril(diag(beta) K K^T, -1)
    dbeta = (dright * errors).sum(-1) + (dlower * gram).sum(-1)
    dgram = rates * dlower
    dk = (dgram + dgram.mT) @ k
    flat = dk.flatten(0, 1)
    flat.baddbmm_(updates.flatten(0, 1), dstates[:, 1:].flatten(0, 1))
    flat.baddbmm_(dvalues.flatten(0, 1), states[:, :-1].flatten(0, 1), alpha=-1)
    dk, dvalues, dbeta = (x.flatten(1, 2)[:, :tokens].contiguous() for x in (dk, dvalues, dbeta))
    return dk, dvalues, dbeta, dstates[:, 0].clone()
