"""A block of the stack: norm, mixer, norm, feed-forward, each added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from cdrmix.config.schema import Model
from cdrmix.model.experts import ChannelMix, MoeFeedForward
from cdrmix.model.layers import make_norm
from cdrmix.model.mixer import Mixer
from cdrmix.model.mixers import MIXERS
from cdrmix.model.places import Places
from cdrmix.model.router import Routed


class BlockState(NamedTuple):
    """What one block carries from token to token: its mixer's state; a mixture of experts carries nothing."""

    mixer: Any
    feed_forward_BD: Tensor | None


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + feed_forward(norm(x)).

    mixer: its name. experts: makes the mixture of experts, where the configuration has one.
    """

    def __init__(
        self, config: Model, layer: int, mixer: str, experts: Callable[[Model], MoeFeedForward] = MoeFeedForward
    ) -> None:
        super().__init__()
        self.mixer_norm = make_norm(config)
        self.mixer: Mixer = MIXERS[mixer](config, layer)
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
    ) -> tuple[Tensor, Tensor | None, BlockState | None, tuple[Routed, ...]]:
        """x [B, T, D] -> x after the block, the first time-mix block's values, the state if wanted, the reports."""
        y, v_first, carried, mixer_routed = self.mixer(
            self.mixer_norm(x), places, v_first, state.mixer if state else None, return_state
        )
        x = x + y
        last_BD = state.feed_forward_BD if state else None
        y, last_BD, routed = self.feed_forward(self.feed_forward_norm(x), places.starts_BT1, last_BD)
        after = BlockState(carried, last_BD) if return_state else None
        return x + y, v_first, after, tuple(report for report in (mixer_routed, routed) if report is not None)
