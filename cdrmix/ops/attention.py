"""Causal softmax attention over documents: checks, and the choice of an implementation.

On a CPU `cdrmix::attention_documents` and its backward are opaque to torch.compile. All else is PyTorch's own.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from cdrmix.kernels.attention import reference as reference_attention
from cdrmix.kernels.common.products import one_thread
from cdrmix.ops.backend import backend, compute_dtype, platform_of
from cdrmix.ops.checks import DTYPES, check_cu_seqlens, check_document_starts
from cdrmix.ops.operator import operator

OP = "attention"
FLASH_WIDEST, FLASH_MULTIPLE = 256, 8  # head widths of FlashAttention-2 as PyTorch builds it
FLASH_CAPABILITY = 8  # least compute capability, Ampere
# On a CPU heads of this width have other bits on several threads than on one, for documents of 9, 11, ... 31 tokens; of
# the widths 4 to 128 no other has, for 2 to 79 tokens (PyTorch 2.13, AMD EPYC). They are computed on one thread.
UNEVEN_WIDTH = 8


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    visible_BS: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each token to its document's tokens up to itself (arXiv 1706.03762, equation 1, causal).

        y_t = sum_s softmax_s(q_t . k_s / sqrt(N)) v_s over the tokens s <= t of t's document

    q: [B, T, H, N]; k, v: [B, S, G, N], H a multiple of G (grouped queries, arXiv 2305.13245): head h uses keys and
        values of head h // (H / G), which are not repeated. S is at least T; where it is more, the queries belong to
        the last T tokens. bfloat16, float16, float32 or float64; under autocast its dtype. The last dimension is
        contiguous.
    cu_seqlens: int32 or int64 [D + 1], not decreasing, document starts over the flattened B * T tokens, which include
        every row's start; S must be T. None: each row is one document.
    visible_BS: bool [B, S], with T = 1 the keys that each row's query sees, at least one: others may hold anything
        that is finite. None: all up to the query's own.
    Returns y [B, T, H, N] in the dtype of the products.

    The implementation, and its memory besides inputs and outputs:
    - NVIDIA GPUs of compute capability 8.0 or above, bfloat16 and float16, N a multiple of 8 up to 256:
      FlashAttention-2 of variable length, O(T). It is told that the longest document may be a whole row, so that the
      host reads no value. Its backward has a fixed order of sums under torch.use_deterministic_algorithms(True); with
      warn_only=True it has not (PyTorch warns).
    - CPUs: PyTorch's blocked attention, document by document, O(T): a document has the same bits packed or alone. Only
      several queries after a cache (1 < T < S) need a mask, bool [T, S].
    - Other GPU tensors (float32, AMD GPUs, older ones, other widths): torch's scaled_dot_product_attention; packed
      documents need a mask, bool [B, T, T]. The fused kernels of AMD GPUs are not deterministic, so under
      torch.use_deterministic_algorithms(True) its mathematical path is used, which stores [B, H, T, S].
    - float64, and CDRMIX_BACKEND=reference: the formula.
    - With visible_BS: scaled_dot_product_attention with a mask, on every device.
    Raises ValueError naming the argument, before anything runs. Values of cu_seqlens are checked on a CPU.
    """
    _check(q, k, v, cu_seqlens, visible_BS)
    dtype = compute_dtype(q)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if backend(q) == "reference":
        return reference_attention.attention(q, k, v, cu_seqlens, visible_BS)
    if visible_BS is not None:
        return _step(q, k, v, visible_BS)
    if _flash_serves(q):
        return _flash(q, k, v, cu_seqlens)
    if platform_of(q) == "cpu" and cu_seqlens is None and q.shape[3] == UNEVEN_WIDTH and q.shape[1] == k.shape[1]:
        cu_seqlens = torch.arange(0, len(q) * q.shape[1] + 1, q.shape[1], dtype=torch.int32)
    if platform_of(q) == "cpu" and cu_seqlens is not None:
        return _documents(q, k, v, cu_seqlens)[0]
    return _scaled_dot_product(q, k, v, cu_seqlens)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, visible_BS: Tensor | None) -> None:
    """Raises ValueError for wrong shapes, dtypes and devices; reads no value except a CPU's cu_seqlens."""
    named = {"q": q, "k": k, "v": v}
    for name, x in (named | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})).items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{OP}: {name} must be a torch.Tensor; found {type(x).__name__}")
    for name, x in named.items():
        if x.ndim != 4 or 0 in x.shape:
            shape = "[B, T, H, N]" if name == "q" else "[B, S, G, N]"
            raise ValueError(f"{OP}: {name} must be {shape}, none of them 0; found {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{OP}: {name} is on {x.device}, but q is on {q.device}: move them to one device")
        if x.dtype not in DTYPES:
            raise ValueError(f"{OP}: {name} is {x.dtype}; allowed are bfloat16, float16, float32 and float64")
        if (x.dtype == torch.float64) != (q.dtype == torch.float64):
            raise ValueError(f"{OP}: {name} is {x.dtype}, but q is {q.dtype}: float64 goes with float64 only")
    if k.shape != v.shape:
        raise ValueError(f"{OP}: v is {list(v.shape)}, but k is {list(k.shape)}: they must agree")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"{OP}: k is {list(k.shape)}, but q is {list(q.shape)}: rows and width of a head must agree")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{OP}: q has {q.shape[2]} heads, k and v {k.shape[2]}: the first must be a multiple of these")
    if k.shape[1] < q.shape[1]:
        raise ValueError(f"{OP}: q has {q.shape[1]} tokens, but k only {k.shape[1]}: each query needs its token's key")
    check_cu_seqlens(OP, cu_seqlens, "q", q)
    if cu_seqlens is not None and k.shape[1] != q.shape[1]:
        raise ValueError(
            f"{OP}: cu_seqlens is for packed documents, whose queries and keys are of the same tokens; found "
            f"{q.shape[1]} queries and {k.shape[1]} keys a row"
        )
    if visible_BS is None:
        return
    if q.shape[1] != 1 or cu_seqlens is not None:
        raise ValueError(f"{OP}: visible_BS is for one query a row without cu_seqlens; found {q.shape[1]} queries")
    if visible_BS.dtype != torch.bool or visible_BS.shape != k.shape[:2] or visible_BS.device != q.device:
        raise ValueError(
            f"{OP}: visible_BS must be torch.bool {list(k.shape[:2])} on {q.device}; found {visible_BS.dtype} "
            f"{list(visible_BS.shape)} on {visible_BS.device}"
        )


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether PyTorch has FlashAttention-2 for this GPU. ROCm has another one, whose backward is not deterministic."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device)[0] >= FLASH_CAPABILITY


