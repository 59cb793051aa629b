"""The element-wise work around the RWKV-7 recurrence as PyTorch operators: checks and the choice of implementation.

Triton and numba compute float32 and narrower dtypes, each operator with one pass over its tensors. float64, and
machines without either, use `kernels/time_mix/reference.py` with autograd's gradients. Only inputs are kept for the
backward passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cdrmix.kernels.time_mix import reference
from cdrmix.kernels.time_mix.reference import GROUP_NORM_EPS, Streams
from cdrmix.ops.backend import backend, compute_dtype, kernels_of
from cdrmix.ops.operator import operator

HEAD_SIZES = (32, 64, 128)  # of the GPU's kernels; the others have no limit
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Gradients = tuple[Tensor | None, ...]


def time_mix_streams(
    x_BTD: Tensor, mixes_6D: Tensor, last_BD: Tensor | None = None, starts_BT: Tensor | None = None
) -> Streams:
    """Six interpolations between each token and the one before it: x_t + (x_{t-1} - x_t) mixes_i, each [B, T, D].

    x_BTD: bfloat16, float16, float32 or float64. The token before a row's first is `last_BD`, or zero. It is zero too
    where `starts_BT`, bool, marks the start of a document. Under autocast the streams have its dtype, because they are
    operands of matrix products. Differentiable in x, mixes and last; dmixes is summed in a fixed order. Only the inputs
    are kept. Raises ValueError naming the argument whose shape, dtype or device is wrong.
    """
    batch, length, width = _sizes("time_mix_streams", "x_BTD", x_BTD, 3)
    shapes = {"mixes_6D": (mixes_6D, (6, width)), "last_BD": (last_BD, (batch, width))}
    _check("time_mix_streams", x_BTD, shapes, width)
    if starts_BT is not None and (starts_BT.shape != (batch, length) or starts_BT.dtype != torch.bool):
        found = f"{starts_BT.dtype} {list(starts_BT.shape)}"
        raise ValueError(f"time_mix_streams: starts_BT must be bool [{batch}, {length}]; found {found}")
    dtype = compute_dtype(x_BTD)
    if _plain(x_BTD):
        with torch.autocast(x_BTD.device.type, enabled=False):
            streams = reference.time_mix_streams(x_BTD, mixes_6D, last_BD, starts_BT)
            r, w, k, v, a, g = (stream.to(dtype) for stream in streams)
    else:
        r, w, k, v, a, g = _streams(*_dense(x_BTD, mixes_6D, last_BD, starts_BT), dtype)
    return r, w, k, v, a, g


def time_mix_keys(
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    v: Tensor,
    v_first: Tensor | None,
    v_gate: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    head_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The recurrence's inputs other than r, from the projections: log_w, k', a, b, v', each [B, T, H, K].

        log_w = -exp(-1/2) sigmoid(w0 + decay)                  float32 at least; with bfloat16 on a GPU, bfloat16
        rate' = sigmoid(a0 + rate)
        kk = normalise(k k_k) over each head, a = -kk, b = kk rate'
        k' = k (1 + (rate' - 1) k_a)
        v' = v + (v_first - v) sigmoid(v0 + v_gate)             v itself, not a copy, where v_first is None

    k, decay, rate, v, v_first, v_gate: [B, T, D] in one dtype; decay, rate and v_gate are the low-rank products without
    their biases. w0, a0, v0, k_k, k_a: [D]. v_first, v_gate and v0 are all None, or none is. D = H head_size.
    k', a, b and v' have k's dtype. Differentiable in every tensor; parameters' gradients are summed in a fixed order.
    Only the inputs are kept. Raises ValueError naming the argument whose shape, dtype or device is wrong.
    """
    if not isinstance(head_size, int) or head_size < 1:
        raise ValueError(f"time_mix_keys: head_size must be a whole number above 0; found {head_size!r}")
    batch, length, width = _sizes("time_mix_keys", "k", k, 3)
    whole, one = (batch, length, width), (width,)
    if len({v_first is None, v_gate is None, v0 is None}) != 1:
        raise ValueError("time_mix_keys: v_first, v_gate and v0 go together: pass all of them, or None for each")
    tokens = {"decay": decay, "rate": rate, "v": v, "v_first": v_first, "v_gate": v_gate}
    channels = {"w0": w0, "a0": a0, "v0": v0, "k_k": k_k, "k_a": k_a}
    shapes = {name: (x, whole) for name, x in tokens.items()} | {name: (x, one) for name, x in channels.items()}
    _check("time_mix_keys", k, shapes, head_size)
    for name, x in tokens.items():
        if x is not None and x.dtype != k.dtype:
            raise ValueError(f"time_mix_keys: {name} is {x.dtype}, but k is {k.dtype}: one dtype for all [B, T, D]")
    if _plain(k):
        with torch.autocast(k.device.type, enabled=False):
            return reference.time_mix_keys(k, decay, rate, v, v_first, v_gate, w0, a0, v0, k_k, k_a, head_size)
    read = v if v_first is not None else k  # k fills arguments that the kernels do not read
    results = _keys(*_dense(k, decay, rate, read, v_first, v_gate, w0, a0, v0, k_k, k_a), head_size)
    log_w, new_k, a, b, new_v = (x.view(batch, length, -1, head_size) for x in (*results, v)[:5])
    return log_w, new_k, a, b, new_v


