"""Causal softmax attention with rotary positions and grouped queries, closed at document borders."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdrmix.config.schema import Model
from cdrmix.model.layers import linear
from cdrmix.model.mixer import Mixed, Mixer
from cdrmix.model.places import Angles, Places
from cdrmix.model.plastic import Writes


class AttentionState(NamedTuple):
    """Keys and values of the tokens so far, [B, kv_heads, T, head width], rotated."""

    keys: Tensor
    values: Tensor


def rotate(x_BHTN: Tensor, angles: Angles) -> Tensor:
    """x with each pair (i, i + N/2) turned by its token's angle."""
    cosine, sine = angles.cosine.to(x_BHTN.dtype), angles.sine.to(x_BHTN.dtype)
    left, right = x_BHTN.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)


class Attention(Mixer):
    """Multi-head attention, `kv_heads` key/value heads serving `heads` query heads."""

    part = "attention"
    attends = True

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        attention, width = config.attention, config.d_model
        self.heads, self.kv_heads, self.head_width = attention.heads, attention.kv_heads, width // attention.heads
        scale = config.init_std_scale
        self.query = linear(width, width, 0.5 * scale)
        self.key = linear(width, self.kv_heads * self.head_width, 0.5 * scale)
        self.value = linear(width, self.kv_heads * self.head_width, 0.5 * scale)
        self.output = linear(width, width, 0.0)
        self.query_norm = nn.RMSNorm(self.head_width, eps=config.norm_eps) if attention.qk_norm else None
        self.key_norm = nn.RMSNorm(self.head_width, eps=config.norm_eps) if attention.qk_norm else None

    def forward(
        self,
        x: Tensor,
        places: Places,
        v_first: Tensor | None,
        state: AttentionState | None,
        return_state: bool = True,
        writes: Writes | None = None,
    ) -> Mixed:
        """x [B, T, D] (normed) -> its output, and the state after the last token."""
        mask = places.mask
        batch, length, width = x.shape
        q = self.adapted("query", x, writes).view(batch, length, self.heads, self.head_width).transpose(1, 2)
        k = self.adapted("key", x, writes).view(batch, length, self.kv_heads, self.head_width).transpose(1, 2)
        v = self.adapted("value", x, writes).view(batch, length, self.kv_heads, self.head_width).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if places.angles is not None:
            q, k = rotate(q, places.angles), rotate(k, places.angles)
        past = 0
        if state is not None:
            past = state.keys.shape[2]
            k, v = torch.cat([state.keys, k], 2), torch.cat([state.values, v], 2)
        if past and length > 1:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(past)
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and past == 0, enable_gqa=self.heads != self.kv_heads
        )
        y = self.adapted("output", y.transpose(1, 2).reshape(batch, length, width), writes)
        return Mixed(y, v_first, AttentionState(k, v) if return_state else None)
