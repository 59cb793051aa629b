"""The plastic low-rank update: its checks, masks and rules, and the two operators that it uses.

`cdrmix::plastic_project` is the projection with the low-rank product in its epilogue. `cdrmix::plastic_delta` is the
delta rule for wide keys. For narrow keys `ops.wkv7` is used, and Hebbian updates are one matrix product.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cdrmix.kernels.fast_weights import reference
from cdrmix.ops.backend import backend, compute_dtype, kernels_of
from cdrmix.ops.checks import DTYPES, state_dtype
from cdrmix.ops.operator import operator
from cdrmix.ops.rwkv7 import KERNEL_WIDTHS, wkv7

MOST_RANK = 128
# Keys up to this width, and on a CPU values, use wkv7. At 128, `plastic_delta` takes half of wkv7's time on a CPU, and
# a GPU has no wkv7 kernel for float32 keys of 128. On a GPU wider values are several heads: `plastic_delta` starts four
# kernels for each 64 tokens, one after another.
NARROW = 64
# Up to so many tokens the delta rule is one update after another, without wkv7: on a CPU with keys of 64 and rank 16,
# one row takes 80 us for 4 tokens (wkv7: 180), and 64 rows 210 us (340); 16 tokens take more than with wkv7.
FEW_TOKENS = 4
SIZES = {
    "x": "*, T, I",
    "w": "O, I",
    "b_up": "O, r",
    "q": "*, T, d",
    "k": "*, T, d",
    "v": "*, T, r",
    "beta": "*, T",
    "a_state": "*, r, d",
    "starts": "*, T",
}
SHRINK = 1 - 2**-22  # a row that was scaled down stays within the limit after two roundings to float32


def plastic_lora(
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
    """A projection with a low-rank term whose inner matrix A a chunk of tokens reads, and then updates.

        y_t = W x_t + alpha B A q_t          with A from before the chunk
        A' = decay A, then for every token in order
            rule="hebb"    A' += beta_t v_t k_t^T                      (arXiv 1804.02464)
            rule="delta"   A' += beta_t (v_t - A' k_t) k_t^T           (arXiv 2102.11174)
            rule="oja"     A' += beta_t v_t (k_t - A'^T v_t)^T         (Oja 1982)

    x: [*, T, I]; w: [O, I]; b_up, B: [O, r], r from 1 to 128; bfloat16, float16 or float32, under autocast cast to its
        dtype, which y has. q, k: [*, T, d], v: [*, T, r], beta: [*, T], of any of these dtypes; d is r or larger.
    a_state, A: float32 [*, r, d]. Reads and updates of it are computed in float32, for any dtype of the others. float64
        for all tensors, A too, uses the reference.
    Leading dimensions * broadcast against each other. x W^T is computed for those of x only: branches are a dimension
        in front of A or beta that x does not have.
    decay: of A between chunks, 0 to 1. starts: bool [*, T], True where a document begins: from a chunk's first start on
        the tokens read zeros, and A' holds only the updates since the chunk's last start.
    Returns y [*, T, O], and A' [*, r, d] with the leading dimensions of the updates. Differentiable once, through any
    number of chunks, in all tensors but starts. With A = 0 and beta = 0, y has the bits of the plain projection: on a
    CPU PyTorch's, on a GPU those of the same kernel for x and w alone.
    "delta" is stable for beta |k|^2 up to 2, "oja" for beta |v|^2 up to 2. Neither is checked, nor is the size of A;
    plastic_commit limits that.
    Raises ValueError naming the argument, before anything runs.
    """
    _check((x, w, b_up, q, k, v, beta, a_state), starts)
    if rule not in reference.RULES:
        raise ValueError(f"plastic_lora: rule={rule!r}; choose one of {', '.join(reference.RULES)}")
    for name, number in (("alpha", alpha), ("decay", decay)):
        if not isinstance(number, int | float):
            raise ValueError(f"plastic_lora: {name} must be a number; found {type(number).__name__}")
    if not math.isfinite(alpha):
        raise ValueError(f"plastic_lora: alpha must be a finite number; found {alpha}")
    if not 0 <= decay <= 1:
        raise ValueError(f"plastic_lora: decay must be from 0 to 1, a factor of A; found {decay}")
    dtype, wide = compute_dtype(x), state_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        q, k, v, beta = (tensor.to(wide) for tensor in (q, k, v, beta))
        reads, written = _read(q, alpha * a_state), decay * a_state
        if starts is not None:
            begun = starts.int().cumsum(-1)  # documents that have begun in this chunk
            every = begun[..., -1:]
            reads = torch.where(begun.unsqueeze(-1) > 0, 0.0, reads)
            over = begun < every  # tokens of documents that end in this chunk; their values may be NaN
            beta = torch.where(over, 0.0, beta)
            k, v = (torch.where(over.unsqueeze(-1), 0.0, tensor) for tensor in (k, v))
            written = torch.where(every.unsqueeze(-1) > 0, 0.0, written)
        y = _project(x.to(dtype), w.to(dtype), b_up.to(dtype), reads.to(dtype))
        return y, _write(rule, k, v, beta, written)


def plastic_commit(a: Tensor, limit: float = 2.0) -> Tensor:
    """A [*, r, d] with every row scaled down to a Euclidean norm of at most `limit`; rows within it keep their bits.

    float32 or float64; norms are computed in float64. Differentiable. Idempotent.
    """
    if not isinstance(a, Tensor) or a.ndim < 2 or a.dtype not in (torch.float32, torch.float64):
        found = f"{a.dtype} {list(a.shape)}" if isinstance(a, Tensor) else type(a).__name__
        raise ValueError(f"plastic_commit: a must be float32 or float64 [*, r, d]; found {found}")
    if not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise ValueError(f"plastic_commit: limit must be a finite number above 0; found {limit}")
    norm = torch.linalg.vector_norm(a, dim=-1, keepdim=True, dtype=torch.float64)
    scale = torch.where(norm > limit, SHRINK * limit / norm.clamp(min=limit), 1.0)
    return a * scale.to(a.dtype)


def _check(tensors: tuple[Tensor, ...], starts: Tensor | None) -> None:
    """Raises ValueError for wrong shapes, dtypes and devices; reads no value."""
    named = dict(zip(("x", "w", "b_up", "q", "k", "v", "beta", "a_state"), tensors, strict=True))
    if starts is not None:
        named["starts"] = starts
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"plastic_lora: {name} must be a torch.Tensor; found {type(tensor).__name__}")
        axes = len(SIZES[name].removeprefix("*, ").split(", "))
        if tensor.ndim < axes or (name in ("w", "b_up") and tensor.ndim > 2) or 0 in tensor.shape:
            found = f"none of them 0; found {list(tensor.shape)}"
            raise ValueError(f"plastic_lora: {name} must be [{SIZES[name]}], {found}")
    x, w, b_up, q, *_, a_state = tensors
    sizes_of = dict(zip("TIOrd", (*x.shape[-2:], w.shape[0], b_up.shape[1], q.shape[-1]), strict=True))
    for name in named:
        sizes = tuple(sizes_of[axis] for axis in SIZES[name].split(", ") if axis != "*")
        if named[name].shape[-len(sizes) :] != sizes:
            wanted = f"[{SIZES[name].removeprefix('*, ')}] = {list(sizes)}"
            others = f"x {list(x.shape)}, w {list(w.shape)}, b_up {list(b_up.shape)} and q {list(q.shape)}"
            raise ValueError(
                f"plastic_lora: {name} is {list(named[name].shape)}, but must end with {wanted}, as {others} have it"
            )
    if b_up.shape[1] > MOST_RANK:
        raise ValueError(f"plastic_lora: b_up has rank {b_up.shape[1]}; ranks are 1 to {MOST_RANK}")
    for name, tensor in named.items():
        if tensor.device != x.device:
            raise ValueError(f"plastic_lora: {name} is on {tensor.device}, but x is on {x.device}: move them together")
        if name == "starts":
            if tensor.dtype != torch.bool:
                raise ValueError(f"plastic_lora: starts is {tensor.dtype}; it must be bool, True where documents begin")
        elif tensor.dtype not in DTYPES or (tensor.dtype == torch.float64) != (x.dtype == torch.float64):
            raise ValueError(
                f"plastic_lora: {name} is {tensor.dtype}, but x is {x.dtype}; allowed are bfloat16, float16, float32, "
                "or float64 for all"
            )
        elif name in ("w", "b_up") and tensor.dtype != x.dtype and compute_dtype(tensor) != compute_dtype(x):
            raise ValueError(f"plastic_lora: {name} is {tensor.dtype}, but x is {x.dtype}: one dtype, or autocast")
    if a_state.dtype != state_dtype(x):
        raise ValueError(f"plastic_lora: a_state is {a_state.dtype}; it must be {state_dtype(x)} for x {x.dtype}")
    leading = {name: _leading(name, tensor) for name, tensor in named.items() if name not in ("w", "b_up")}
    try:
        torch.broadcast_shapes(*leading.values())
    except RuntimeError as error:
        found = ", ".join(f"{name} {list(shape)}" for name, shape in leading.items())
        raise ValueError(
            f"plastic_lora: leading dimensions must broadcast: equal, 1 or absent; found {found}"
        ) from error


def _leading(name: str, tensor: Tensor) -> torch.Size:
    """The dimensions before [T, width], [r, d] or [T]."""
    return tensor.shape[: -1 if name in ("beta", "starts") else -2]


def _read(q: Tensor, state: Tensor) -> Tensor:
    """A q_t for every token, [*, T, r], from q [*, T, d] and A [*, r, d]."""
    leading = state.shape[:-2]
    if leading.numel() > 1:
        return q @ state.mT
    # One state for all tokens: as a linear map PyTorch computes the gradients in 0.6 of the time of a batch of one.
    return functional.linear(
        q.expand(*torch.broadcast_shapes(q.shape[:-2], leading), *q.shape[-2:]), state.view(state.shape[-2:])
    )


def _project(x: Tensor, w: Tensor, b_up: Tensor, reads: Tensor) -> Tensor:
    """x w^T + reads b_up^T, [*, T, O], for x [*, T, I] and reads [*, T, r] whose leading dimensions broadcast."""
    tokens, inputs = x.shape[-2:]
    whole = torch.broadcast_shapes(x.shape[:-2], reads.shape[:-2])
    own = (1,) * (len(whole) - x.ndim + 2) + x.shape[:-2]
    # Dimensions that x does not have, the branches, go to the front, so that those of x are rows.
    branches = [i for i, size in enumerate(whole) if own[i] != size]
    order = branches + [i for i in range(len(whole)) if i not in branches]
    rows = x.numel() // inputs
    reads = reads.expand(*whole, *reads.shape[-2:]).permute(*order, -2, -1).reshape(-1, rows, reads.shape[-1])
    y = _plastic_project(x.reshape(rows, inputs).contiguous(), w.contiguous(), b_up.contiguous(), reads.contiguous())
    y = y.view(*(whole[i] for i in order), tokens, w.shape[0])
    return y.permute(*(order.index(i) for i in range(len(whole))), -2, -1)


def _write(rule: str, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The state [*, r, d] after a chunk's updates."""
    if rule == "hebb":
        return state + (beta.unsqueeze(-1) * v).mT @ k
    if rule == "oja":  # the delta rule on the transpose, with v as keys
        return _delta(v, k, beta, state.mT).mT.contiguous()
    return _delta(k, v, beta, state)


