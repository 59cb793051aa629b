"""The RWKV-7 recurrence as PyTorch operators: checks, registration, and the choice of implementation.

`cdrmix::wkv7` and its backward are opaque to torch.compile, which therefore passes through them without a break.
"""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cdrmix.kernels import reference
from cdrmix.ops.backend import backend, debugging

KERNEL_WIDTHS = (32, 64, 128)  # of keys and of values; the reference takes any
ARGUMENTS = ("r", "log_w", "k", "v", "a", "b")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Inputs = tuple[Tensor, ...]  # in the order of ARGUMENTS


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
    return_state: bool = False,
    save: str = "fast",
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7's generalised delta rule over a batch of documents (arXiv 2503.14456, equations 16 to 19).

        S_t = S_{t-1} diag(exp(log_w_t)) + (S_{t-1} a_t) b_t^T + v_t k_t^T
        y_t = S_t r_t

    r, log_w, k, a, b: [B, T, H, K], log_w <= 0 the log decay; v: [B, T, H, V]; bfloat16, float16 or float32, computed
        in float32; log_w may be float32 beside narrower others. K and V each 32, 64 or 128 (any, on a CPU).
    cu_seqlens: int32 or int64 [N + 1], not decreasing, document starts over the flattened B * T tokens, every row's
        start among them: S starts anew at each. None: one document a row, N = B. Read on the device without waiting.
    state: float32 [N, H, V, K], what each document's S starts from; None: zeros.
    save: what is kept for the backward pass, "fast" or "min": bytes and costs of each in `kernels/wkv7.py`.
    chunk: tokens of one parallel piece, 32 or 64; None: what is best for the device and widths.
    Returns y [B, T, H, V] in v's dtype and, if `return_state`, each document's last S, float32 [N, H, V, K].
    Differentiable once in everything but cu_seqlens. |log_w| * chunk / 2 < 88 keeps the GPU's exponents finite.
    Raises ValueError naming the argument, before anything runs. Values (cu_seqlens on a GPU, log_w > 0, NaN) are
    checked under CDRMIX_DEBUG=1 alone, as reading them waits for the GPU; cu_seqlens on a CPU always is.
    """
    _check((r, log_w, k, v, a, b), state, cu_seqlens, save, chunk)
    tensors = (r, log_w, k, v, a, b, state, cu_seqlens)
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)):
        save = "none"
    dense = [x if x is None else x.contiguous() for x in tensors]
    y, last, _ = _wkv7(*dense, chunk, save, return_state)
    return y, last if return_state else None


def wkv7_step(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of `wkv7` for generation: the same formula, without gradients.

    r, log_w, k, a, b: [B, H, K]; v: [B, H, V]; state: float32 [B, H, V, K]. Returns y [B, H, V] and the new state.
    """
    inputs = (r, log_w, k, v, a, b)
    for name, x in zip(ARGUMENTS, inputs, strict=True):
        if x.ndim != 3:
            raise ValueError(f"wkv7_step: {name} must be [B, H, width], one token; found {list(x.shape)}. Longer: wkv7")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state)):
        raise ValueError("wkv7_step has no gradient: call wkv7 with T = 1, or wrap the call in torch.no_grad()")
    _check(tuple(x.unsqueeze(1) for x in inputs), state, None, "none", None)
    return _wkv7_step(*(x.contiguous() for x in inputs), state.contiguous())


