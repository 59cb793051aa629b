"""The element-wise operations around RWKV-7's recurrence in plain PyTorch: specification and oracle.

Shapes: B batch, T time, D = H K width, H heads, K head size. Autograd computes the gradients. All of it runs in float64
too; for half precision it computes in float32 and returns the inputs' dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from cdrmix.kernels.rwkv7.reference import token_shift

GROUP_NORM_EPS = 64e-5  # 1e-5 times head_size_divisor^2 = 64 in the release
Streams = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def time_mix_streams(
    x_BTD: Tensor, mixes_6D: Tensor, last_BD: Tensor | None = None, starts_BT: Tensor | None = None
) -> Streams:
    """Six interpolations between each token and its predecessor: x_t + (x_{t-1} - x_t) mixes_i, each [B, T, D].

    The predecessor of a row's first token is `last_BD`, or zero. It is zero too where `starts_BT`, bool, marks the
    start of a document.
    """
    x = _at_least_float32(x_BTD)
    last = None if last_BD is None else last_BD.to(x.dtype)
    difference = token_shift(x, last, None if starts_BT is None else starts_BT.unsqueeze(-1)) - x
    r, w, k, v, a, g = (torch.addcmul(x, difference, mix).to(x_BTD.dtype) for mix in mixes_6D.to(x.dtype))
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

        log_w = -exp(-1/2) sigmoid(w0 + decay)                  in float32 at least
        rate' = sigmoid(a0 + rate)
        kk = normalise(k k_k) over each head, a = -kk, b = kk rate'
        k' = k (1 + (rate' - 1) k_a)
        v' = v + (v_first - v) sigmoid(v0 + v_gate)             v itself where v_first is None

    k, decay, rate, v, v_first, v_gate: [B, T, D]; decay, rate and v_gate are the low-rank products without their
    biases. w0, a0, v0, k_k, k_a: [D].
    """
    by_head = (*k.shape[:2], -1, head_size)
    wide = _at_least_float32(k)
    log_w = -math.exp(-0.5) * torch.sigmoid(_at_least_float32(decay) + w0)
    learned_rate = torch.sigmoid(_at_least_float32(rate) + a0)
    removal_key = functional.normalize((wide * k_k).view(by_head), dim=-1, eps=1e-12)
    replacement = removal_key * learned_rate.view(by_head)
    new_key = wide * (1 + (learned_rate - 1) * k_a)
    if v_first is not None:
        assert v_gate is not None
        assert v0 is not None
        share = torch.sigmoid(_at_least_float32(v_gate) + v0)
        v = torch.lerp(_at_least_float32(v), _at_least_float32(v_first), share).to(v.dtype)
    return (
        log_w.view(by_head),
        new_key.to(k.dtype).view(by_head),
        -removal_key.to(k.dtype),
        replacement.to(k.dtype),
        v.view(by_head),
    )


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

    y, r, k, v: [B, T, H, K]; gate: [B, T, D]; r_k: [H, K]; weight, bias: [D].
    """
    y32, r32, k32, v32 = (_at_least_float32(x) for x in (y, r, k, v))
    batch, length, heads, head_size = y.shape
    flat = y32.reshape(batch * length, heads * head_size)
    normed = functional.group_norm(flat, heads, weight.to(flat.dtype), bias.to(flat.dtype), eps).view(y.shape)
    bonus = (r32 * k32 * r_k).sum(-1, keepdim=True) * v32
    return ((normed + bonus).view(gate.shape) * _at_least_float32(gate)).to(gate.dtype)
