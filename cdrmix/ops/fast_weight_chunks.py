"""The plastic low-rank update over rows of many chunks: the updates of all chunks at once, then A chunk by chunk.

`plastic_step` is its form for decoding: one token of every row, without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cdrmix.kernels.fast_weights import reference
from cdrmix.ops.backend import backend, compute_dtype, kernels_of
from cdrmix.ops.checks import state_dtype
from cdrmix.ops.fast_weights import NARROW, SHRINK, _delta, _project, _write, plastic_commit
from cdrmix.ops.operator import operator


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

    The row is cut where chunks begin, and no part of it is padded, so that the cost is that of its tokens: decoding
    reads one token at a time. A piece of one chunk, whole or not, updates `pending` directly. Of several whole chunks
    each is a linear map, for the delta rule A' = pending M + U, with M the product of its I - beta k k^T. M and U are
    computed for all of them at once; M by the same rule from the identity, with values of 0. So only one product of
    [r, d] and [d, d] a chunk is sequential.
    Differentiable in all tensors but starts. Raises ValueError for an unknown rule.
    """
    _check_rule("plastic_chunks", rule)
    batch, tokens = k.shape[0], k.shape[1]
    dtype, wide = compute_dtype(x), state_dtype(x)
    assert beta.ndim == 2 or position + tokens <= chunk, "branches need rows within one chunk"
    with torch.autocast(x.device.type, enabled=False):
        q, k, v, beta = (tensor if tensor.dtype == wide else tensor.to(wide) for tensor in (q, k, v, beta))
        front = alpha * (q[:, :prefix] @ a.mT) if prefix else None
        q = q[:, prefix:] if prefix else q
        reads, reads_A = [], []
        for first, count, length in _pieces(position, tokens, chunk):
            last = first + count * length
            queries, keys, values = (_cut(tensor, -2, first, count, length) for tensor in (q, k, v))
            rates = _cut(beta, -1, first, count, length)
            over = ends = None
            if starts is not None:
                begun = _cut(starts.int(), -1, first, count, length).cumsum(-1)  # [B, N, C]
                ends = begun[..., -1:, None] > 0  # chunks in which a document begins: earlier state is dropped
                over = (begun > 0).unsqueeze(-1)
                old = begun < begun[..., -1:]  # tokens of documents that end in their chunk
                rates = torch.where(old, 0.0, rates)
                keys, values = (torch.where(old.unsqueeze(-1), 0.0, tensor) for tensor in (keys, values))
            maps = _maps(rule, keys, values, rates) if count > 1 else None  # of one chunk: none is needed
            if maps is not None and _has_kernel(rule, *maps):
                keep, add = (each.contiguous() for each in maps if each is not None)
                drops = keep.new_zeros(keep.shape[:2]) if ends is None else ends.flatten(1)
                states_A, a = _plastic_states(
                    keep, add, a.contiguous(), pending.contiguous(), drops.to(torch.int8), decay, limit
                )
                pending = decay * a
            else:
                before = []
                for n in range(count):
                    before.append(a)
                    if ends is not None:
                        pending = torch.where(ends[:, n], 0.0, pending)
                    if maps is None:
                        pending = _write(rule, keys[:, 0], values[:, 0], rates[..., 0, :], pending)
                    else:
                        pending = _applied(rule, *maps, n, pending)
                    if (position + last - (count - 1 - n) * length) % chunk == 0:
                        a = plastic_commit(pending, limit)
                        pending = decay * a
                    elif ends is not None:  # the rest of this chunk belongs to the new document, which reads zeros
                        a = torch.where(ends[:, n], 0.0, a)
                states_A = torch.stack(before, 1) if count > 1 else before[0].unsqueeze(1)
            reads_A.append(states_A)
            read = alpha * (queries @ states_A.mT)
            reads.append((read if over is None else torch.where(over, 0.0, read)).flatten(1, 2))
        y = _project(x.to(dtype), w.to(dtype), b_up.to(dtype), _joined([front, *reads]).to(dtype))
        return PlasticChunks(y.view(batch, -1, w.shape[0]), _joined(reads_A), a, pending)


