"""The feed-forward halves of a block: a mixture of experts, a dense feed-forward, and RWKV-7's channel-mix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdrmix import ops
from cdrmix.config.schema_model import Model
from cdrmix.model.context import Context
from cdrmix.model.depth import Gate
from cdrmix.model.feed_forward.router import Routed, Router
from cdrmix.model.initial_values import by_inputs, drawn, zeros
from cdrmix.model.layers import INTERLEAVED, consecutive, linear
from cdrmix.model.tensor_parallel import Cut, Divisible
from cdrmix.registry import Registry

EXPERT_PARAMETERS = ("w_up", "w_down")  # names of the parameters whose first dimension is experts


class FedForward(NamedTuple):
    """The result of a feed-forward: its output [B, T, D]; its cache, the last token's input [B, D], if it has one (of
    context.token_by_token that of each token); its router's report, if it has one."""

    y: Tensor
    cache_BD: Tensor | tuple[Tensor, ...] | None = None
    routed: Routed | None = None


FEED_FORWARDS = Registry[Callable[[Model, int], nn.Module]]("feed-forward")


@FEED_FORWARDS("moe")
class MoeFeedForward(Divisible):
    """Top-k of E experts for each token, each two matrices around relu^2 (or three around SwiGLU).

    shared: a dense feed-forward beside them; None without `shared_hidden`.
    """

    def __init__(self, config: Model, layer: int = 0) -> None:  # every layer has the same shape
        super().__init__()
        ffn = config.feed_forward
        self.activation = ffn.activation
        self.router = Router(config.d_model, ffn)
        widening = 2 if ffn.activation == "swiglu" else 1
        self.fused = {"w_up": INTERLEAVED} if ffn.activation == "swiglu" else {}
        draw = by_inputs(config.d_model, 0.5 * config.init_std_scale)
        self.w_up = drawn(draw, ffn.experts, config.d_model, widening * ffn.hidden)
        self.w_down = drawn(zeros, ffn.experts, ffn.hidden, config.d_model)
        self.shared = None if ffn.shared_hidden is None else dense_feed_forward(config, layer, ffn.shared_hidden)

    def cuts(self) -> Mapping[str, Cut]:
        """The hidden channels of every expert; those of SwiGLU are pairs of neighbours in w_up."""
        return {"w_up": Cut(2), "w_down": Cut(1)}

    def forward(self, x: Tensor, context: Context, cache_BD: Tensor | None, gate: Gate | None = None) -> FedForward:
        """x [B, T, D] (normed) -> output and router's report; it needs no cache, because tokens are independent.

        gate: which tokens are computed, and the factors of their outputs; None: all, with 1. A skipped token is routed
        to no expert, and its output is 0; so is filling.
        """
        flat_TD = x.reshape(-1, x.shape[-1])
        routing = self.router.route(flat_TD, context, gate)
        routed = Routed.of(routing)
        if gate is not None:
            weights_TK = routing.weights_TK * gate.weight_T.unsqueeze(1)
            routing = dataclasses.replace(routing, weights_TK=weights_TK)
        routing = dataclasses.replace(routing, weights_TK=self.copied(routing.weights_TK))
        y = self.summed(self.mix(self.copied(flat_TD), routing)).view(x.shape)
        if self.shared is not None:
            y = y + self.shared(x, context, None, gate).y
        return FedForward(y, None, routed)

    def mix(self, x_TD: Tensor, routing: ops.Routing) -> Tensor:
        """The routed experts' weighted sum for each token, [T, D]."""
        return ops.moe_experts(x_TD, self.w_up, self.w_down, routing, activation=self.activation)


class DenseFeedForward(Divisible):
    """The feed-forward of a dense transformer, without a router: W_down (silu(W_gate x) * (W_up x)).

    This is SwiGLU (arXiv 2002.05202, equation 6) without biases; with `activation: relu2` it is W_down relu(W_up x)^2
    (arXiv 2109.08668). gate_up: the projection [2F, D], whose first F rows are W_gate and whose last F rows are W_up,
    as one product; of relu2 there is `up`, [F, D], instead. down: [D, F].
    """

    def __init__(self, config: Model, hidden: int) -> None:
        super().__init__()
        width, scale = config.d_model, 0.5 * config.init_std_scale
        self.hidden = hidden
        gated = config.feed_forward.activation == "swiglu"
        self.gate_up = linear(width, 2 * hidden, scale) if gated else None
        self.fused = {"gate_up.weight": consecutive(-2, hidden, hidden)} if gated else {}
        self.up = None if gated else linear(width, hidden, scale)
        self.down = linear(hidden, width, 0.0)

    def cuts(self) -> Mapping[str, Cut]:
        """The hidden channels."""
        gated = {"gate_up.weight": Cut(0, (self.hidden, self.hidden))}
        return (gated if self.gate_up is not None else {"up.weight": Cut(0)}) | {"down.weight": Cut(1)}

    def narrow(self, size: int) -> None:
        self.hidden //= size

    def forward(self, x: Tensor, context: Context, cache_BD: Tensor | None, gate: Gate | None = None) -> FedForward:
        """x [B, T, D] (normed) -> output; it needs no cache, because tokens are independent, and has no report. It
        computes every token: `gate` must be None."""
        assert gate is None, "SkippingFeedForward skips tokens"
        x = self.copied(x)
        if self.gate_up is not None:
            gating, up = self.gate_up(x).chunk(2, -1)
            hidden = functional.silu(gating) * up
        else:
            assert self.up is not None
            hidden = self.up(x).relu().square()
        return FedForward(self.summed(self.down(hidden)))


