"""The SSD scan as PyTorch operators: checks, registration, and the choice of implementation.

`cdrmix::ssd_scan` and its backward are opaque to torch.compile, so it passes through them without a graph break.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cdrmix.ops.backend import backend, debugging, kernels_of
from cdrmix.ops.checks import DTYPES, check_cu_seqlens, check_document_starts, state_dtype
from cdrmix.ops.operator import operator

ARGUMENTS = ("q", "k", "v", "log_decay")
SHAPES = ("[B, T, G, K]", "[B, T, G, K]", "[B, T, H, V]", "[B, T, H]")
CHUNKS = (16, 32, 64)
WIDEST = 256  # widest keys and values of the GPU's kernels
Inputs = tuple[Tensor, ...]  # in the order of ARGUMENTS


def ssd_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    exclusive: bool = False,
    return_state: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """State-space dual scan: linear attention whose state decays by one factor a head and token, over documents.

        S_t = exp(log_decay_t) S_{t-1} + v_t k_t^T
        y_t = S_t q_t

    This is the recurrence of Mamba-2 (arXiv 2405.21060, section 5), of RetNet (2307.08621, equation 5) and, with
    log_decay = 0, of linear attention. There is no scale 1 / sqrt(K).

    q, k: [B, T, G, K]; v: [B, T, H, V], H a multiple of G: head h uses group h // (H / G); log_decay: [B, T, H],
        at most 0; -inf drops the state. bfloat16, float16 or float32, computed in float32; log_decay may be float32
        while the others are narrower. float64, for states too, uses the reference. On a GPU K and V are at most 256.
    exclusive: y_t = S_{t-1} q_t instead, from before the token's decay and write: a document's first token reads the
        document's initial state.
    cu_seqlens: int32 or int64 [N + 1], not decreasing, document starts over the flattened B * T tokens, which include
        every row's start: S is reset at each. None: each row is one document, N = B.
    state: float32 [N, H, V, K], the state before each document; None: zeros.
    chunk: tokens of a chunk, 16, 32 or 64 (on a GPU 32, on Hopper in bfloat16 also 64); None: the fastest.
    Returns y [B, T, H, V] in v's dtype and, if `return_state`, each document's last S, float32 [N, H, V, K].
    Differentiable once, in reverse mode (torch.func.jvp gets zeros), in everything but cu_seqlens.
    There is no limit to the decay: every exponent is the sum of log decays between a write and its read, at most 0. A
    value that is not finite, or an overflow in q . k, also reaches the other tokens of its chunk, even after the state
    was dropped.
    Raises ValueError naming the argument, before anything runs. Values (cu_seqlens on a GPU; log_decay NaN or above
    0) are checked with CDRMIX_DEBUG=1 only, because reading them waits for the GPU; cu_seqlens on a CPU always is.
    """
    inputs = (q, k, v, log_decay)
    _check("ssd_scan", inputs, state, cu_seqlens, chunk)
    if not isinstance(exclusive, bool):
        raise ValueError(f"ssd_scan: exclusive must be True or False; found {exclusive!r}")
    tensors = (*inputs, state, cu_seqlens)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    dense = [x if x is None else x.contiguous() for x in tensors]
    y, last, _ = _ssd_scan(*dense, chunk, exclusive, save, return_state)
    return y, last if return_state else None


def ssd_scan_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, exclusive: bool = False
) -> tuple[Tensor, Tensor]:
    """One token of `ssd_scan` for generation: the same formula, without gradients.

    q, k: [B, G, K]; v: [B, H, V]; log_decay: [B, H]; state: float32 [B, H, V, K]. Returns y [B, H, V], the new state.
    """
    inputs = (q, k, v, log_decay)
    _check("ssd_scan_step", inputs, state, None, None)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state)):
        raise ValueError("ssd_scan_step has no gradient: call ssd_scan with T = 1, or wrap the call in torch.no_grad()")
    return _ssd_scan_step(*(x.contiguous() for x in inputs), state.contiguous(), exclusive)


def _check(op: str, inputs: Inputs, state: Tensor | None, cu_seqlens: Tensor | None, chunk: int | None) -> None:
    """Raises ValueError for wrong shapes, dtypes and devices; reads no value."""
    step = op == "ssd_scan_step"
    named = dict(zip(ARGUMENTS, inputs, strict=True))
    others = {"state": state if step or state is not None else inputs[0], "cu_seqlens": cu_seqlens}
    for name, x in (named | others).items():
        if not isinstance(x, Tensor) and not (name == "cu_seqlens" and x is None):
            raise ValueError(f"{op}: {name} must be a torch.Tensor; found {type(x).__name__}")
    q, k, v, log_decay = inputs
    for (name, x), shape in zip(named.items(), SHAPES, strict=True):
        wanted = shape.replace(", T", "") if step else shape
        if x.ndim != wanted.count(",") + 1 or 0 in x.shape:
            raise ValueError(f"{op}: {name} must be {wanted}, none of them 0; found {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, but q is on {q.device}: move them to one device")
        if x.dtype not in DTYPES:
            raise ValueError(f"{op}: {name} is {x.dtype}; allowed are bfloat16, float16, float32 and float64")
        wide = name == "log_decay" and x.dtype == torch.float32 and q.dtype != torch.float64
        if x.dtype != q.dtype and not wide:
            allowed = "one dtype" if q.dtype == torch.float64 else "one dtype; log_decay may be float32 instead"
            raise ValueError(f"{op}: {name} is {x.dtype}, but q is {q.dtype}: {allowed}")
    if k.shape != q.shape:
        raise ValueError(f"{op}: k is {list(k.shape)}, but q is {list(q.shape)}: they must agree")
    if v.shape[:-2] != q.shape[:-2]:
        raise ValueError(f"{op}: v is {list(v.shape)}, but q is {list(q.shape)}: all but heads and width must agree")
    if log_decay.shape != v.shape[:-1]:
        raise ValueError(f"{op}: log_decay is {list(log_decay.shape)}; one a head and token of v: {list(v.shape[:-1])}")
    heads, groups = v.shape[-2], q.shape[-2]
    if heads % groups:
        raise ValueError(f"{op}: v has {heads} heads, q and k {groups} groups: the heads must be a multiple of these")
    if backend(q) == "triton" and max(q.shape[-1], v.shape[-1]) > WIDEST:
        widths = f"key width {q.shape[-1]}, value width {v.shape[-1]}"
        raise ValueError(f"{op}: {widths}; the GPU's kernels have at most {WIDEST} for each: use more heads")
    check_cu_seqlens(op, cu_seqlens, "q", q)
    if state is not None:
        sizes, dtype = _state_shape(q, v, cu_seqlens), state_dtype(q)
        if state.shape != sizes or state.dtype != dtype or state.device != q.device:
            raise ValueError(
                f"{op}: state must be {dtype} [{'B' if step else 'N'}, H, V, K] = {list(sizes)} on {q.device}; "
                f"found {state.dtype} {list(state.shape)} on {state.device}"
            )
    if chunk is not None and (not isinstance(chunk, int) or chunk not in CHUNKS):
        raise ValueError(f"{op}: chunk={chunk!r}; choose one of {CHUNKS}, or None for the default")


def _check_log_decay(op: str, log_decay: Tensor) -> None:
    """Raises ValueError for wrong log decays, with CDRMIX_DEBUG."""
    if not debugging():
        return
    if bool(log_decay.isnan().any()):
        raise ValueError(f"{op}: log_decay holds NaN")
    if bool((log_decay > 0).any()):
        raise ValueError(f"{op}: log_decay must be at most 0; its largest value is {log_decay.max().item():.4g}")


def _kernels(q: Tensor) -> ModuleType:
    """The module whose `ssd_scan_forward`, `ssd_scan_backward` and `ssd_scan_step` are used for these tensors."""
    return kernels_of("ssd", backend(q))


def _cast(inputs: Inputs) -> Inputs:
    """The inputs in the implementation's dtypes: Triton reads every dtype, the others float32 and float64."""
    if backend(inputs[0]) == "triton":
        return inputs
    return tuple(x if x.dtype == torch.float64 else x.float() for x in inputs)


