"""The RWKV-7 recurrence as PyTorch operators: checks, registration, and the choice of implementation.

`cdrmix::wkv7` and its backward are opaque to torch.compile, so it passes through them without a graph break.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cdrmix.kernels.rwkv7 import reference
from cdrmix.ops.backend import backend, debugging, kernels_of
from cdrmix.ops.checks import DTYPES, check_cu_seqlens, check_document_starts, state_dtype
from cdrmix.ops.operator import operator

KERNEL_WIDTHS = (32, 64, 128)  # of keys and of values; the reference has no limit
ARGUMENTS = ("r", "log_w", "k", "v", "a", "b")
CHUNKS = (16, 32, 64)
EXPONENT_BOUND = 80.0  # of the GPU's kernels, for half a chunk of log decay: kernels/rwkv7/triton_chunk.py
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
    recompute: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7's generalised delta rule over a batch of documents (arXiv 2503.14456, equations 16 to 19).

        S_t = S_{t-1} diag(exp(log_w_t)) + (S_{t-1} a_t) b_t^T + v_t k_t^T
        y_t = S_t r_t

    r, log_w, k, a, b: [B, T, H, K], log_w <= 0 the log decay; v: [B, T, H, V]; bfloat16, float16 or float32, computed
        in float32; log_w may be float32 while the others are narrower. K and V each 32, 64 or 128 (any on a CPU).
        float64 for all of them, states too, uses the reference.
    cu_seqlens: int32 or int64 [N + 1], not decreasing, document starts over the flattened B * T tokens, which include
        every row's start: S is reset at each. None: each row is one document, N = B. The host does not read it.
    state: float32 [N, H, V, K], the state before each document; None: zeros.
    recompute: True keeps less for the backward pass, which computes it again: same bits, more time. The bytes are in
        `kernels/rwkv7/triton.py` and `cpu.py`.
    chunk: tokens of a chunk, 16, 32 or 64; None: the fastest for the dtype and widths. On a CPU, tokens between two
        kept states, which changes no bit.
    Returns y [B, T, H, V] in v's dtype and, if `return_state`, each document's last S, float32 [N, H, V, K].
    Differentiable once, in reverse mode (torch.func.jvp gets zeros), in everything but cu_seqlens.
    On a GPU exponents cover half a chunk: log_w must stay above -80 / (chunk / 2), which is -2.5 for chunks of 64.
    RWKV-7's own is above -0.61. Below the bound a chunk gives NaN, for earlier tokens too. CPUs have no such bound.
    Raises ValueError naming the argument, before anything runs. Values (cu_seqlens on a GPU; log_w NaN, above 0 or
    below that bound) are checked with CDRMIX_DEBUG=1 only, because reading them waits for the GPU; cu_seqlens on a CPU
    always is.
    """
    if not isinstance(recompute, bool):
        raise ValueError(f"wkv7: recompute must be True or False; found {recompute!r}")
    _check("wkv7", (r, log_w, k, v, a, b), state, cu_seqlens, chunk)
    tensors = (r, log_w, k, v, a, b, state, cu_seqlens)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    dense = [x if x is None else x.contiguous() for x in tensors]
    y, last, _ = _wkv7(*dense, chunk, save, recompute, return_state)
    return y, last if return_state else None