class PlasticStep(NamedTuple):
    """The result for one token: y [B, O]; a and pending [B, r, d] as in PlasticChunks; last [B, d + g]."""

    y: Tensor
    a: Tensor
    pending: Tensor
    last: Tensor


def plastic_step(
    y: Tensor,
    own: Tensor,
    last: Tensor,
    b_up: Tensor,
    rate: Tensor,
    a: Tensor,
    pending: Tensor,
    *,
    chunk: int,
    position: int,
    alpha: float,
    decay: float,
    limit: float,
    rule: str = "delta",
    floor: float = 0.0,
) -> PlasticStep:
    """`plastic_chunks` for one token of every row, with the keys, rates and values made from their products.

    On a CPU in float32 it is one loop over the rows; else operations of PyTorch.

    y [B, O]: W x; alpha B A q is added in place. own [B, d + 2g + r]: the products of x_t with the slow weights, K x,
    the parts g1 x and g2 x of the gate, and P x; g is 1 with a gate, else 0. Further columns are not used. last
    [B, d + g]: K x and g1 x of the token before. b_up [O, r]; rate [1]; a, pending [B, r, d]. All of them are float32,
    or all float64.
        q = norm(K x_t), k = norm(K x_{t-1}), v = P x_t, norm(z) = z / sqrt(z . z + floor)
        beta = 2 sigmoid(rate) sigmoid(g1 x_{t-1} + g2 x_t), without a gate 2 sigmoid(rate)
    chunk, position, alpha, decay, limit and rule: as in `plastic_chunks`.
    It has no gradient: raises ValueError where gradients are enabled, and for wrong shapes and an unknown rule.
    """
    _check_rule("plastic_step", rule)
    if torch.is_grad_enabled():
        raise ValueError("plastic_step has no gradient: call plastic_chunks, or wrap the call in torch.no_grad()")
    batch, rank, width = a.shape
    gates = last.shape[1] - width
    shaped = y.shape == (batch, len(b_up)) and last.shape[0] == own.shape[0] == batch and pending.shape == a.shape
    if not (
        shaped and gates in (0, 1) and own.shape[1] >= width + 2 * gates + rank == width + 2 * gates + b_up.shape[1]
    ):
        tensors = {"y": y, "own": own, "last": last, "b_up": b_up, "a": a, "pending": pending}
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"plastic_step: the shapes do not fit together: {found}")
    gated = gates == 1
    pending, last = _plastic_step(y, own, last, b_up, rate, a, pending, alpha, floor, gated, rule)
    if position + 1 == chunk:
        a = plastic_commit(pending, limit)
        pending = decay * a
    return PlasticStep(y, a, pending, last)