def _flash_serves(q: Tensor) -> bool:
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    width = q.shape[3]
    fits = narrow and width <= FLASH_WIDEST and width % FLASH_MULTIPLE == 0
    # A plan's tensors are on a CPU, and the plan assumes a GPU that has it.
    return fits and platform_of(q) == "cuda" and (q.device.type == "cpu" or _has_flash(q.device))


def _flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """FlashAttention-2 by its ATen operator, which has a gradient, and the same arguments in PyTorch 2.8 to 2.13.

    `torch.nn.attention.varlen`, which calls it, is a prototype whose arguments differ between 2.10 and 2.13. The causal
    mask is aligned to the last query and the last key.
    """
    lengths = q.shape[1], k.shape[1]
    flags = (0.0, True, False)  # dropout, causal, debug mask
    forward = torch.ops.aten._flash_attention_forward
    if cu_seqlens is None:
        y: Tensor = forward(q, k, v, None, None, *lengths, *flags)[0]
        return y
    starts = cu_seqlens.to(torch.int32).contiguous()
    flat = (x.flatten(0, 1) for x in (q, k, v))
    y = forward(*flat, starts, starts, *lengths, *flags)[0]
    return y.view(q.shape)


def _step(q: Tensor, k: Tensor, v: Tensor, visible_BS: Tensor) -> Tensor:
    """One query a row. The heads of a group are the queries of one head: PyTorch's fused kernels take no mask together
    with grouped queries."""
    grouped = q.reshape(len(q), k.shape[2], -1, q.shape[3])
    with _deterministic_kernels(q):
        y = functional.scaled_dot_product_attention(
            grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible_BS[:, None, None]
        )
    return y.reshape(q.shape)


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """torch's scaled_dot_product_attention, with a mask where it needs one."""
    batch, length, heads, _ = q.shape
    keys = k.shape[1]
    mask = None
    if cu_seqlens is not None or 1 < length < keys:
        mask = reference_attention.visible(batch, length, keys, cu_seqlens, q.device).unsqueeze(1)
    with _deterministic_kernels(q):
        y = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and length == keys,
            enable_gqa=heads != k.shape[2],
        )
    return y.transpose(1, 2)


