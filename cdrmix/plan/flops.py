"""Floating-point operations that training takes for one token, by part, from the configuration alone.

A multiplication with an addition counts two. Conventions, as published throughputs have them: a matrix of the forward
pass costs 2 operations an element and token, and its backward pass twice as many, so 6 N for N active parameters
(arXiv 2001.08361, section 2.1), and so of attention's two products; the recurrences are counted by their formulas.
Norms, activations, the optimizer and what a kernel computes beyond its formula (a chunked recurrence, a backward pass
that makes intermediate values again) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdrmix.config.schema import Config
from cdrmix.plan.parameters import count_parameters

PRODUCT = 3  # forward and backward pass of a product, over its forward pass

# Of one element of a head's state [V, K], a token. RWKV-7: decay 1, S a 2, its outer product with b 2, v k 2, reading
# S r 2; backward dS r^T, S^T dy, dS k, dS^T v, dS b, dS^T sa, dsa a^T, S^T dsa at 2 each, decay of dS and its gradient
# 3. Mamba-2: decay 1, v k 2, reading 2; backward dS 3, its products with v, k and dy 6, the decay's gradient 2.
RWKV7_FORWARD, RWKV7_BACKWARD = 9, 19
MAMBA2_FORWARD, MAMBA2_BACKWARD = 5, 11


@dataclass(frozen=True)
class TokenFlops:
    """Operations a token. active_parameters: those that multiply: experts count top_k of them, an embedding that is
    not the head too does not count.

    parameters: 6 a active parameter. attention: queries with keys and weights with values, over the causal half of a
    row as if it were one document; shorter documents take less. rwkv7, mamba2: the recurrences; mamba2's with its
    short convolution. recomputed: what activation checkpointing does a second time.
    """

    active_parameters: int
    parameters: int
    attention: int
    rwkv7: int
    mamba2: int
    recomputed: int

    @property
    def total(self) -> int:
        """Of the model's mathematics, forward and backward: what MFU counts. Nothing that is computed again."""
        return self.parameters + self.attention + self.rwkv7 + self.mamba2

    @property
    def executed(self) -> int:
        """With what activation checkpointing computes again: what the hardware does (HFU)."""
        return self.total + self.recomputed


def training_flops_per_token(config: Config) -> TokenFlops:
    """The operations of stage A's training, forward and backward, for a token of a row of data.row_length."""
    model = config.model
    count = count_parameters(model)
    head = model.vocab_size * model.d_model
    active = count.total_active - (0 if model.tie_embeddings else head)
    mixers = model.mixers
    # Of a token, averaged over a row: (T + 1) / 2 keys, for each 2 D operations of scores and 2 D of values.
    attention = mixers.count("attention") * 2 * model.d_model * (config.data.row_length + 1)
    states = mixers.count("rwkv7") * model.d_model * model.rwkv.head_size
    mamba = model.mamba
    inner, scans = mamba.expand * model.d_model, mixers.count("mamba2") + mixers.count("routing_mamba")
    scanned = scans * inner * mamba.d_state
    taps = scans * 2 * mamba.conv_width * (inner + 2 * mamba.groups * mamba.d_state)
    again = 2 * (active - head) + attention + RWKV7_FORWARD * states + MAMBA2_FORWARD * scanned + taps  # not the head
    return TokenFlops(
        active_parameters=active,
        parameters=2 * PRODUCT * active,
        attention=PRODUCT * attention,
        rwkv7=(RWKV7_FORWARD + RWKV7_BACKWARD) * states,
        mamba2=(MAMBA2_FORWARD + MAMBA2_BACKWARD) * scanned + PRODUCT * taps,
        recomputed=again if config.train.activation_checkpointing else 0,
    )