@operator("cdrmix::plastic_step", mutates=("y",))
def _plastic_step(
    y: Tensor,
    own: Tensor,
    last: Tensor,
    b_up: Tensor,
    rate: Tensor,
    a: Tensor,
    pending: Tensor,
    alpha: float,
    floor: float,
    gated: bool,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """The next `pending` and `last`; y is changed."""
    kernels = kernels_of("fast_weights", "cpu") if backend(y) == "cpu" else reference
    tensors = (y, *(tensor.contiguous() for tensor in (own, last, b_up, rate, a, pending)))
    made: tuple[Tensor, Tensor] = kernels.step(*tensors, alpha=alpha, floor=floor, gated=gated, rule=rule)
    return made


@_plastic_step.register_fake
def _(
    y: Tensor,
    own: Tensor,
    last: Tensor,
    b_up: Tensor,
    rate: Tensor,
    a: Tensor,
    pending: Tensor,
    alpha: float,
    floor: float,
    gated: bool,
    rule: str,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(pending), torch.empty_like(last)


def _check_rule(op: str, rule: str) -> None:
    if rule not in reference.RULES:
        raise ValueError(f"{op}: rule={rule!r}; choose one of {', '.join(reference.RULES)}")


def _pieces(position: int, tokens: int, chunk: int) -> list[tuple[int, int, int]]:
    """The first token, the number of chunks and the tokens of each, of: the rest of a chunk, whole chunks, a part."""
    rest = min(tokens, chunk - position) if position else 0
    count, part = divmod(tokens - rest, chunk)
    pieces = [(0, 1, rest), (rest, count, chunk), (rest + count * chunk, 1, part)]
    return [piece for piece in pieces if piece[1] and piece[2]]


def _cut(tensor: Tensor, axis: int, first: int, count: int, length: int) -> Tensor:
    """The axis of tokens, from the token `first` on, as the axes [count, length]."""
    if tensor.shape[axis] != count * length:
        tensor = tensor.narrow(axis, first, count * length)
    return tensor.unflatten(axis, (count, length))


def _joined(parts: Sequence[Tensor | None]) -> Tensor:
    """Tensors [B, *, ...] one after another; None is left out."""
    tensors = [part for part in parts if part is not None]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)


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


def _applied(rule: str, keep: Tensor | None, add: Tensor, n: int, pending: Tensor) -> Tensor:
    """`pending` after the updates of the n-th chunk, by its map."""
    if keep is None:
        return pending + add[..., n, :, :]
    if rule == "oja":
        return keep[..., n, :, :].mT @ pending + add[..., n, :, :]
    return pending @ keep[..., n, :, :] + add[..., n, :, :]


def _has_kernel(rule: str, keep: Tensor | None, add: Tensor) -> bool:
    """Whether the states of several whole chunks are one kernel: the delta rule on a GPU, with keys that wkv7 takes.

    Each of them ends with a commit, so a document that begins in one drops `pending` and nothing else.
    """
    return rule == "delta" and keep is not None and add.shape[-1] <= NARROW and backend(add) == "triton"


@operator("cdrmix::plastic_states")
def _plastic_states(
    keep: Tensor, add: Tensor, a: Tensor, pending: Tensor, drops: Tensor, decay: float, limit: float
) -> tuple[Tensor, Tensor]:
    """What each chunk reads [B, N, r, d], and A [B, r, d] after the last, from the chunks' maps: `triton_states.py`."""
    states, last = kernels_of("fast_weights", "triton_states").states_forward(
        keep, add, a, pending, drops, decay, limit, SHRINK
    )
    return states, last


@_plastic_states.register_fake
def _(
    keep: Tensor, add: Tensor, a: Tensor, pending: Tensor, drops: Tensor, decay: float, limit: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(add), torch.empty_like(a)


@operator("cdrmix::plastic_states_backward")
def _plastic_states_backward(
    dstates: Tensor,
    dlast: Tensor,
    keep: Tensor,
    add: Tensor,
    pending: Tensor,
    drops: Tensor,
    states: Tensor,
    decay: float,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of keep, add, a and pending."""
    dkeep, dadd, da, dpending = kernels_of("fast_weights", "triton_states").states_backward(
        dstates, dlast, keep, add, pending, drops, states, decay, limit, SHRINK
    )
    return dkeep, dadd, da, dpending


@_plastic_states_backward.register_fake
def _(
    dstates: Tensor,
    dlast: Tensor,
    keep: Tensor,
    add: Tensor,
    pending: Tensor,
    drops: Tensor,
    states: Tensor,
    decay: float,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(keep), torch.empty_like(add), torch.empty_like(pending), torch.empty_like(pending)


def _keep_states(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    keep, add, _, pending, drops, ctx.decay, ctx.limit = inputs
    ctx.save_for_backward(keep, add, pending, drops, output[0])


def _differentiate_states(ctx: Any, dstates: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _plastic_states_backward(
        dstates.contiguous(), dlast.contiguous(), *ctx.saved_tensors, ctx.decay, ctx.limit
    )
    wanted = [dx if needed else None for dx, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None, None


_plastic_states.register_autograd(_differentiate_states, setup_context=_keep_states)