def time_mix_output(
    y: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = GROUP_NORM_EPS,
) -> Tensor:
    """The recurrence's output, normalised by head, plus the current token's bonus, times the gate: [B, T, D].

        ((y - mean) / sqrt(variance + eps) weight + bias + (sum_K r k r_k) v) gate

    The result has gate's dtype. y, r, k, v: [B, T, H, K]; gate: [B, T, D]; r_k: [H, K]; weight, bias: [D].
    Differentiable in every tensor; parameters' gradients are summed in a fixed order. Only the inputs are kept. Raises
    ValueError naming the argument whose shape, dtype or device is wrong.
    """
    if not eps >= 0:
        raise ValueError(f"time_mix_output: eps must be at least 0; found {eps}")
    batch, length, heads, head_size = shape = _sizes("time_mix_output", "y", y, 4)
    width = heads * head_size
    shapes = {"r": (r, shape), "k": (k, shape), "v": (v, shape), "gate": (gate, (batch, length, width))}
    shapes |= {"r_k": (r_k, (heads, head_size)), "weight": (weight, (width,)), "bias": (bias, (width,))}
    _check("time_mix_output", y, shapes, head_size)
    inputs = (y, r, k, v, gate, r_k, weight, bias)
    if _plain(y):
        with torch.autocast(y.device.type, enabled=False):
            return reference.time_mix_output(*inputs, eps)
    return _output(*_dense(*inputs), eps)


def _sizes(op: str, name: str, x: Tensor, dimensions: int) -> tuple[int, ...]:
    if x.ndim != dimensions or 0 in x.shape:
        raise ValueError(f"{op}: {name} must have {dimensions} dimensions, none of them 0; found {list(x.shape)}")
    return tuple(x.shape)


def _check(op: str, first: Tensor, shapes: Mapping[str, tuple[Tensor | None, tuple[int, ...]]], head_size: int) -> None:
    """Raises ValueError for wrong shapes, dtypes and devices; reads no value."""
    for name, (x, shape) in {"the first argument": (first, tuple(first.shape)), **shapes}.items():
        if x is None:
            continue
        if tuple(x.shape) != shape:
            raise ValueError(f"{op}: {name} must be {list(shape)}; found {list(x.shape)}")
        if x.dtype not in DTYPES or (x.dtype == torch.float64) != (first.dtype == torch.float64):
            raise ValueError(f"{op}: {name} is {x.dtype}; allowed are bfloat16, float16, float32, or float64 for all")
        if x.device != first.device:
            raise ValueError(f"{op}: {name} is on {x.device}, not on {first.device}: move them to one device")
    width = first.shape[2] if first.ndim == 3 else head_size
    if width % head_size:
        raise ValueError(f"{op}: width {width} is not a multiple of the head size {head_size}")
    if backend(first) != "triton":
        return
    if op == "time_mix_streams" and width % HEAD_SIZES[0]:
        raise ValueError(f"{op}: width {width}; the GPU's kernels need a multiple of {HEAD_SIZES[0]}")
    if op != "time_mix_streams" and head_size not in HEAD_SIZES:
        raise ValueError(f"{op}: head size {head_size}; the GPU's kernels have {HEAD_SIZES}")