def _check(inputs: Inputs, state: Tensor | None, cu_seqlens: Tensor | None, save: str, chunk: int | None) -> None:
    """Raises ValueError for what shapes, dtypes and devices tell; reads no value."""
    r, _, _, v, _, _ = inputs
    for name, x in zip(ARGUMENTS, inputs, strict=True):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(f"wkv7: {name} must be [B, T, H, width] with none of them 0; found {list(x.shape)}")
        wanted = v.shape if name == "v" else r.shape
        if x.shape != wanted:
            raise ValueError(f"wkv7: {name} is {list(x.shape)}, but r is {list(r.shape)}: they must agree")
        if x.device != r.device:
            raise ValueError(f"wkv7: {name} is on {x.device}, but r is on {r.device}: move them to one device")
        if x.dtype not in DTYPES:
            raise ValueError(f"wkv7: {name} is {x.dtype}; allowed are bfloat16, float16, float32 and float64")
        if x.dtype != r.dtype and not (name == "log_w" and x.dtype == torch.float32):
            raise ValueError(f"wkv7: {name} is {x.dtype}, but r is {r.dtype}: one dtype; log_w may be float32 instead")
    key_width = r.shape[3]
    if v.shape[:3] != r.shape[:3]:
        raise ValueError(f"wkv7: v is {list(v.shape)}, but r is {list(r.shape)}: B, T and H must agree")
    if backend(r) == "triton" and not (key_width in KERNEL_WIDTHS and v.shape[3] in KERNEL_WIDTHS):
        raise ValueError(
            f"wkv7: key width {key_width}, value width {v.shape[3]}; the GPU's kernels have {KERNEL_WIDTHS} for each"
        )
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"wkv7: cu_seqlens must be int32 or int64 [N + 1]; found {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            )
        if cu_seqlens.device != r.device:
            raise ValueError(f"wkv7: cu_seqlens is on {cu_seqlens.device}, but r is on {r.device}")
    if state is not None:
        shape, dtype = _state_shape(v, r, cu_seqlens), _state_dtype(r)
        if state.shape != shape or state.dtype != dtype or state.device != r.device:
            raise ValueError(
                f"wkv7: state must be {dtype} [N, H, V, K] = {list(shape)} on {r.device}; "
                f"found {state.dtype} {list(state.shape)} on {state.device}"
            )
    if save not in ("none", "min", "fast"):
        raise ValueError(f"wkv7: save={save!r}; choose 'fast' or 'min'")
    if chunk not in (None, 32, 64):
        raise ValueError(f"wkv7: chunk={chunk}; choose 32 or 64, or None for the default")


def _check_values(log_w: Tensor, cu_seqlens: Tensor | None, batch: int, length: int) -> None:
    """Raises ValueError for bad values, where reading them is free (a CPU) or asked for (CDRMIX_DEBUG)."""
    if cu_seqlens is not None and (cu_seqlens.device.type == "cpu" or debugging()):
        starts = cu_seqlens.tolist()
        total = batch * length
        if starts[0] != 0 or starts[-1] != total:
            raise ValueError(
                f"wkv7: cu_seqlens must begin with 0 and end with B * T = {total}; found {starts[0]} ... {starts[-1]}"
            )
        for i, (start, end) in enumerate(itertools.pairwise(starts)):
            if end < start:
                raise ValueError(f"wkv7: cu_seqlens must not decrease; found {start} then {end} at position {i + 1}")
        missing = sorted(set(range(0, total, length)) - set(starts))
        if missing:
            raise ValueError(
                f"wkv7: cu_seqlens must hold every row's start, multiples of T = {length}; {missing[0]} is not there"
            )
    if debugging():
        if not bool(log_w.isfinite().all()):
            raise ValueError("wkv7: log_w holds NaN or infinite values")
        if bool((log_w > 0).any()):
            raise ValueError(f"wkv7: log_w must be at most 0, a decay; its largest value is {log_w.max().item():.4g}")


def _kernels(r: Tensor, v: Tensor) -> ModuleType:
    """The module whose `wkv7_forward`, `wkv7_backward` and `wkv7_step` serve these tensors."""
    chosen = backend(r)
    if chosen == "triton":
        return importlib.import_module("cdrmix.kernels.wkv7")
    if chosen == "cpu" and r.shape[-1] in KERNEL_WIDTHS and v.shape[-1] in KERNEL_WIDTHS:
        return importlib.import_module("cdrmix.kernels.wkv7_cpu")
    return reference


