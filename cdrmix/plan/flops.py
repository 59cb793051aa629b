"""Floating-point operations of training per token, by part, from the configuration only.

A multiplication and an addition count as two operations. The conventions are those of published throughputs. A matrix
costs 2 operations per element and token in the forward pass and twice as many in the backward pass, so N active
parameters cost 6 N (arXiv 2001.08361, section 2.1). The same holds for the two products of attention. The recurrences
are counted by their formulas, and so are the products of Muon. Not counted: norms, activations, other operations of
the optimizer, and operations of a kernel beyond its formula (a chunked recurrence, recomputation in a backward pass).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.plan.foreign import ForeignModelSize, foreign_size
from cdrmix.plan.optimizer import optimizer_size
from cdrmix.plan.parameters import count_parameters

PRODUCT = 3  # operations of forward and backward pass of a product, relative to the forward pass

# Operations per element of the state [V, K] of a head and token. RWKV-7: decay 1, S a 2, its outer product with b 2, v
# k 2, reading S r 2; backward dS r^T, S^T dy, dS k, dS^T v, dS b, dS^T sa, dsa a^T, S^T dsa at 2 each, decay of dS and
# its gradient 3. Mamba-2: decay 1, v k 2, reading 2; backward dS 3, its products with v, k and dy 6, the decay's
# gradient 2.
RWKV7_FORWARD, RWKV7_BACKWARD = 9, 19
MAMBA2_FORWARD, MAMBA2_BACKWARD = 5, 11


@dataclass(frozen=True)
class TokenFlops:
    """Operations per token.

    active_parameters: parameters that multiply: top_k of the experts, and no embedding that is not also the head.
    parameters: 6 per active parameter, 4 where it is frozen, and model.depth.capacity of that in branches that skip
    tokens, here as in the other parts. attention: queries with keys and weights with values, over
    the causal half of a row as one document; shorter documents need fewer. rwkv7, mamba2: the recurrences; mamba2 with
    its short convolution. recomputed: operations that activation checkpointing repeats. muon: those of one update of
    all matrices, divided by the tokens of a step. prediction: everything for the further depths of multi-token
    prediction, whose parameters are not among the active ones.
    """

    active_parameters: int
    parameters: int
    attention: int
    rwkv7: int
    mamba2: int
    recomputed: int
    muon: int = 0
    prediction: int = 0

    @property
    def total(self) -> int:
        """The operations of the model, forward and backward, without recomputation: for MFU."""
        return self.parameters + self.attention + self.rwkv7 + self.mamba2 + self.prediction

    @property
    def executed(self) -> int:
        """The operations with recomputation and Muon: for hardware FLOP utilisation (HFU)."""
        return self.total + self.recomputed + self.muon


def training_flops_per_token(config: Config) -> TokenFlops:
    """The operations of stage A, forward and backward, per token of a row of data.row_length tokens."""
    if not isinstance(config.model, Model):
        return _of_transformers(config, foreign_size(config))
    model = config.model
    count, train = count_parameters(model), config.train
    tokens = train.batch_sizes.before(train.steps) * config.data.row_length
    head = model.vocab_size * model.d_model
    looked_up = (0 if model.tie_embeddings else head) + (model.bigrams.rows * model.d_model if model.bigrams else 0)
    active = count.total_active - count.active["prediction"] - looked_up
    kept = [capacity(model) if model.skips(layer, "mixer") else 1.0 for layer in range(model.layers)]
    mixing, again = _mixing(model, model.mixers, kept, config.data.row_length)
    further, further_again = (0, 0) if model.prediction is None else _prediction(config, count.stored["prediction"])
    computed = active - round((1 - capacity(model)) * count.skipping)
    again += 2 * (computed - head) + further_again  # the head is not recomputed
    return TokenFlops(
        active_parameters=active,
        parameters=2 * PRODUCT * computed,
        **mixing,
        recomputed=again if train.activation_checkpointing else 0,
        muon=optimizer_size(config).operations * train.steps // tokens,
        prediction=further,
    )


def _mixing(model: Model, mixers: Sequence[str], kept: Sequence[float], row_length: int) -> tuple[dict[str, int], int]:
    """The operations of mixers without their parameters, by field of TokenFlops, and those of the forward pass.

    kept: the share of the tokens that each mixer computes.
    """
    attention = states = scanned = taps = 0
    mamba, inner = model.mamba, model.mamba.expand * model.d_model
    for mixer, share in zip(mixers, kept, strict=True):
        if mixer == "attention":
            # A kept token has (T + 1) / 2 keys on average over a row of T that are kept, with 2 D operations each for
            # scores and for values.
            attention += round(share * 2 * model.d_model * (share * row_length + 1))
        elif mixer == "rwkv7":
            states += round(share * model.d_model * model.rwkv.head_size)
        elif mixer in ("mamba2", "routing_mamba"):
            scanned += round(share * inner * mamba.d_state)
            taps += round(share * 2 * mamba.conv_width * (inner + 2 * mamba.groups * mamba.d_state))
    parts = {
        "attention": PRODUCT * attention,
        "rwkv7": (RWKV7_FORWARD + RWKV7_BACKWARD) * states,
        "mamba2": (MAMBA2_FORWARD + MAMBA2_BACKWARD) * scanned + PRODUCT * taps,
    }
    return parts, attention + RWKV7_FORWARD * states + MAMBA2_FORWARD * scanned + taps


def _prediction(config: Config, own: int) -> tuple[int, int]:
    """The operations of the further depths, and those that activation checkpointing repeats. own: their parameters.

    Their losses, and the depths themselves if they do not mix tokens, are computed at one token of `every`. With
    `detach` an output head has no gradient, or its input has none: 4 operations an element instead of 6.
    """
    model = config.cdrmix_model
    assert model.prediction is not None
    section, further = model.prediction, model.prediction.tokens - 1
    if section.kind == "shared":
        return 0, 0  # the head's product is that of the next token
    heads = further * model.vocab_size * model.d_model * (4 if section.detach else 2 * PRODUCT) // section.every
    if section.kind == "heads":
        return heads, 0
    if section.kind != "sequential":
        return heads + 2 * PRODUCT * own // section.every, 0
    mixing, again = _mixing(model, [section.mixer] * further, [1.0] * further, config.data.row_length)
    return heads + 2 * PRODUCT * own + sum(mixing.values()), 2 * own + again


def capacity(model: Model) -> float:
    """The share of the tokens that a skipping branch computes."""
    return 1.0 if model.depth is None else model.depth.capacity


def _of_transformers(config: Config, size: ForeignModelSize) -> TokenFlops:
    """As training_flops_per_token. A frozen weight has no gradient, so it costs 4 operations instead of 6."""
    head = size.stored["embedding"] if size.tied else size.stored["head"]
    active = size.total_active - (0 if size.tied else size.stored["embedding"])
    trained = active if size.trained == size.total_stored else size.trained
    attention = 2 * size.attention * (config.data.row_length + 1)
    again = 2 * (active - head) + attention + MAMBA2_FORWARD * size.states + size.taps
    return TokenFlops(
        active_parameters=active,
        parameters=4 * (active - trained) + 2 * PRODUCT * trained,
        attention=PRODUCT * attention,
        rwkv7=0,
        mamba2=(MAMBA2_FORWARD + MAMBA2_BACKWARD) * size.states + PRODUCT * size.taps,
        recomputed=again if config.train.activation_checkpointing else 0,
    )
