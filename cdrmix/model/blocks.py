"""A block of the stack: norm, mixer, norm, feed-forward, each added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdrmix import ops
from cdrmix.config.schema import Model
from cdrmix.model.attention import Angles, Attention, AttentionState, rotary_angles
from cdrmix.model.experts import ChannelMix, MoeFeedForward, Routed
from cdrmix.model.layers import make_norm
from cdrmix.model.time_mix import TimeMix, TimeMixState


class BlockState(NamedTuple):
    """What one block carries from token to token; a mixture of experts carries nothing."""

    mixer: AttentionState | TimeMixState
    feed_forward_BD: Tensor | None


class Places(NamedTuple):
    """Where the tokens of a batch stand; made once for all blocks.

    cu_seqlens: as given to the model. starts_BT1: bool, where documents start inside rows (not at their first
    token). angles: rotary angles of the positions, counted from the document's start. mask: bool [B, 1, T, T],
    True where a query may see a key. None: one document a row, or no block that would read it.
    """

    cu_seqlens: Tensor | None
    starts_BT1: Tensor | None
    angles: Angles | None
    mask: Tensor | None


def place_tokens(
    config: Model, batch: int, length: int, cu_seqlens: Tensor | None, past: int, device: torch.device, *, attends: bool
) -> Places:
    """The places of a batch; `past` tokens came before its rows; `attends`: some block is attention."""
    time = torch.arange(length, device=device).expand(batch, -1)
    starts, document = None, None
    if cu_seqlens is not None:
        starts = ops.document_starts(cu_seqlens, batch, length)
        document = starts.cumsum(1)
    angles = mask = None
    if attends and config.attention.rope:
        first = 0 if starts is None else torch.where(starts, time, 0).cummax(1).values
        head_width = config.d_model // config.attention.heads
        angles = rotary_angles(time + past - first, head_width, config.attention.rope_theta)
    if attends and document is not None:
        mask = (document.unsqueeze(-1) == document.unsqueeze(-2)).tril().unsqueeze(1)
    return Places(cu_seqlens, None if starts is None else starts.unsqueeze(-1), angles, mask)


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + feed_forward(norm(x)). `mixer` is "attention" or "rwkv7".

    experts: makes the mixture of experts, where the configuration has one.
    """

    def __init__(
        self, config: Model, layer: int, mixer: str, experts: Callable[[Model], MoeFeedForward] = MoeFeedForward
    ) -> None:
        super().__init__()
        self.mixer_norm = make_norm(config)
        self.mixer: Attention | TimeMix = Attention(config) if mixer == "attention" else TimeMix(config, layer)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward: MoeFeedForward | ChannelMix = (
            experts(config) if config.feed_forward.kind == "moe" else ChannelMix(config, layer)
        )

    def forward(
        self,
        x: Tensor,
        v_first: Tensor | None,
        places: Places,
        state: BlockState | None,
        return_state: bool,
    ) -> tuple[Tensor, Tensor | None, BlockState | None, Routed | None]:
        """x [B, T, D] -> x after the block, the first time-mix block's values, the state if wanted, the report."""
        normed = self.mixer_norm(x)
        carried = state.mixer if state else None
        mixed: AttentionState | TimeMixState | None
        if isinstance(self.mixer, Attention):
            assert carried is None or isinstance(carried, AttentionState)
            y, mixed = self.mixer(normed, places.angles, places.mask, carried)
        else:
            assert carried is None or isinstance(carried, TimeMixState)
            y, v_first, mixed = self.mixer(normed, v_first, places.starts_BT1, places.cu_seqlens, carried, return_state)
        x = x + y
        last_BD = state.feed_forward_BD if state else None
        y, last_BD, routed = self.feed_forward(self.feed_forward_norm(x), places.starts_BT1, last_BD)
        after = BlockState(mixed, last_BD) if return_state and mixed is not None else None
        return x + y, v_first, after, routed
