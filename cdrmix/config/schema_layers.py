"""The sections of a model about its feed-forwards and about the tokens that its layers compute."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cdrmix.config.section import (
    Below1,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    Width,
)


class FeedForward(Section):
    """The second half of a block: a mixture of experts, a dense feed-forward, or the channel-mix of RWKV-7."""

    kind: Text = "moe"
    """moe: mixture of experts. dense: the feed-forward of a dense transformer, without experts and router. channel_mix:
    the dense feed-forward of RWKV-7, with a token shift. Or a feed-forward of a plugin."""
    hidden: Width
    """Hidden width of one expert, of the dense feed-forward, or of the channel-mix."""
    experts: Annotated[int, Field(ge=1, le=65536)] = 8
    """Number of experts of a layer."""
    top_k: PositiveInt = 2
    """Number of experts that compute each token."""
    activation: Literal["relu2", "swiglu"] = "relu2"
    """Activation of the experts, or of the dense feed-forward, which has swiglu unless the key is set. swiglu: a gated
    activation with three matrices, silu(gate) * up. relu2: the square of a ReLU, with two matrices."""
    capacity_factor: PositiveFloat = 1.25
    """Capacity of an expert, as a multiple of its even share of the tokens. Used by `drop` and to report overflow."""
    drop: bool = False
    """In training, drop the tokens of a micro-batch that exceed the capacity of an expert. false: dropless."""
    load_balance_weight: NonNegativeFloat = 0.01
    """Weight of the load-balancing loss."""
    z_loss_weight: NonNegativeFloat = 0.001
    """Weight of the router z-loss."""
    bias_update_rate: NonNegativeFloat = 0.0
    """Step size of the selection bias that balances the experts without a loss. 0: no bias."""
    router_jitter: Below1 = 0.0
    """In training, the router input is multiplied by random numbers in [1 - router_jitter, 1 + router_jitter]."""
    dense_layers: list[NonNegativeInt] = []
    """Layers, counted from 0, that have a dense feed-forward of the same activation instead of the mixture of
    experts."""
    dense_hidden: Width | None = None
    """Hidden width of the dense feed-forward of dense_layers. null: top_k * hidden, as many as a token uses of the
    mixture."""
    shared_hidden: Width | None = None
    """Hidden width of a dense feed-forward whose output is added to that of every mixture, for all tokens (the shared
    expert of arXiv 2401.06066). null: none."""

    def kinds(self, layers: int) -> tuple[str, ...]:
        """The kind of the feed-forward of each of so many layers."""
        return tuple("dense" if layer in self.dense_layers else self.kind for layer in range(layers))

    @property
    def dense_width(self) -> int:
        """Hidden width of a dense feed-forward, of all layers or of dense_layers."""
        if self.kind == "dense":
            return self.hidden
        return self.top_k * self.hidden if self.dense_hidden is None else self.dense_hidden

    @model_validator(mode="before")
    @classmethod
    def _dense_is_gated(cls, data: Any) -> Any:
        """The default of activation is swiglu for a dense feed-forward."""
        return {"activation": "swiglu", **data} if isinstance(data, dict) and data.get("kind") == "dense" else data


class Bigrams(Section):
    """Vectors for pairs of successive tokens, which are added to the tokens' embeddings (over-encoding, arXiv
    2501.16975). Pairs are hashed to the rows of a table, and pairs that share a row share its vector."""

    rows: PositiveInt = 16_384
    """Rows of the table, of d_model parameters each. A token reads one row. More rows cost memory and
    time of the optimizer."""


class Depth(Section):
    """Mixture-of-Depths (arXiv 2404.02258) by a threshold for each token: branches of blocks that skip tokens.

    A branch f adds sigmoid(s) f(x) to the tokens with s + b > 0, with s = w . x / sqrt(d_model) in float32 and x the
    normed input of the branch. w is trained. b moves after each step, so that the share of the tokens that are kept is
    the capacity.
    """

    capacity: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of the tokens that a branch computes, as a mean over the batches. 1: all, with the factor sigmoid(s)."""
    part: Literal["feed_forward", "mixer", "both"] = "feed_forward"
    """Branches that skip tokens. For a mixer a skipped token is no token: it changes no state, it has no key and no
    position, and later tokens do not shift to it."""
    rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of the distance to the threshold of the last batch that b moves after each step."""
    release: Fraction = 0.05
    """Share of the steps over which the kept share falls from 1 to the capacity. Not for a run that starts from the
    weights of another (train.start_from)."""