def _plain(x: Tensor) -> bool:
    """Whether plain PyTorch is used: for one token on a CPU its few calls take less time than numba's arguments."""
    chosen = backend(x)
    return chosen == "reference" or (chosen == "cpu" and x.shape[1] == 1 and not torch.is_grad_enabled())


def _kernels(x: Tensor) -> ModuleType:
    return kernels_of("time_mix", backend(x))


def _dense(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if x is None else x.contiguous() for x in tensors)


def _cast(tensors: Iterable[Tensor | None]) -> list[Any]:
    """The inputs in the implementation's dtypes: Triton reads every dtype, numba float32 (and the bools of starts)."""
    return [x if x is None or x.dtype == torch.bool or backend(x) == "triton" else x.float() for x in tensors]


def _like(gradients: Iterable[Tensor | None], inputs: Iterable[Tensor]) -> list[Tensor | None]:
    """Gradients, some of them flat float32 sums, in the shapes and dtypes of their inputs."""
    return [dx if dx is None else dx.to(x.dtype).view(x.shape) for dx, x in zip(gradients, inputs, strict=True)]


def _given(gradients: list[Tensor | None], like: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Replaces autograd's None by zeros."""
    return [torch.zeros_like(like, dtype=dtype) if dy is None else dy.contiguous() for dy in gradients]


def _wanted(ctx: Any, gradients: Iterable[Tensor | None]) -> Gradients:
    return tuple(dx if needed else None for dx, needed in zip(gradients, ctx.needs_input_grad, strict=False))


@operator("cdrmix::time_mix_streams")
def _streams(x: Tensor, mixes: Tensor, last: Tensor | None, starts: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    wanted = dtype if backend(x) == "triton" else torch.float32
    streams = _kernels(x).time_mix_streams_forward(*_cast((x, mixes, last, starts)), wanted)
    return [stream.to(dtype) for stream in streams]


@_streams.register_fake
def _(x: Tensor, mixes: Tensor, last: Tensor | None, starts: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(x, dtype=dtype) for _ in range(6)]


@operator("cdrmix::time_mix_streams_backward")
def _streams_backward(
    dstreams: list[Tensor], x: Tensor, mixes: Tensor, last: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dmixes in float32, and dlast (empty where there is no last)."""
    backward = _kernels(x).time_mix_streams_backward
    dx, dmixes, dlast = backward(_cast(dstreams), *_cast((x, mixes, last, starts)))
    return dx.to(x.dtype), dmixes, x.new_empty(0) if last is None else dlast.to(last.dtype)


@_streams_backward.register_fake
def _(
    dstreams: list[Tensor], x: Tensor, mixes: Tensor, last: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dmixes = torch.empty_like(mixes, dtype=torch.float32)
    return torch.empty_like(x), dmixes, x.new_empty(0) if last is None else torch.empty_like(last)


def _keep_streams(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_streams(ctx: Any, dstreams: list[Tensor | None]) -> Gradients:
    x, mixes, last, starts = ctx.saved_tensors
    dx, dmixes, dlast = _streams_backward(_given(dstreams, x, ctx.dtype), x, mixes, last, starts)
    return *_wanted(ctx, (dx, dmixes.to(mixes.dtype), dlast)), None, None


_streams.register_autograd(_differentiate_streams, setup_context=_keep_streams)


@operator("cdrmix::time_mix_keys")
def _keys(
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    v: Tensor,
    v_first: Tensor | None,
    v_gate: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    head_size: int,
) -> list[Tensor]:
    """log_w, k', a, b and, where v_first is given, v': [B, T, D] each."""
    inputs = _cast((k, decay, rate, v, v_first, v_gate, w0, a0, v0, k_k, k_a))
    log_w, *others = _kernels(k).time_mix_keys_forward(*inputs, head_size)
    return [log_w, *(x.to(k.dtype) for x in others)]


@_keys.register_fake
def _(
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    v: Tensor,
    v_first: Tensor | None,
    v_gate: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    head_size: int,
) -> list[Tensor]:
    others = 3 if v_first is None else 4
    narrow = k.dtype == torch.bfloat16 and backend(k) == "triton"
    return [
        torch.empty_like(k, dtype=torch.bfloat16 if narrow else torch.float32),
        *(torch.empty_like(k) for _ in range(others)),
    ]


@operator("cdrmix::time_mix_keys_backward")
def _keys_backward(
    gradients: list[Tensor],
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    v: Tensor,
    v_first: Tensor | None,
    v_gate: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    head_size: int,
) -> list[Tensor]:
    """dk, ddecay, drate, [4, D] of w0, a0, k_k, k_a; where v_first is given dv, dv_first, dv_gate, dv0 [1, D]."""
    inputs = _cast((k, decay, rate, v, v_first, v_gate, w0, a0, v0, k_k, k_a))
    results = _kernels(k).time_mix_keys_backward(_cast(gradients), *inputs, head_size)
    return [dx.to(k.dtype) if dx.ndim == 3 else dx for dx in results]


@_keys_backward.register_fake
def _(
    gradients: list[Tensor],
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    v: Tensor,
    v_first: Tensor | None,
    v_gate: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    head_size: int,
) -> list[Tensor]:
    whole, sums = [torch.empty_like(k) for _ in range(3)], k.new_empty(4, k.shape[-1], dtype=torch.float32)
    if v_first is None:
        return [*whole, sums]
    return [*whole, sums, *(torch.empty_like(v) for _ in range(3)), sums.new_empty(1, k.shape[-1])]


def _keep_keys(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.head_size = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_keys(ctx: Any, gradients: list[Tensor | None]) -> Gradients:
    inputs = ctx.saved_tensors
    k = inputs[0]
    given = _given(gradients[:1], k, torch.float32) + _given(gradients[1:], k, k.dtype)
    dk, ddecay, drate, sums, *values = _keys_backward(given, *inputs, ctx.head_size)
    dw0, da0, dk_k, dk_a = sums
    dv, dv_first, dv_gate, dv0 = values or [None] * 4
    found = (dk, ddecay, drate, dv, dv_first, dv_gate, dw0, da0, dv0, dk_k, dk_a)
    return *_wanted(ctx, _like(found, inputs)), None


_keys.register_autograd(_differentiate_keys, setup_context=_keep_keys)


@operator("cdrmix::time_mix_output")
def _output(
    y: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    inputs = _cast((y, r, k, v, gate, r_k, weight, bias))
    return _kernels(y).time_mix_output_forward(*inputs, eps).to(gate.dtype)


@_output.register_fake
def _(
    y: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    return torch.empty_like(gate)


@operator("cdrmix::time_mix_output_backward")
def _output_backward(
    dout: Tensor,
    y: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> list[Tensor]:
    """dy, dr, dk, dv, dgate, and float32 [3, D] of r_k, weight and bias."""
    inputs = _cast((dout, y, r, k, v, gate, r_k, weight, bias))
    gradients = _kernels(y).time_mix_output_backward(*inputs, eps)
    return [*(dx.to(x.dtype) for dx, x in zip(gradients, (y, r, k, v, gate), strict=False)), gradients[5]]


@_output_backward.register_fake
def _(
    dout: Tensor,
    y: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> list[Tensor]:
    return [*(torch.empty_like(x) for x in (y, r, k, v, gate)), y.new_empty(3, gate.shape[-1], dtype=torch.float32)]


def _keep_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_output(ctx: Any, dout: Tensor) -> Gradients:
    inputs = ctx.saved_tensors  # read once: activation checkpointing returns them a single time
    *gradients, sums = _output_backward(dout.contiguous(), *inputs, ctx.eps)
    return *_wanted(ctx, _like([*gradients, *sums], inputs)), None


_output.register_autograd(_differentiate_output, setup_context=_keep_output)
