"""A block of the stack: mixer and feed-forward, each behind a norm and added to the residual stream.

A branch's output is added where the next norm reads the sum, in one operation, so that a block's last output is added
by the norm of the next block, or by the model's final one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from cdrmix.config.schema import Model
from cdrmix.model.context import Places
from cdrmix.model.fast_weights import PlasticState, Writes
from cdrmix.model.feed_forward.moe import ChannelMix, MoeFeedForward
from cdrmix.model.feed_forward.router import Routed
from cdrmix.model.layers import AddNorm
from cdrmix.model.mixers import MIXERS
from cdrmix.model.mixers.base import Mixer


class BlockState(NamedTuple):
    """What one block carries from token to token: its mixer's state; a channel-mix's last token; its plastic adapters'
    states, in the order of their names. None: nothing yet, or never any."""

    mixer: Any
    feed_forward_BD: Tensor | None
    plastic: tuple[PlasticState, ...] | None = None


class Block(nn.Module):
    """One layer: x <- x + mixer(norm(x)), then x <- x + feed_forward(norm(x)).

    mixer: its name. experts: makes the mixture of experts, where the configuration has one.
    """

    def __init__(
        self, config: Model, layer: int, mixer: str, experts: Callable[[Model], MoeFeedForward] = MoeFeedForward
    ) -> None:
        super().__init__()
        self.mixer_norm = AddNorm(config)
        self.mixer: Mixer = MIXERS[mixer](config, layer)
        self.feed_forward_norm = AddNorm(config)
        self.feed_forward: MoeFeedForward | ChannelMix = (
            experts(config) if config.feed_forward.kind == "moe" else ChannelMix(config, layer)
        )
        self.plastic: nn.ModuleDict | None = None  # adapters of the mixer's projections: LanguageModel sets them

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        v_first: Tensor | None,
        places: Places,
        state: BlockState | None,
        return_state: bool,
        write_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, BlockState | None, tuple[Routed, ...], Tensor | None]:
        """The residual stream x [B, T, D] and what is to be added to it, the last block's y (None: nothing) -> the
        stream before this block's feed-forward and the output of that, still to be added; the first time-mix block's
        values, the state if wanted, the reports, the adapters' correlation objective (summed over them) where there are
        any. write_scale [S]: branches of writes."""
        writes = None
        if self.plastic is not None:
            writes = Writes(self.plastic, places, state.plastic if state else None, write_scale)
        x, normed = self.mixer_norm(x, y)
        y, v_first, carried, mixer_routed = self.mixer(
            normed, places, v_first, state.mixer if state else None, return_state, writes
        )
        x, normed = self.feed_forward_norm(x, y)
        last_BD = state.feed_forward_BD if state else None
        y, last_BD, routed = self.feed_forward(normed, places.starts_BT1, last_BD)
        after = None
        if return_state:
            after = BlockState(carried, last_BD, None if writes is None else writes.state())
        reports = tuple(report for report in (mixer_routed, routed) if report is not None)
        return x, y, v_first, after, reports, None if writes is None else writes.correlation