def _deterministic_kernels(q: Tensor) -> AbstractContextManager[None]:
    """Restricts ROCm to the mathematical path where determinism is required, as in every planned run."""
    if platform_of(q) == "hip" and (q.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()):
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


def _spans(cu_seqlens: Tensor, length: int) -> list[tuple[slice, slice]]:
    """Rows and tokens of each document that is not empty; neighbouring rows of one document each are joined.

    A document's result does not depend on other rows, so joining changes no bit.
    """
    spans: list[tuple[slice, slice]] = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        if start == end:
            continue
        row, first = divmod(start, length)
        last = end - row * length
        if spans and (first, last) == (0, length) and spans[-1][1] == slice(0, length):
            spans[-1] = slice(spans[-1][0].start, row + 1), slice(0, length)
        else:
            spans.append((slice(row, row + 1), slice(first, last)))
    return spans


@operator("cdrmix::attention_documents")
def _documents(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """y [B, T, H, N], and for the backward pass the logarithms of the softmaxes' denominators [B, H, T], float32."""
    check_document_starts(OP, cu_seqlens, *q.shape[:2])
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    y, sums = torch.empty_like(q, memory_format=torch.contiguous_format), _empty_sums(q)
    for rows, tokens in _spans(cu_seqlens, q.shape[1]):
        inputs = (x[rows, tokens].transpose(1, 2) for x in (q, k, v))
        with _threads_of(q):
            part, sums_BHT = forward(*inputs, 0.0, True)
        y[rows, tokens] = part.transpose(1, 2)
        sums[rows, :, tokens] = sums_BHT
    return y, sums


@_documents.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), _empty_sums(q)


def _threads_of(q: Tensor) -> AbstractContextManager[None]:
    """Within it, one CPU thread for heads of UNEVEN_WIDTH."""
    return one_thread() if q.shape[3] == UNEVEN_WIDTH else nullcontext()


def _empty_sums(q: Tensor) -> Tensor:
    batch, length, heads, _ = q.shape
    return q.new_empty(batch, heads, length, dtype=torch.promote_types(q.dtype, torch.float32))


@operator("cdrmix::attention_documents_backward")
def _documents_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows, tokens in _spans(cu_seqlens, q.shape[1]):
        dpart, qpart, kpart, vpart, part = (x[rows, tokens].transpose(1, 2) for x in (dy, q, k, v, y))
        with _threads_of(q):
            found = backward(dpart, qpart, kpart, vpart, part, sums[rows, :, tokens], 0.0, True)
        for gradient, each in zip(gradients, found, strict=True):
            gradient[rows, tokens] = each.transpose(1, 2)
    dq, dk, dv = gradients
    return dq, dk, dv


@_documents_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _differentiate(ctx: Any, dy: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 4
    return *_documents_backward(dy, *ctx.saved_tensors), None


_documents.register_autograd(_differentiate, setup_context=_keep)