class SkippingFeedForward(Divisible):
    """A dense feed-forward that skips tokens: the single expert of a mixture, which computes the tokens kept.

    So a GPU computes no more rows than are kept, and the host need not wait for their number. w_up: [1, D, F], for
    SwiGLU [1, D, 2F], interleaved as in `ops.moe_experts`. w_down: [1, F, D].
    """

    def __init__(self, config: Model, hidden: int) -> None:
        super().__init__()
        self.activation = config.feed_forward.activation
        widening = 2 if self.activation == "swiglu" else 1
        self.fused = {"w_up": INTERLEAVED} if self.activation == "swiglu" else {}
        draw = by_inputs(config.d_model, 0.5 * config.init_std_scale)
        self.w_up = drawn(draw, 1, config.d_model, widening * hidden)
        self.w_down = drawn(zeros, 1, hidden, config.d_model)

    def cuts(self) -> Mapping[str, Cut]:
        """The hidden channels, as of the mixture."""
        return {"w_up": Cut(2), "w_down": Cut(1)}

    def forward(self, x: Tensor, context: Context, cache_BD: Tensor | None, gate: Gate) -> FedForward:
        """x [B, T, D] (normed) -> output, 0 for skipped tokens; no cache and no report."""
        kept = gate.keep_T.sum().unsqueeze(0)
        nothing = gate.weight_T.new_zeros(())
        routing = ops.Routing(
            weights_TK=self.copied(gate.weight_T.unsqueeze(1)),
            experts_TK=torch.zeros_like(gate.keep_T, dtype=torch.int64).unsqueeze(1),
            counts_E=kept,
            tokens_per_expert_E=kept,
            order_R=(~gate.keep_T).byte().argsort(stable=True),
            load_balance=nothing,
            z_loss=nothing,
        )
        flat_TD = self.copied(x.reshape(-1, x.shape[-1]))
        y_TD = ops.moe_experts(flat_TD, self.w_up, self.w_down, routing, activation=self.activation)
        return FedForward(self.summed(y_TD).view(x.shape))


@FEED_FORWARDS("dense")
def dense_feed_forward(config: Model, layer: int, hidden: int | None = None) -> DenseFeedForward | SkippingFeedForward:
    """The dense feed-forward of a layer, which skips tokens where the layer's feed-forward does.

    hidden: its width; None: model.feed_forward.dense_width.
    """
    kind = SkippingFeedForward if config.skips(layer, "feed_forward") else DenseFeedForward
    return kind(config, config.feed_forward.dense_width if hidden is None else hidden)


@FEED_FORWARDS("channel_mix")
class ChannelMix(Divisible):
    """RWKV-7's own feed-forward: token shift, then relu(x_k W_key)^2 W_value."""

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        channel = torch.arange(config.d_model) / config.d_model
        self.x_k = nn.Parameter(1 - channel.pow((1 - layer / config.layers) ** 4))
        self.key = linear(config.d_model, config.feed_forward.hidden, 0.5 * config.init_std_scale)
        self.value = linear(config.feed_forward.hidden, config.d_model, 0.0)

    def cuts(self) -> Mapping[str, Cut]:
        """The hidden channels."""
        return {"key.weight": Cut(0), "value.weight": Cut(1)}

    def forward(self, x: Tensor, context: Context, cache_BD: Tensor | None) -> FedForward:
        """x [B, T, D] (normed) -> output and cache; no router report."""
        x = self.copied(x)
        shift = ops.token_shift(x, context.last_before(cache_BD, x), context.starts_BT1) - x
        hidden = self.key(torch.addcmul(x, shift, self.copied(self.x_k))).relu().square()
        y = self.summed(self.value(hidden))
        if context.token_by_token:
            return FedForward(y, x.squeeze(1).split(1))
        return FedForward(y, context.last(x) if context.keep_cache else None)