def wkv7_step(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of `wkv7` for generation: the same formula, without gradients.

    r, log_w, k, a, b: [B, H, K]; v: [B, H, V]; state: float32 [B, H, V, K]. Returns y [B, H, V] and the new state.
    """
    inputs = (r, log_w, k, v, a, b)
    _check("wkv7_step", inputs, state, None, None)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state)):
        raise ValueError("wkv7_step has no gradient: call wkv7 with T = 1, or wrap the call in torch.no_grad()")
    return _wkv7_step(*(x.contiguous() for x in inputs), state.contiguous())


def _check(op: str, inputs: Inputs, state: Tensor | None, cu_seqlens: Tensor | None, chunk: int | None) -> None:
    """Raises ValueError for wrong shapes, dtypes and devices; reads no value."""
    sizes = {"wkv7": "[B, T, H, width]", "wkv7_step": "[B, H, width], one token; longer: wkv7"}[op]
    named = dict(zip(ARGUMENTS, inputs, strict=True))
    others = {"state": state if op == "wkv7_step" or state is not None else inputs[0], "cu_seqlens": cu_seqlens}
    for name, x in (named | others).items():
        if not isinstance(x, Tensor) and not (name == "cu_seqlens" and x is None):
            raise ValueError(f"{op}: {name} must be a torch.Tensor; found {type(x).__name__}")
    r, v = named["r"], named["v"]
    for name, x in named.items():
        if x.ndim != (3 if op == "wkv7_step" else 4) or 0 in x.shape:
            raise ValueError(f"{op}: {name} must be {sizes}, none of them 0; found {list(x.shape)}")
        wanted = v.shape if name == "v" else r.shape
        if x.shape != wanted:
            raise ValueError(f"{op}: {name} is {list(x.shape)}, but r is {list(r.shape)}: they must agree")
        if x.device != r.device:
            raise ValueError(f"{op}: {name} is on {x.device}, but r is on {r.device}: move them to one device")
        if x.dtype not in DTYPES:
            raise ValueError(f"{op}: {name} is {x.dtype}; allowed are bfloat16, float16, float32 and float64")
        wide = name == "log_w" and x.dtype == torch.float32 and r.dtype != torch.float64
        if x.dtype != r.dtype and not wide:
            raise ValueError(f"{op}: {name} is {x.dtype}, but r is {r.dtype}: one dtype; log_w may be float32 instead")
    key_width, value_width = r.shape[-1], v.shape[-1]
    if v.shape[:-1] != r.shape[:-1]:
        raise ValueError(f"{op}: v is {list(v.shape)}, but r is {list(r.shape)}: all but the width must agree")
    if backend(r) == "triton" and not (key_width in KERNEL_WIDTHS and value_width in KERNEL_WIDTHS):
        raise ValueError(
            f"{op}: key width {key_width}, value width {value_width}; the GPU's kernels have {KERNEL_WIDTHS} for each"
        )
    check_cu_seqlens(op, cu_seqlens, "r", r)
    if state is not None:
        documents = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shape, dtype = (documents, v.shape[-2], value_width, key_width), state_dtype(r)
        if state.shape != shape or state.dtype != dtype or state.device != r.device:
            raise ValueError(
                f"{op}: state must be {dtype} [{'N' if op == 'wkv7' else 'B'}, H, V, K] = {list(shape)} on {r.device}; "
                f"found {state.dtype} {list(state.shape)} on {state.device}"
            )
    if chunk is not None and (not isinstance(chunk, int) or chunk not in CHUNKS):
        raise ValueError(f"{op}: chunk={chunk!r}; choose one of {CHUNKS}, or None for the default")


def _check_log_w(op: str, log_w: Tensor, chunk: int | None) -> None:
    """Raises ValueError for wrong log decays, with CDRMIX_DEBUG. chunk: of the GPU's kernels, else None."""
    if not debugging():
        return
    if bool(log_w.isnan().any()):
        raise ValueError(f"{op}: log_w holds NaN")
    if bool((log_w > 0).any()):
        raise ValueError(f"{op}: log_w must be at most 0, a decay; its largest value is {log_w.max().item():.4g}")
    least = log_w.min().item()
    if chunk is not None and -least * chunk / 2 >= EXPONENT_BOUND:
        bound = -EXPONENT_BOUND / (chunk / 2)
        raise ValueError(f"{op}: log_w must stay above {bound:g} for chunks of {chunk}; its least value is {least:.4g}")


def _kernels(r: Tensor, v: Tensor) -> ModuleType:
    """The module whose `wkv7_forward`, `wkv7_backward` and `wkv7_step` are used for these tensors."""
    chosen = backend(r)
    if chosen == "triton":
        triton_kernels = kernels_of("rwkv7", "triton")
        return triton_kernels if triton_kernels.chunk_sizes(r.dtype, r.shape[-1], v.shape[-1]) else reference
    if chosen == "cpu" and r.shape[-1] in KERNEL_WIDTHS and v.shape[-1] in KERNEL_WIDTHS:
        return kernels_of("rwkv7", "cpu")
    return reference


def _cast(inputs: Inputs) -> Inputs:
    """The inputs in the implementation's dtypes: Triton reads every dtype, the others float32 and float64."""
    if backend(inputs[0]) == "triton":
        return inputs
    return tuple(x if x.dtype == torch.float64 else x.float() for x in inputs)


def _state_shape(v: Tensor, r: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    # Not len(): torch.compile would compile again for every number of documents.
    documents = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return documents, v.shape[2], v.shape[3], r.shape[3]


@operator("cdrmix::wkv7")
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
    save: bool,
    recompute: bool,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y, the last states (empty unless wanted), and what the backward pass needs besides the inputs."""
    check_document_starts("wkv7", cu_seqlens, *r.shape[:2])
    kernels = _kernels(r, v)
    chunked = backend(r) == "triton" and kernels is not reference
    sizes = kernels.chunk_sizes(r.dtype, r.shape[-1], v.shape[-1]) if chunked else (None,)
    _check_log_w("wkv7", log_w, sizes[0] and (chunk or sizes[0]))
    flags = {"chunk": chunk, "save": save, "recompute": recompute, "return_state": return_state}
    with torch.autocast(r.device.type, enabled=False):  # an operator inherits autocast from its caller
        y, last, saved = kernels.wkv7_forward(*_cast((r, log_w, k, v, a, b)), state, cu_seqlens, **flags)
    return y.to(v.dtype).contiguous(), last, saved  # the reference returns slices of longer rows


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
    save: bool,
    recompute: bool,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    documents, heads, value_width, key_width = shape = _state_shape(v, r, cu_seqlens)
    last = r.new_empty(shape if return_state else 0, dtype=state_dtype(r))
    sizes = (*r.shape[:2], heads, key_width, value_width, documents, cu_seqlens is not None)
    saved = _kernels(r, v).wkv7_saved_shapes(*sizes, r.dtype, chunk=chunk, save=save, recompute=recompute)
    return torch.empty_like(v), last, [r.new_empty(size, dtype=dtype) for size, dtype in saved]


@operator("cdrmix::wkv7_backward")
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
    recompute: bool,
) -> list[Tensor]:
    """The gradients of r, log_w, k, v, a, b in their dtypes, and of the state (empty if there was none)."""
    inputs = (r, log_w, k, v, a, b)
    with torch.autocast(r.device.type, enabled=False):
        *gradients, dstate = _kernels(r, v).wkv7_backward(
            *_cast((dy,)), dlast, *_cast(inputs), state, cu_seqlens, saved, chunk=chunk, recompute=recompute
        )
    return [*(dx.to(x.dtype).contiguous() for dx, x in zip(gradients, inputs, strict=True)), dstate]


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
    recompute: bool,
) -> list[Tensor]:
    dstate = r.new_empty(0, dtype=state_dtype(r)) if state is None else torch.empty_like(state)
    return [*(torch.empty_like(x) for x in (r, log_w, k, v, a, b)), dstate]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    *tensors, ctx.chunk, _, ctx.recompute, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[2])


def _differentiate(ctx: Any, dy: Tensor | None, dlast: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    r, log_w, k, v, a, b, state, cu_seqlens, *saved = ctx.saved_tensors
    dy = torch.zeros_like(v) if dy is None else dy.contiguous()
    dlast = dlast.contiguous() if dlast is not None and dlast.numel() else None
    gradients = _wkv7_backward(dy, dlast, r, log_w, k, v, a, b, state, cu_seqlens, saved, ctx.chunk, ctx.recompute)
    wanted = [dx if needed else None for dx, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None, None, None, None


_wkv7.register_autograd(_differentiate, setup_context=_keep)


@operator("cdrmix::wkv7_step")
def _wkv7_step(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token's y and the new state."""
    _check_log_w("wkv7_step", log_w, None)
    with torch.autocast(r.device.type, enabled=False):
        y, new = _kernels(r, v).wkv7_step(*_cast((r, log_w, k, v, a, b)), state)
    return y.to(v.dtype), new


@_wkv7_step.register_fake
def _(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(state)