def _state_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    documents = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return documents, v.shape[-2], v.shape[-1], q.shape[-1]


@operator("cdrmix::ssd_scan")
def _ssd_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int | None,
    exclusive: bool,
    save: bool,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y, the last states (empty unless wanted), and what the backward pass needs besides the inputs."""
    check_document_starts("ssd_scan", cu_seqlens, *q.shape[:2])
    _check_log_decay("ssd_scan", log_decay)
    flags = {"chunk": chunk, "exclusive": exclusive, "save": save, "return_state": return_state}
    with torch.autocast(q.device.type, enabled=False):  # an operator inherits autocast from its caller
        y, last, saved = _kernels(q).ssd_scan_forward(*_cast((q, k, v, log_decay)), state, cu_seqlens, **flags)
    return y.to(v.dtype), last, saved


@_ssd_scan.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int | None,
    exclusive: bool,
    save: bool,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    shape = _state_shape(q, v, cu_seqlens)
    last = q.new_empty(shape if return_state else 0, dtype=state_dtype(q))
    sizes = (q.shape, v.shape, shape[0], cu_seqlens is not None, q.dtype)
    saved = _kernels(q).ssd_scan_saved_shapes(*sizes, chunk=chunk, save=save)
    return torch.empty_like(v), last, [q.new_empty(size, dtype=dtype) for size, dtype in saved]


@operator("cdrmix::ssd_scan_backward")
def _ssd_scan_backward(
    dy: Tensor,
    dlast: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    chunk: int | None,
    exclusive: bool,
) -> list[Tensor]:
    """The gradients of q, k, v, log_decay in their dtypes, and of the state (empty if there was none)."""
    inputs = (q, k, v, log_decay)
    with torch.autocast(q.device.type, enabled=False):
        *gradients, dstate = _kernels(q).ssd_scan_backward(
            *_cast((dy,)), dlast, *_cast(inputs), state, cu_seqlens, saved, chunk=chunk, exclusive=exclusive
        )
    return [*(dx.to(x.dtype) for dx, x in zip(gradients, inputs, strict=True)), dstate]


@_ssd_scan_backward.register_fake
def _(
    dy: Tensor,
    dlast: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    chunk: int | None,
    exclusive: bool,
) -> list[Tensor]:
    dstate = q.new_empty(0, dtype=state_dtype(q)) if state is None else torch.empty_like(state)
    return [*(torch.empty_like(x) for x in (q, k, v, log_decay)), dstate]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    *tensors, ctx.chunk, ctx.exclusive, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[2])


def _differentiate(ctx: Any, dy: Tensor | None, dlast: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, state, cu_seqlens, *saved = ctx.saved_tensors
    dy = torch.zeros_like(v) if dy is None else dy.contiguous()
    dlast = dlast.contiguous() if dlast is not None and dlast.numel() else None
    gradients = _ssd_scan_backward(dy, dlast, q, k, v, log_decay, state, cu_seqlens, saved, ctx.chunk, ctx.exclusive)
    wanted = [dx if needed else None for dx, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None, None, None, None


_ssd_scan.register_autograd(_differentiate, setup_context=_keep)


@operator("cdrmix::ssd_scan_step")
def _ssd_scan_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """One token's y and the new state."""
    _check_log_decay("ssd_scan_step", log_decay)
    with torch.autocast(q.device.type, enabled=False):
        y, new = _kernels(q).ssd_scan_step(*_cast((q, k, v, log_decay)), state, exclusive)
    return y.to(v.dtype), new


@_ssd_scan_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, exclusive: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(state)