def _delta(k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The delta rule's last state [*, V, K] from k [*, T, K], v [*, T, V], beta [*, T] and the state before."""
    tokens, K = k.shape[-2:]
    V = v.shape[-1]
    whole = torch.broadcast_shapes(k.shape[:-2], v.shape[:-2], beta.shape[:-1], state.shape[:-2])
    k, v = (x.expand(*whole, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (k, v))
    beta, state = beta.expand(*whole, tokens).reshape(-1, tokens), state.expand(*whole, V, K).reshape(-1, V, K)
    if tokens <= FEW_TOKENS:
        for key, value, rate in zip(k.split(1, 1), v.split(1, 1), beta.split(1, 1), strict=True):
            error = torch.baddbmm(value.mT, state, key.mT, alpha=-1)
            state = torch.baddbmm(state, rate.unsqueeze(-1) * error, key)
        return state.view(*whole, V, K)
    if K > NARROW or (V > NARROW and backend(k) != "triton"):
        save = torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, beta, state))
        last, _ = _plastic_delta(k.contiguous(), v.contiguous(), beta.contiguous(), state.contiguous(), save)
        return last.view(*whole, V, K)
    heads = -(-V // NARROW)  # of values, with the same keys: rows of the state do not depend on one another
    padded_K, padded_V = (next(width for width in KERNEL_WIDTHS if width >= size) for size in (K, -(-V // heads)))
    # zero columns are neither updated nor read
    k = functional.pad(k, (0, padded_K - K)).unsqueeze(2).expand(-1, -1, heads, -1)
    v = functional.pad(v, (0, heads * padded_V - V)).unflatten(2, (heads, padded_V))
    state = functional.pad(state, (0, padded_K - K, 0, heads * padded_V - V)).unflatten(1, (heads, padded_V))
    written = beta[..., None, None] * k
    unread, unchanged = k.detach(), torch.zeros_like(k)  # r, because y is not used; log_w = 0: no decay
    _, last_state = wkv7(unread, unchanged, written, v, k, -written, state=state, return_state=True)
    assert last_state is not None
    return last_state.flatten(1, 2)[:, :V, :K].reshape(*whole, V, K)


@operator("cdrmix::plastic_project")
def _plastic_project(x: Tensor, w: Tensor, b_up: Tensor, reads: Tensor) -> Tensor:
    """y [S, R, O] = x w^T + reads b_up^T for x [R, I], w [O, I], b_up [O, r], reads [S, R, r]."""
    kernels = kernels_of("fast_weights", "triton") if backend(x) == "triton" else reference
    with torch.autocast(x.device.type, enabled=False):  # an operator inherits autocast from its caller
        y: Tensor = kernels.project_forward(x, w, b_up, reads)
    return y


@_plastic_project.register_fake
def _(x: Tensor, w: Tensor, b_up: Tensor, reads: Tensor) -> Tensor:
    return x.new_empty(reads.shape[0], x.shape[0], w.shape[0])


@operator("cdrmix::plastic_project_backward")
def _plastic_project_backward(
    dy: Tensor, x: Tensor, w: Tensor, b_up: Tensor, reads: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, w, b_up and reads, as plain products on every device; empty unless wanted."""
    with torch.autocast(x.device.type, enabled=False):
        return reference.project_backward(dy, x, w, b_up, reads, wanted)


@_plastic_project_backward.register_fake
def _(
    dy: Tensor, x: Tensor, w: Tensor, b_up: Tensor, reads: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dw, db_up, dreads = (
        torch.empty_like(tensor) if needed else tensor.new_empty(0)
        for tensor, needed in zip((x, w, b_up, reads), wanted, strict=True)
    )
    return dx, dw, db_up, dreads


def _keep_project(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_project(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad)
    gradients = _plastic_project_backward(dy.contiguous(), *ctx.saved_tensors, wanted)
    return tuple(dx if needed else None for dx, needed in zip(gradients, wanted, strict=True))


_plastic_project.register_autograd(_differentiate_project, setup_context=_keep_project)


@operator("cdrmix::plastic_delta")
def _plastic_delta(k: Tensor, v: Tensor, beta: Tensor, state: Tensor, save: bool) -> tuple[Tensor, list[Tensor]]:
    """The last state, and what the backward pass needs besides the inputs."""
    with torch.autocast(k.device.type, enabled=False):
        return reference.delta_forward(k, v, beta, state, save=save)


@_plastic_delta.register_fake
def _(k: Tensor, v: Tensor, beta: Tensor, state: Tensor, save: bool) -> tuple[Tensor, list[Tensor]]:
    shapes = reference.delta_saved_shapes(k, v) if save else []
    return torch.empty_like(state), [k.new_empty(shape) for shape in shapes]


@operator("cdrmix::plastic_delta_backward")
def _plastic_delta_backward(
    dlast: Tensor, k: Tensor, v: Tensor, beta: Tensor, saved: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of k, v, beta and the state."""
    with torch.autocast(k.device.type, enabled=False):
        return reference.delta_backward(dlast, k, v, beta, saved)


@_plastic_delta_backward.register_fake
def _(dlast: Tensor, k: Tensor, v: Tensor, beta: Tensor, saved: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(k), torch.empty_like(v), torch.empty_like(beta), torch.empty_like(dlast)


def _keep_delta(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output[1])


def _differentiate_delta(ctx: Any, dlast: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    if dlast is None:
        return (None,) * 5
    k, v, beta, *saved = ctx.saved_tensors
    gradients = _plastic_delta_backward(dlast.contiguous(), k, v, beta, saved)
    wanted = [dx if needed else None for dx, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
    return *wanted, None


_plastic_delta.register_autograd(_differentiate_delta, setup_context=_keep_delta)
