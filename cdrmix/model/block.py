"""A block of the stack: mixer and feed-forward, each after a norm and added to the residual stream.

A branch's output is added where the next norm reads the sum, in one operation. So the last output of a block is added
by the first norm of the next block, or by the model's final norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from cdrmix.config.schema_model import Model
from cdrmix.model.context import Context
from cdrmix.model.depth import DepthRouter, Gate, Gated
from cdrmix.model.fast_weights import FastWeightSpan, FastWeightUpdate, PlasticState
from cdrmix.model.feed_forward.moe import FEED_FORWARDS, MoeFeedForward
from cdrmix.model.feed_forward.router import Routed
from cdrmix.model.layers import AddNorm
from cdrmix.model.mixers import MIXERS
from cdrmix.model.mixers.base import Mixer
from cdrmix.model.skipping import mix_kept


class BlockCache(NamedTuple):
    """What one block carries from token to token: its mixer's cache; a channel-mix's last token; its plastic adapters'
    states, in the order of their names. None: empty so far, or not used.

    last_token_B: of the first block of a model with `model.bigrams`, the id plus 1 of the last token, int64; 0 before
    the first token.
    """

    mixer: Any = None
    feed_forward_BD: Tensor | None = None
    plastic: tuple[PlasticState, ...] | None = None
    last_token_B: Tensor | None = None


class BlockOutput(NamedTuple):
    """The result of one block.

    x: [B, T, D], the residual stream before its feed-forward. y: [B, T, D], the feed-forward's output, not yet added.
    v_first: [B, T, D], the values of the first RWKV-7 block so far. cache: if wanted; of context.token_by_token that
    after each token. routed: the routers' reports. correlation: the plastic adapters' own objective, summed over
    them, if there are any. gated: the reports of the branches that skip tokens.
    """

    x: Tensor
    y: Tensor
    v_first: Tensor | None
    cache: BlockCache | tuple[BlockCache, ...] | None
    routed: tuple[Routed, ...]
    correlation: Tensor | None
    gated: tuple[Gated, ...] = ()


class Block(nn.Module):
    """One layer: x <- x + mixer(norm(x)), then x <- x + feed_forward(norm(x)).

    mixer: its name. experts: makes the mixture of experts if the layer has one. With `model.depth` a branch may skip
    tokens: `depth_routers` has the router of each such branch.
    """

    def __init__(
        self, config: Model, layer: int, mixer: str, experts: Callable[[Model], MoeFeedForward] = MoeFeedForward
    ) -> None:
        super().__init__()
        self.config = config
        self.mixer_norm = AddNorm(config)
        self.mixer: Mixer = MIXERS[mixer](config, layer)
        self.feed_forward_norm = AddNorm(config)
        kind = config.feed_forwards[layer]
        self.feed_forward = experts(config) if kind == "moe" else FEED_FORWARDS[kind](config, layer)
        self.depth_routers = nn.ModuleDict()
        for branch in ("mixer", "feed_forward"):
            if config.depth is not None and config.skips(layer, branch):
                self.depth_routers[branch] = DepthRouter(config.d_model, config.depth.capacity)
        self.plastic: nn.ModuleDict | None = None  # adapters of the mixer's projections: LanguageModel sets them

    def forward(
        self, x: Tensor, y: Tensor | None, context: Context, span: FastWeightSpan, cache: BlockCache | None
    ) -> BlockOutput:
        """The residual stream x [B, T, D], and the previous block's y, which is not yet added to it (None: nothing)."""
        cache = BlockCache() if cache is None else cache
        update = None
        if self.plastic is not None:
            update = FastWeightUpdate(self.plastic, span, cache.plastic)
            context = context._replace(fast_weights=update)
        x, normed = self.mixer_norm(x, y)
        mixing = self._gate("mixer", normed, context)
        if mixing is None:
            mixed = self.mixer(normed, context, cache.mixer)
        else:
            mixed = mix_kept(self.mixer, self.config, normed, context, cache.mixer, mixing)
        x, normed = self.feed_forward_norm(x, mixed.y)
        feeding = self._gate("feed_forward", normed, context)
        if feeding is None:
            fed = self.feed_forward(normed, context, cache.feed_forward_BD)
        else:
            fed = self.feed_forward(normed, context, cache.feed_forward_BD, feeding)
        after: BlockCache | tuple[BlockCache, ...] | None = None
        if context.token_by_token:
            fed_caches = fed.cache_BD or (None,) * len(x)
            after = tuple(BlockCache(*caches) for caches in zip(mixed.cache, fed_caches, strict=True))
        elif context.keep_cache:
            after = BlockCache(mixed.cache, fed.cache_BD, None if update is None else update.state())
        routed = tuple(report for report in (mixed.routed, fed.routed) if report is not None)
        v_first = mixed.values if context.v_first is None else context.v_first
        correlation = None if update is None else update.correlation
        gated = tuple(gate.gated for gate in (mixing, feeding) if gate is not None)
        return BlockOutput(x, fed.y, v_first, after, routed, correlation, gated)

    def _gate(self, branch: str, normed: Tensor, context: Context) -> Gate | None:
        """Which tokens a branch computes, from its input [B, T, D]; None: all."""
        if branch not in self.depth_routers:
            return None
        router = self.depth_routers[branch]
        assert isinstance(router, DepthRouter)
        return router.gate(normed.flatten(0, 1), context)
