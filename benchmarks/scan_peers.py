"""Implementations of the SSD scan: cdrmix's operator, PyTorch in three ways, and flash-linear-attention.

Each takes q, k [B, T, G, K], v [B, T, H, V], log decays [B, T, H] and returns y [B, T, H, V], without a state and
without a scale.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.ssd import reference as reference_scan

OURS = "cdrmix"
NAIVE = "PyTorch, token by token"
CHUNKED = "PyTorch, chunks, "
FLA = "fla, simple_gla"
FLA_NAIVE = "fla, naive chunks"
RETENTION = "fla, retention"
NAIVE_TOKENS = 1024  # most tokens for which the autograd graph of the token loop fits next to its peers

Implementation = Callable[[list[Tensor], Tensor | None], Tensor]  # q, k, v, log_decay and cu_seqlens -> y


def ours(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
    return ops.ssd_scan(*inputs, cu_seqlens=cu_seqlens)[0]


def naive(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
    assert cu_seqlens is None
    return reference_scan.ssd_scan_recurrence(*(x.float() for x in inputs))[0].to(inputs[2].dtype)


def segment_sums(x: Tensor) -> Tensor:
    """[..., T] to [..., T, T]: the sum of x from after j to i, -inf above the diagonal."""
    T = x.shape[-1]
    below = torch.ones(T, T, dtype=torch.bool, device=x.device).tril(-1)
    sums = x.unsqueeze(-1).expand(*x.shape, T).masked_fill(~below, 0).cumsum(-2)
    return sums.masked_fill(~below.logical_or(torch.eye(T, dtype=torch.bool, device=x.device)), -torch.inf)


def dual_form(chunk: int) -> Implementation:
    """The block decomposition of structured state-space duality (arXiv 2405.21060, section 6), by autograd.

    Within a chunk a masked product of [C, C]; between chunks the same mask, of the chunks' total decays.
    """

    def call(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
        assert cu_seqlens is None
        q, k, v, log = (x.float() for x in inputs)
        B, T, H, _ = v.shape
        assert T % chunk == 0
        q, k = (x.repeat_interleave(H // x.shape[2], 2) for x in (q, k))
        q, k, v, log = (x.unflatten(1, (-1, chunk)).movedim(3, 1) for x in (q, k, v, log))  # [B, H, N, C, ...]
        sums = log.cumsum(-1)
        y = ((q @ k.mT) * segment_sums(log).exp()) @ v
        leaving = (sums[..., -1:] - sums).exp().unsqueeze(-1)
        states = k.mT @ (v * leaving)  # the update of each chunk, [B, H, N, K, V]
        whole = torch.nn.functional.pad(sums[..., -1], (1, 0))
        between = segment_sums(whole).exp()[..., :-1, 1:]  # from the end of chunk n to the start of chunk m
        before = torch.einsum("bhmn,bhnkv->bhmkv", between, states)
        y = y + (q @ before) * sums.exp().unsqueeze(-1)
        return y.movedim(1, 3).reshape(B, T, H, -1).to(inputs[2].dtype)

    return call


class _Chunked(torch.autograd.Function):
    """The reference's two passes."""

    @staticmethod
    def forward(ctx, q, k, v, log_decay, cu_seqlens):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v, log_decay)
        ctx.cu_seqlens = cu_seqlens
        flags = {"chunk": 32, "exclusive": False, "save": True, "return_state": False}
        return reference_scan.ssd_scan_forward(q, k, v, log_decay, None, cu_seqlens, **flags)[0]

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        inputs = ctx.saved_tensors
        *gradients, _ = reference_scan.ssd_scan_backward(
            dy, None, *inputs, None, ctx.cu_seqlens, [], chunk=32, exclusive=False
        )
        return *gradients, None


def chunked(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
    return _Chunked.apply(*(x.float() for x in inputs), cu_seqlens).to(inputs[2].dtype)


def fla(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
    """With heads repeated where they share keys, because it has equally many of both. Its decays are float32."""
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v, log_decay = inputs
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return chunk_simple_gla(q, k, v, log_decay, scale=1.0, cu_seqlens=cu_seqlens)[0]


def fla_naive(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla

    q, k, v, log_decay = inputs
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return naive_chunk_simple_gla(q, k, v, log_decay, scale=1.0)[0]


def retention(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
    """It computes the decays from the head's number; the given ones are the same, and get no gradient."""
    from fla.ops.retention import chunk_retention

    q, k, v, log_decay = inputs
    return chunk_retention(q, k, v, scale=1.0, cu_seqlens=cu_seqlens)[0] + 0 * log_decay.sum().to(v.dtype)


def implementations(
    device: str, length: int, packed: bool, fixed: bool
) -> tuple[dict[str, Implementation], dict[str, str]]:
    """The implementations that can be measured, ours first, and the reasons for the absent ones.

    fixed: whether the decays are RetNet's.
    """
    found: dict[str, Implementation] = {OURS: ours}
    absent = {"mamba-ssm": "a source distribution to be compiled against the machine's CUDA; its formula is measured"}
    has_fla = all(importlib.util.find_spec(module) for module in ("fla", "einops"))
    if not has_fla:
        absent["fla"] = "fla and einops not installed"
    elif device == "cuda":
        found[FLA] = fla
    elif not packed:
        absent[FLA] = "its kernels are for GPUs"
        found[FLA_NAIVE] = fla_naive
    if has_fla and device == "cuda" and fixed:
        found[RETENTION] = retention
    else:
        absent[RETENTION] = "its kernels are for GPUs, and its decays are its own: measured in the cases `retention_`"
    if packed:
        absent[f"{CHUNKED}dual form"] = absent[NAIVE] = "has no packed documents"
    else:
        found[f"{CHUNKED}dual form"] = dual_form(64)
        if length > NAIVE_TOKENS:
            absent[NAIVE] = f"keeps the state of every token: measured at {NAIVE_TOKENS} tokens and fewer"
        else:
            found[NAIVE] = naive
    found[f"{CHUNKED}our reference"] = chunked
    return found, absent
