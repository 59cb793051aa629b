"""What every mixer is: the half of a block that lets tokens see the ones before them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from cdrmix.model.context import Places
from cdrmix.model.fast_weights import Writes
from cdrmix.model.feed_forward.router import Routed


class Mixed(NamedTuple):
    """What a mixer gives: its output [B, T, D]; the first time-mix block's values [B, T, D], if there was one so far;
    what it carries to the next tokens, a NamedTuple of tensors, if wanted; the report of its router, if it has one."""

    y: Tensor
    v_first: Tensor | None
    state: Any = None
    routed: Routed | None = None


class Mixer(nn.Module, ABC):
    """A mixer is made from the configuration and its layer's number, and called by its block alone.

    part: what its parameters count as in a plan. attends: whether it reads the angles of the places.
    """

    part: ClassVar[str]
    attends: ClassVar[bool] = False

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        places: Places,
        v_first: Tensor | None,
        state: Any,
        return_state: bool,
        writes: Writes | None = None,
    ) -> Mixed:
        """x [B, T, D] (normed). state: what it gave for the tokens before these rows, or None. writes: what its
        projections go through, where it has plastic adapters."""

    def adapted(self, name: str, x: Tensor, writes: Writes | None) -> Tensor:
        """The projection `name`, with what its plastic adapter adds where it has one."""
        layer: nn.Linear = getattr(self, name)
        return layer(x) if writes is None else writes.project(name, layer, x)
