"""The interface of every mixer: the half of a block in which a token depends on earlier ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from cdrmix.config.schema_model import Model
from cdrmix.model.context import Context
from cdrmix.model.feed_forward.router import Routed
from cdrmix.model.tensor_parallel import Divisible
from cdrmix.registry import Registry


class Mixed(NamedTuple):
    """The result of a mixer: its output [B, T, D]; its cache after the last token, a NamedTuple of tensors, if wanted
    (of context.token_by_token a tuple of those after each token); its router's report, if it has one; of an RWKV-7
    block its values [B, T, D], which later ones mix into theirs."""

    y: Tensor
    cache: Any = None
    routed: Routed | None = None
    values: Tensor | None = None


class Mixer(Divisible, ABC):
    """A mixer is made from the configuration and its layer's number, and called only by its block.

    part: the name under which a plan counts its parameters. attends: whether it reads the angles of the context.
    """

    part: ClassVar[str]
    attends: ClassVar[bool] = False

    @abstractmethod
    def forward(self, x: Tensor, context: Context, cache: Any) -> Mixed:
        """x [B, T, D] (normed). cache: the mixer's cache after the tokens before these rows, or None."""

    def projected(self, name: str, x: Tensor, context: Context) -> Tensor:
        """The projection `name` of x, with the block's fast weights where it has some."""
        layer: nn.Linear = getattr(self, name)
        return layer(x) if context.fast_weights is None else context.fast_weights.project(name, layer, x)


MIXERS = Registry[Callable[[Model, int], Mixer]]("mixer")
