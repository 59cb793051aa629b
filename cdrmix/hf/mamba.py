"""Mamba-2 layers of transformers over the operators of cdrmix: packed documents, and speed without a CUDA build.

The Mamba-2 models of transformers (nemotron_h, mamba2, bamba, falcon_h1, zamba2, granitemoehybrid) have mixers that
call functions of their module for the convolution and the scan. `install` gives each mixer of a model a copy of its
`forward` that calls the functions of this file instead. The library and other models do not change.
"""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdrmix import ops

_HANDLE = "_cdrmix_handle"  # attribute of a mixer with our functions: the handle of its hook


def install(model: nn.Module) -> int:
    """Lets the Mamba-2 mixers of a transformers model use the operators of cdrmix; returns how many mixers do so.

    The decoder then takes the keyword `cu_seqlens`, int32 [N + 1]: the starts of the documents over the flattened B * T
    tokens, with every row's start and the end. Generation works as before: the prefill uses the operators, and a step
    of one token stays transformers' own. The parameters and their names do not change.
    """
    mixers = [module for module in model.modules() if _calls_our_functions(module)]
    for mixer in mixers:
        if _HANDLE in vars(mixer):
            continue
        forward = inspect.unwrap(type(mixer).forward)
        assert isinstance(forward, FunctionType)
        names = {**forward.__globals__, **_FUNCTIONS}
        copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        copy.__kwdefaults__ = forward.__kwdefaults__
        vars(mixer)["forward"] = MethodType(copy, mixer)
        vars(mixer)[_HANDLE] = mixer.register_forward_pre_hook(_keep_known, with_kwargs=True)
    return len(mixers)


def restore(model: nn.Module) -> None:
    """Undoes `install`."""
    for module in model.modules():
        if _HANDLE in vars(module):
            vars(module).pop(_HANDLE).remove()
            del vars(module)["forward"]


def is_installed(model: nn.Module) -> bool:
    """Whether the model has mixers, and all use the operators of cdrmix."""
    mixers = [module for module in model.modules() if _calls_our_functions(module)]
    return bool(mixers) and all(_HANDLE in vars(mixer) for mixer in mixers)


def _calls_our_functions(module: nn.Module) -> bool:
    """Whether the class's forward calls the functions that this file replaces."""
    forward = inspect.unwrap(type(module).forward)
    return isinstance(forward, FunctionType) and _FUNCTIONS.keys() <= set(forward.__code__.co_names)


def _keep_known(
    mixer: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drops what a decoder passes to all its layers but a mixer has no use for."""
    known = {*inspect.signature(mixer.forward).parameters, "cu_seqlens"}
    return positional, {name: value for name, value in keywords.items() if name in known}


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Causal depthwise convolution of [B, C, T] with weight [C, W]; no document of cu_seqlens reads another one."""
    from transformers.activations import ACT2FN

    batch, _, length = hidden_states.shape
    device = hidden_states.device
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1, device=device) * length
    token = torch.arange(batch * length, device=device)
    document = torch.searchsorted(cu_seqlens[1:].long(), token, right=True)
    rows = token + (document + 1) * (weight.shape[1] - 1)
    y = _CausalConvolution.apply(hidden_states.transpose(1, 2), weight, bias, rows, len(cu_seqlens) - 1)
    assert isinstance(y, Tensor)
    return (y if activation is None else ACT2FN[activation](y)).transpose(1, 2)


