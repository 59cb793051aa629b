"""A block of the stack: norm, mixer, norm, feed-forward, each added to the residual stream."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdrmix.config.schema import Model
from cdrmix.model.attention import Attention, AttentionState
from cdrmix.model.experts import ChannelMix, MoeFeedForward, Routed
from cdrmix.model.layers import make_norm
from cdrmix.model.time_mix import TimeMix, TimeMixState


class BlockState(NamedTuple):
    """What one block carries from token to token."""

    mixer: AttentionState | TimeMixState
    feed_forward_BD: Tensor


class Places(NamedTuple):
    """Where the tokens of a batch stand; made once for all blocks.

    positions_BT: int64, counted from the document's start. starts_BT1: bool, documents' starts inside rows;
    mask: bool [B, 1, T, T], True where a query may see a key; both None with one document a row.
    """

    positions_BT: Tensor
    starts_BT1: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None


def place_tokens(batch: int, length: int, cu_seqlens: Tensor | None, past: int, device: torch.device) -> Places:
    """Positions, document starts and attention mask of a batch; `past` tokens came before its rows."""
    time = torch.arange(length, device=device).expand(batch, -1)
    if cu_seqlens is None:
        return Places(time + past, None, None, None)
    starts = torch.zeros(batch * length + 1, dtype=torch.bool, device=device)
    starts[cu_seqlens.long()] = True
    starts = starts[:-1].view(batch, length)
    positions = time - torch.where(starts, time, 0).cummax(1).values
    document = starts.cumsum(1)
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    return Places(positions, starts.unsqueeze(-1), same.tril().unsqueeze(1), cu_seqlens)


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + feed_forward(norm(x)). `mixer` is "attention" or "rwkv7"."""

    def __init__(self, config: Model, layer: int, mixer: str) -> None:
        super().__init__()
        self.mixer_norm = make_norm(config)
        self.mixer: Attention | TimeMix = Attention(config, layer) if mixer == "attention" else TimeMix(config, layer)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward: MoeFeedForward | ChannelMix = (
            MoeFeedForward(config) if config.feed_forward.kind == "moe" else ChannelMix(config, layer)
        )

    def forward(
        self, x: Tensor, v_first: Tensor | None, places: Places, state: BlockState | None
    ) -> tuple[Tensor, Tensor | None, BlockState, Routed | None]:
        """x [B, T, D] -> x after the block, the first time-mix block's values, the state, the router's report."""
        normed = self.mixer_norm(x)
        carried = state.mixer if state else None
        mixed: AttentionState | TimeMixState
        if isinstance(self.mixer, Attention):
            assert carried is None or isinstance(carried, AttentionState)
            y, mixed = self.mixer(normed, places.positions_BT, places.mask, carried)
        else:
            assert carried is None or isinstance(carried, TimeMixState)
            y, v_first, mixed = self.mixer(normed, v_first, places.starts_BT1, places.cu_seqlens, carried)
        x = x + y
        last_BD = state.feed_forward_BD if state else None
        y, last_BD, routed = self.feed_forward(self.feed_forward_norm(x), places.starts_BT1, last_BD)
        return x + y, v_first, BlockState(mixed, last_BD), routed
