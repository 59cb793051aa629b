"""The Mamba-2 mixer (arXiv 2405.21060, section 7): short convolution, SSD scan, gated norm.

Shapes: B batch, T time, D model, I = expand * D inner channels, H heads of V = head_dim channels (I = H V), G groups of
heads, K = d_state, W convolution width, C = I + 2 G K convolved channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cdrmix import ops
from cdrmix.config.schema_model import Model
from cdrmix.model.context import Context
from cdrmix.model.feed_forward.router import Routed
from cdrmix.model.initial_values import Tile, by_inputs, drawn, uniform
from cdrmix.model.layers import consecutive, linear
from cdrmix.model.mixers.base import MIXERS, Mixed, Mixer
from cdrmix.model.sequence import SequenceSlice
from cdrmix.model.tensor_parallel import Cut

DECAY_RANGE = (1.0, 16.0)  # initial -A, uniform
STEP_RANGE = (1e-3, 1e-1)  # initial dt without the token's part, log-uniform


class MambaCache(NamedTuple):
    """What generation carries: the convolution's last W - 1 inputs [B, W - 1, C], the scan's state [B, H, V, K]."""

    convolved_BWC: Tensor
    scan_BHVK: Tensor


class Projected(NamedTuple):
    """A token's projections: the gate [B, T, I]; x, B and C concatenated [B, T, C]; the step's part [B, T, H]; with
    experts, also how the tokens were routed."""

    gate: Tensor
    x_B_C: Tensor
    step: Tensor
    routing: ops.Routing | None = None


@MIXERS("mamba2")
class Mamba2(Mixer):
    """Mamba-2's mixer.

        gate, x, B, C, step = projections of the token
        x, B, C = silu(convolution over each channel's last W tokens)
        dt = softplus(step + dt_bias)
        S_t = exp(-exp(A_log) dt) S_{t-1} + dt x_t B_t^T;  y_t = S_t C_t + D x_t     for each head
        output of rms_norm(y silu(gate)), normed over the channels of a group

    Initialised as published: -A uniform in DECAY_RANGE, softplus(dt_bias) log-uniform in STEP_RANGE, D = 1, the others
    uniform in +-1 / sqrt(fan_in). But the output projection is zero, as in every mixer here.
    """

    part = "mamba"

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        mamba = config.mamba
        self.inner, self.groups, self.d_state = mamba.expand * config.d_model, mamba.groups, mamba.d_state
        self.head_dim, self.heads = mamba.head_dim, mamba.expand * config.d_model // mamba.head_dim
        self.norm_eps = config.norm_eps
        self.channels = channels = self.inner + 2 * self.groups * self.d_state
        self.add_projections(config)
        convolution = by_inputs(mamba.conv_width, 1.0)
        self.conv_weight_WC = drawn(convolution, mamba.conv_width, channels)
        self.conv_bias = drawn(convolution, channels)
        self.dt_bias = drawn(_draw_step_bias, self.heads)
        self.A_log = drawn(_draw_log_decay, self.heads)
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm_weight = nn.Parameter(torch.ones(self.inner))

    def add_projections(self, config: Model) -> None:
        """The parameters of `project` and `emit`."""
        self.input = linear(config.d_model, self.inner + self.channels + self.heads, config.init_std_scale)
        selecting = self.groups * self.d_state
        gate_x_B_C_step = (self.inner, self.inner, selecting, selecting, self.heads)
        self.fused = {"input.weight": consecutive(-2, *gate_x_B_C_step)}
        self.output = linear(self.inner, config.d_model, 0.0)

    def cuts(self) -> Mapping[str, Cut]:
        """Groups of heads, with the B and C of each."""
        selecting = self.groups * self.d_state
        convolved = (self.inner, selecting, selecting)
        by_head = ("dt_bias", "A_log", "D", "norm_weight")
        return dict.fromkeys(by_head, Cut(0)) | {
            "conv_weight_WC": Cut(1, convolved),
            "conv_bias": Cut(0, convolved),
            **self.cuts_of_projections(selecting),
        }

    def cuts_of_projections(self, selecting: int) -> Mapping[str, Cut]:
        """Of `cuts`, those of the parameters of `add_projections`. selecting: the channels of B, and of C."""
        segments = (self.inner, self.inner, selecting, selecting, self.heads)
        return {"input.weight": Cut(0, segments), "output.weight": Cut(1)}

    def narrow(self, size: int) -> None:
        self.inner, self.groups, self.heads = self.inner // size, self.groups // size, self.heads // size
        self.channels //= size

    def project(self, x: Tensor, context: Context | None = None) -> Projected:
        """x [B, T, D] (normed) -> the inputs of the convolution, the scan and the gate, token by token.

        context: of the tokens, for a router; None: every position is a token of whole rows.
        """
        return Projected(*self.input(self.copied(x)).split([self.inner, self.channels, self.heads], -1))

    def emit(self, y: Tensor, routing: ops.Routing | None) -> Tensor:
        """y [B, T, I] to the output [B, T, D]."""
        return self.summed(self.output(y))

    def forward(self, x: Tensor, context: Context, cache: MambaCache | None) -> Mixed:
        """x [B, T, D] (normed) -> its output, and the cache after the last token if wanted."""
        batch, length, _ = x.shape
        gate, x_B_C, step, routing = self.project(x, context)
        inputs_BTC, before_BWC = x_B_C, cache.convolved_BWC if cache else None
        if context.token_by_token:
            assert before_BWC is not None
            before_BWC = torch.cat([before_BWC[0], x_B_C[:-1, 0]]).unfold(0, before_BWC.shape[1], 1).mT
        if context.sequence is not None:
            before_BWC = context.sequence.before(x_B_C, len(self.conv_weight_WC) - 1)
        x_B_C, convolved = causal_convolution(
            x_B_C, self.conv_weight_WC, self.conv_bias, before_BWC, context.before_BT1
        )
        selecting = self.groups * self.d_state
        x, k, q = _silu(x_B_C).split([self.inner, selecting, selecting], -1)
        x = x.view(batch, length, self.heads, self.head_dim)
        k, q = (side.view(batch, length, self.groups, self.d_state) for side in (k, q))
        dt = -functional.logsigmoid(-_wide(step) - self.dt_bias)  # softplus
        log_decay = -self.A_log.exp() * dt
        v = (x * dt.unsqueeze(-1)).to(x.dtype)
        last: Tensor | None
        after: MambaCache | tuple[MambaCache, ...] | None = None
        if context.token_by_token:
            assert cache is not None
            state, tokens, states = cache.scan_BHVK, [], []
            for t in range(batch):
                q_t, k_t, v_t, log_decay_t = (side[t : t + 1, 0] for side in (q, k, v, log_decay))
                token, state = ops.ssd_scan_step(q_t, k_t, v_t, log_decay_t, state)
                tokens.append(token)
                states.append(MambaCache(convolved[t : t + 1].clone(), state))
            y, last, after = torch.stack(tokens), None, tuple(states)
        elif length == 1 and cache is not None and context.cu_seqlens is None and not torch.is_grad_enabled():
            q_t, k_t, v_t, log_decay_t = (side.squeeze(1) for side in (q, k, v, log_decay))
            token, last = ops.ssd_scan_step(q_t, k_t, v_t, log_decay_t, cache.scan_BHVK)
            y = token.unsqueeze(1)
        else:
            carried = cache.scan_BHVK if cache else None
            if context.sequence is not None:
                carried = _carried(q, k, v, log_decay, context.cu_seqlens, context.sequence)
            y, last = ops.ssd_scan(
                q,
                k,
                v,
                log_decay,
                state=carried,
                cu_seqlens=context.cu_seqlens,
                return_state=context.keep_cache,
            )
        y = (y + self.D.unsqueeze(-1) * x).view(batch, length, self.inner)
        if context.keep_cache and last is not None:
            if context.cu_seqlens is not None:
                convolved = last_inputs(inputs_BTC, context.cu_seqlens, len(self.conv_weight_WC) - 1)
            after = MambaCache(convolved.clone(), last)
        output = self.emit(self.gated_norm(y, gate), routing)
        return Mixed(output, after, None if routing is None else Routed.of(routing))

    def gated_norm(self, y: Tensor, gate: Tensor) -> Tensor:
        """rms_norm(y silu(gate)) over the channels of a group of heads, [B, T, I] in gate's dtype."""
        gated = (_wide(y) * _silu(_wide(gate))).unflatten(-1, (self.groups, -1))
        normed = functional.rms_norm(gated, gated.shape[-1:], None, self.norm_eps).flatten(-2)
        return (normed * self.norm_weight).to(gate.dtype)


def _carried(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None, sequence: SequenceSlice
) -> Tensor:
    """The states before the documents of a slice, from the slices before it: [N, H, V, K]. A slice's transition is the
    product of its decays."""
    _, final = ops.ssd_scan(q, k, v, log_decay, cu_seqlens=cu_seqlens, return_state=True)
    assert final is not None
    decay_BH11 = log_decay.to(final.dtype).sum(1).exp()[:, :, None, None]
    return sequence.states_before(final, decay_BH11, torch.mul)


def causal_convolution(
    x_BTC: Tensor, weight_WC: Tensor, bias_C: Tensor, last_BWC: Tensor | None, before_BT1: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y_t = bias + sum_i weight_{W-1-i} x_{t-i}, i from 0 to W - 1, each channel by itself; in x's dtype.

    last_BWC: the W - 1 tokens before the rows, [B, W - 1, C], or None: zeros. before_BT1: number of tokens before each
    token in its document, where rows hold several documents; other documents' tokens are not read. Terms are added one
    by one, each rounded, so that a document has the same bits packed and alone.
    Returns y [B, T, C], and a view of the last W - 1 tokens [B, W - 1, C].
    """
    width, length = len(weight_WC), x_BTC.shape[1]
    weight_WC, bias_C = weight_WC.to(x_BTC.dtype), bias_C.to(x_BTC.dtype)
    if last_BWC is None:
        last_BWC = x_BTC.new_zeros(len(x_BTC), width - 1, x_BTC.shape[2])
    padded = torch.cat([last_BWC, x_BTC], 1)
    y = x_BTC * weight_WC[-1] + bias_C
    for lag in range(1, width):
        first = width - 1 - lag
        term = padded[:, first : first + length] * weight_WC[first]
        y = y + (term if before_BT1 is None else torch.where(before_BT1 >= lag, term, 0.0))
    return y, padded[:, length:]


def last_inputs(x_BTC: Tensor, cu_seqlens: Tensor, count: int) -> Tensor:
    """The last `count` tokens of every document of packed rows, [documents, count, C]; zeros before its first."""
    bounds = cu_seqlens.long().unsqueeze(1)
    positions = bounds[1:] - torch.arange(count, 0, -1, device=x_BTC.device)
    return torch.where((positions >= bounds[:-1]).unsqueeze(-1), x_BTC.flatten(0, 1)[positions.clamp(min=0)], 0.0)


def _silu(x: Tensor) -> Tensor:
    """x sigmoid(x), with bits that do not depend on an element's position.

    On CPUs PyTorch's silu, sigmoid and softplus compute the last elements of a tensor one by one, with other bits than
    in vectors (seen with AVX-512: up to 31 elements). So a document's rounding would depend on what is packed with it.
    logsigmoid and exp do not. In float32 at least, rounded once.
    """
    if x.device.type != "cpu":
        return functional.silu(x)
    wide = _wide(x)
    return (wide * functional.logsigmoid(wide).exp()).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _draw_step_bias(generator: np.random.Generator, tile: Tile) -> None:
    uniform(*(math.log(bound) for bound in STEP_RANGE))(generator, tile)
    step = np.exp(tile)
    tile[:] = step + np.log(-np.expm1(-step))  # the inverse of softplus


def _draw_log_decay(generator: np.random.Generator, tile: Tile) -> None:
    uniform(*DECAY_RANGE)(generator, tile)
    np.log(tile, out=tile)