class _CausalConvolution(torch.autograd.Function):
    """y_t = bias + sum_i weight_{W-1-i} x_{t-i} for packed documents, in x's dtype, summed in float32 at least.

    The tokens are copied to one row that has W - 1 zeros before each document. There the terms are shifted slices, and
    their sums and gradients need no masks. rows: int64 [B * T], the position of each token in that row.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, rows: Tensor, documents: int
    ) -> Tensor:
        with torch.autocast(x_BTC.device.type, enabled=False):
            width = weight_CW.shape[1]
            weight_WC = weight_CW.t().to(_sum_dtype(x_BTC))
            spread = _spread(x_BTC, rows, documents * (width - 1))
            sums = _correlate(spread, weight_WC, None if bias_C is None else bias_C.to(weight_WC))
            ctx.save_for_backward(spread, weight_CW, bias_C, rows)
            return sums.index_select(0, rows - (width - 1)).view(x_BTC.shape).to(x_BTC.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        spread, weight_CW, bias_C, rows = ctx.saved_tensors
        (dy_BTC,) = gradients
        with torch.autocast(dy_BTC.device.type, enabled=False):
            width, length = weight_CW.shape[1], len(spread) - weight_CW.shape[1] + 1
            # Each token's gradient is a sum over the W outputs from its own on: zeros follow the last one.
            dspread = _spread(dy_BTC, rows, len(spread) - len(rows))
            dx = _correlate(
                torch.cat([dspread, dspread.new_zeros(width - 1, dspread.shape[1])]),
                weight_CW.t().flip(0).to(dspread),
                None,
            )
            dweight = torch.stack(
                [(dspread[width - 1 :] * spread[lag : lag + length]).sum(0) for lag in range(width)], 1
            )
            dbias = None if bias_C is None else dspread.sum(0).to(bias_C)
            dx = dx.index_select(0, rows).view(dy_BTC.shape).to(dy_BTC.dtype)
            return dx, dweight.to(weight_CW), dbias, None, None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _spread(x_BTC: Tensor, rows: Tensor, zeros: int) -> Tensor:
    """The tokens at their rows of one row of tokens with zeros elsewhere, [B * T + zeros, C], in the dtype of sums."""
    channels = x_BTC.shape[2]
    spread = x_BTC.new_zeros(len(rows) + zeros, channels, dtype=_sum_dtype(x_BTC))
    return spread.index_copy_(0, rows, x_BTC.reshape(-1, channels).to(spread.dtype))


def _correlate(spread: Tensor, weight_WC: Tensor, bias_C: Tensor | None) -> Tensor:
    """sum_j weight_j spread[t + j], for each t from 0 to len(spread) - W."""
    width = len(weight_WC)
    length = len(spread) - width + 1
    sums = spread[width - 1 :] * weight_WC[width - 1]
    for shift in range(width - 2, -1, -1):
        sums.addcmul_(spread[shift : shift + length], weight_WC[shift])
    return sums if bias_C is None else sums.add_(bias_C)


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan of Mamba-2 (arXiv 2405.21060): S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T; y_t = S_t C_t + D x_t.

    The names are those of transformers. hidden_states x: [B, T, H, P]; dt: [B, T, H], before dt_bias, softplus and the
    limits; A, D: [H]; B, C: [B, T, G, N].
    initial_states and the last states: [B, H, P, N], of rows that are one document each. chunk_size has no effect on
    the result; the operator has its own. Returns y [B, T, H, P] in the dtype of x.
    """
    assert z is None
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    if dt_softplus:
        dt = functional.softplus(dt)
    dt = dt.clamp(*dt_limit)
    y, last = ops.ssd_scan(
        C,
        B,
        (hidden_states * dt.unsqueeze(-1)).to(hidden_states.dtype),
        A.float() * dt,
        state=None if initial_states is None else initial_states.float(),
        cu_seqlens=cu_seqlens,
        return_state=return_final_states,
    )
    if D is not None:
        y = (y + D.unsqueeze(-1) * hidden_states).to(y.dtype)
    if not return_final_states:
        return y
    assert last is not None
    return y, last


def _no_fused_layer(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float | None = None,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    cu_seqlens: Tensor | None = None,
) -> None:
    """None: the mixer then calls the convolution and the scan one after another."""


_FUNCTIONS = {
    "causal_conv1d_fn": _convolution,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _no_fused_layer,
}
