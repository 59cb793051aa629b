"""The schema of the section `model.prediction`: several tokens ahead, and drafts of speculative decoding."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdrmix.config.section import NonNegativeFloat, PositiveInt, Section, Text


class Prediction(Section):
    """Multi-token prediction: the model is also trained on the tokens after the next one.

    Depth 1 is the next token, depth i the i-th token from here. Depth 1 is what is evaluated, and its loss is computed
    as without this section. The other depths draft tokens for `cdrmix generate --speculative`, except with `shared`.
    """

    tokens: Annotated[int, Field(ge=2, le=16)] = 4
    """Number of depths, with the next token."""
    kind: Literal["shared", "maps", "heads", "chain", "sequential"] = "chain"
    """What predicts the depths after the first from the hidden state. shared: the output head itself, without
    parameters (it cannot draft). maps: a map D x D and a norm for each depth, before the output head. heads: an output
    head for each depth. chain: a feed-forward for each depth that also reads the token before the one it predicts, and
    the state of the depth before. sequential: a block for each depth that reads the same (DeepSeek-V3, arXiv
    2412.19437)."""
    weights: Annotated[list[NonNegativeFloat], Field(min_length=1)] | None = None
    """Weight of the loss of each depth. The first is 1. null: 0.3 in equal parts for the depths after the first."""
    curriculum: Literal["none", "forward", "reverse"] = "none"
    """Which depths have a weight at a step (arXiv 2505.22757). none: all. forward: a further depth with each of
    `tokens` equal parts of the training, from the next token alone. reverse: a depth less with each part, from all."""
    every: PositiveInt = 8
    """The depths after the first are trained at each N-th token of a micro-batch, at other tokens in the next step,
    with N times the weight. 1: at all tokens, which costs more time."""
    detach: bool = False
    """The depths after the first change only their own parameters. Then they draft and hardly affect the model: their
    gradients only count in the norm that train.gradient_clip limits."""
    mixer: Text = "attention"
    """Mixer of the blocks of kind sequential: attention, rwkv7 or mamba2. Their feed-forward is dense, with the width
    of the experts of a token."""

    @property
    def depth_weights(self) -> tuple[float, ...]:
        """The weights of the depths after the first."""
        further = self.tokens - 1
        return (0.3 / further,) * further if self.weights is None else tuple(self.weights[1:])