def _cast(inputs: Inputs) -> Inputs:
    """As the implementation wants them: Triton reads every dtype, the others float32 and float64."""
    if backend(inputs[0]) == "triton":
        return inputs
    return tuple(x if x.dtype == torch.float64 else x.float() for x in inputs)


def _state_shape(v: Tensor, r: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    documents = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return documents, v.shape[2], v.shape[3], r.shape[3]


def _state_dtype(r: Tensor) -> torch.dtype:
    return torch.float64 if r.dtype == torch.float64 else torch.float32


@torch.library.custom_op("cdrmix::wkv7", mutates_args=())
def _wkv7(
    r: Tensor,
    log_w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int | None,
    save: str,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y, the last states (of no elements unless wanted), and what the backward pass needs beside the inputs."""
    _check_values(log_w, cu_seqlens, *r.shape[:2])
    with torch.autocast(r.device.type, enabled=False):  # which an operator inherits from its caller
        y, last, saved = _kernels(r, v).wkv7_forward(
            *_cast((r, log_w, k, v, a, b)), state, cu_seqlens, chunk=chunk, save=save, return_state=return_state
        )
    return y.to(v.dtype), last, saved


@_wkv7.register_fake
def _(
    r: Tensor,
    log_w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int | None,
    save: str,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    documents, heads, value_width, key_width = shape = _state_shape(v, r, cu_seqlens)
    last = r.new_empty(shape if return_state else 0, dtype=_state_dtype(r))
    sizes = (*r.shape[:2], heads, key_width, value_width, documents, cu_seqlens is not None)
    saved = _kernels(r, v).wkv7_saved_shapes(*sizes, r.dtype, chunk=chunk, save=save)
    return torch.empty_like(v), last, [r.new_empty(size, dtype=dtype) for size, dtype in saved]


@torch.library.custom_op("cdrmix::wkv7_backward", mutates_args=())
def _wkv7_backward(
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
    chunk: int | None,
    save: str,
) -> list[Tensor]:
    """The gradients of r, log_w, k, v, a, b in their dtypes, and of the state (of no elements where there was none)."""
    inputs = (r, log_w, k, v, a, b)
    with torch.autocast(r.device.type, enabled=False):
        *gradients, dstate = _kernels(r, v).wkv7_backward(
            *_cast((dy,)), dlast, *_cast(inputs), state, cu_seqlens, saved, chunk=chunk, save=save
        )
    return [*(dx.to(x.dtype) for dx, x in zip(gradients, inputs, strict=True)), dstate]


@_wkv7_backward.register_fake
def _(
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
    chunk: int | None,
    save: str,
) -> list[Tensor]:
    dstate = r.new_empty(0, dtype=_state_dtype(r)) if state is None else torch.empty_like(state)
    return [*(torch.empty_like(x) for x in (r, log_w, k, v, a, b)), dstate]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    *tensors, ctx.chunk, ctx.save, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[2])


def _differentiate(ctx: Any, dy: Tensor | None, dlast: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    r, log_w, k, v, a, b, state, cu_seqlens, *saved = ctx.saved_tensors
    dy = torch.zeros_like(v) if dy is None else dy.contiguous()
    dlast = dlast.contiguous() if dlast is not None and dlast.numel() else None
    gradients = _wkv7_backward(dy, dlast, r, log_w, k, v, a, b, state, cu_seqlens, saved, ctx.chunk, ctx.save)
    wanted = [dx if needed else None for dx, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None, None, None


_wkv7.register_autograd(_differentiate, setup_context=_keep)


@torch.library.custom_op("cdrmix::wkv7_step", mutates_args=())
def _wkv7_step(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token's y and the new state."""
    with torch.autocast(r.device.type, enabled=False):
        y, new = _kernels(r, v).wkv7_step(*_cast((r, log_w, k, v, a, b)), state)
    return y.to(v.dtype), new


@_wkv7_step.register_fake
def _(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(state)
