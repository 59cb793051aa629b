"""The RWKV-7 time-mix block (arXiv 2503.14456), with the parameters, names and initialisation of the release."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdrmix import ops
from cdrmix.config.schema import Model
from cdrmix.model.layers import linear

GROUP_NORM_EPS = 64e-5  # 1e-5 times head_size_divisor^2 = 64 in the release


class TimeMixState(NamedTuple):
    """What generation carries: the last token's normed input [B, D] and the recurrence's state [B, H, V, K]."""

    last_BD: Tensor
    wkv_BHVK: Tensor


class TimeMix(nn.Module):
    """RWKV-7's mixer: token shift, six data-dependent streams, the generalised delta rule, norm, bonus and gate."""

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        width, rwkv = config.d_model, config.rwkv
        self.head_size, self.heads = rwkv.head_size, width // rwkv.head_size
        self.first_layer = layer == 0
        depth = layer / max(config.layers - 1, 1)  # 0 in the first block, 1 in the last
        fade = 1 - layer / config.layers
        linear_ramp = torch.arange(width) / max(width - 1, 1) - 0.5
        within_head = (torch.arange(width) % self.head_size) / max(self.head_size - 1, 1) * 2 - 1
        zigzag = within_head * within_head.abs()
        channel = torch.arange(width) / width

        def mix(power: float) -> nn.Parameter:
            return nn.Parameter(1 - channel.pow(power * fade))

        self.x_r, self.x_w, self.x_k = mix(0.2), mix(0.9), mix(0.7)
        self.x_v, self.x_a, self.x_g = mix(0.7), mix(0.9), mix(0.2)

        def low_rank(rank: int) -> tuple[nn.Parameter, nn.Parameter]:
            up = torch.empty(rank, width)
            gain = 0.1 * (math.sqrt(rank / width) if rank > width else 1.0)
            nn.init.orthogonal_(up, gain)
            return nn.Parameter(torch.zeros(width, rank)), nn.Parameter(up)

        ramp = torch.arange(width) / max(width - 1, 1)
        self.w0 = nn.Parameter(-6 + 6 * ramp.pow(1 + depth**0.3) + 0.5 + 2.5 * zigzag)
        self.w1, self.w2 = low_rank(rwkv.decay_rank)
        self.a0 = nn.Parameter(-0.19 + 0.3 * zigzag + 0.4 * linear_ramp)
        self.a1, self.a2 = low_rank(rwkv.iclr_rank)
        if not self.first_layer:
            self.v0 = nn.Parameter(0.73 - 0.4 * linear_ramp)
            self.v1, self.v2 = low_rank(rwkv.value_rank)
        self.g1, self.g2 = low_rank(rwkv.gate_rank)
        self.k_k = nn.Parameter(0.71 - 0.1 * linear_ramp)
        self.k_a = nn.Parameter(torch.full((width,), 1.02))
        self.r_k = nn.Parameter(torch.full((self.heads, self.head_size), -0.04))
        scale = config.init_std_scale
        self.receptance = linear(width, width, 0.5 * scale)
        self.key = linear(width, width, 0.05 * scale)
        self.value = linear(width, width, 0.5 * scale)
        self.output = linear(width, width, 0.0)
        self.ln_x = nn.GroupNorm(self.heads, width, eps=GROUP_NORM_EPS)
        nn.init.constant_(self.ln_x.weight, ((1 + layer) / config.layers) ** 0.7)

    def forward(
        self,
        x: Tensor,
        v_first: Tensor | None,
        starts: Tensor | None,
        cu_seqlens: Tensor | None,
        state: TimeMixState | None,
    ) -> tuple[Tensor, Tensor, TimeMixState]:
        """x [B, T, D] (normed) -> output [B, T, D], the first time-mix block's values, the state."""
        batch, length, width = x.shape
        by_head = (batch, length, self.heads, self.head_size)
        shift = ops.token_shift(x, state.last_BD if state else None, starts) - x
        r = self.receptance(torch.addcmul(x, shift, self.x_r))
        k = self.key(torch.addcmul(x, shift, self.x_k))
        x_v = torch.addcmul(x, shift, self.x_v)
        v = self.value(x_v)
        decay = self.w0 + torch.tanh(torch.addcmul(x, shift, self.x_w) @ self.w1) @ self.w2
        log_w = -math.exp(-0.5) * torch.sigmoid(decay.float() if decay.dtype != torch.float64 else decay)
        a = torch.sigmoid(self.a0 + torch.addcmul(x, shift, self.x_a) @ self.a1 @ self.a2)
        gate = torch.sigmoid(torch.addcmul(x, shift, self.x_g) @ self.g1) @ self.g2
        if v_first is None:
            v_first = v
        elif not self.first_layer:
            v = torch.lerp(v, v_first, torch.sigmoid(self.v0 + x_v @ self.v1 @ self.v2).to(v.dtype))
        removal_key = functional.normalize((k * self.k_k).view(by_head), dim=-1, eps=1e-12)
        k = k * (1 + (a - 1) * self.k_a)
        r, k, v, a = (t.view(by_head) for t in (r, k, v, a))
        y, wkv = ops.wkv7(
            r,
            log_w.view(by_head),
            k,
            v,
            -removal_key,
            removal_key * a,
            state=state.wkv_BHVK if state else None,
            cu_seqlens=cu_seqlens,
            return_state=True,
        )
        assert wkv is not None
        y = self.ln_x(y.reshape(batch * length, width)).view(batch, length, width)
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v
        return self.output((y + bonus.view(batch, length, width)) * gate), v_first, TimeMixState(x[:, -1], wkv)
