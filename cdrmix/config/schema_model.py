"""The section `model` of a model of cdrmix: widths, mixers, feed-forwards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdrmix.config.autosizers import Size
from cdrmix.config.mixer_layers import layer_mixers
from cdrmix.config.schema_layers import Bigrams, Depth, FeedForward
from cdrmix.config.schema_prediction import Prediction
from cdrmix.config.section import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section, Text, Width


class Attention(Section):
    """Softmax attention layers, with grouped-query attention if kv_heads is below heads."""

    heads: PositiveInt
    """Number of query heads. Must divide model.d_model."""
    kv_heads: PositiveInt
    """Number of key and value heads. Fewer than heads: grouped-query attention."""
    rope: bool = True
    """Rotary position embedding."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary angles."""
    qk_norm: bool = False
    """Normalise queries and keys before their product."""


class Rwkv(Section):
    """RWKV-7 time-mix layers (arXiv 2503.14456)."""

    head_size: Literal[16, 32, 64, 128] = 64
    """Width of a head. Must divide model.d_model."""
    allow_neg_eigval: bool = False
    """Allow negative eigenvalues: those of a state transition are in [-1, 1] instead of [0, 1]. State tracking needs
    them."""
    decay_rank: Width
    """Rank of the low-rank map of the decay."""
    iclr_rank: Width
    """Rank of the low-rank map of the in-context learning rate (`a` in the paper)."""
    value_rank: Width
    """Rank of the low-rank map of the value residual."""
    gate_rank: Width
    """Rank of the low-rank map of the output gate."""


class Mamba(Section):
    """Mamba-2 layers (arXiv 2405.21060): expand * d_model channels in heads of head_dim; a state is head_dim x d_state.

    Routing-Mamba layers have as many experts as model.feed_forward, routed and balanced in the same way.
    """

    d_state: Annotated[int, Field(ge=8, le=256)] = 128
    """Width of the state of a channel."""
    head_dim: Annotated[int, Field(ge=8, le=256)] = 64
    """Channels of a head. Must divide expand * model.d_model."""
    expand: Annotated[int, Field(ge=1, le=64)] = 2
    """Inner width, as a multiple of model.d_model."""
    groups: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of groups of heads. The heads of a group share B, C and the norm."""
    conv_width: Annotated[int, Field(ge=2, le=16)] = 4
    """Width of the short causal convolution, in tokens."""


class Model(Section):
    """A stack of blocks. A block is a mixer (attention, RWKV-7 or Mamba-2) and a feed-forward."""

    kind: Literal["cdrmix"] = "cdrmix"
    """cdrmix: a model of this package."""
    family: Literal["cdrmix"] = "cdrmix"
    """Model family. There is one."""
    size: Size | None = None
    """Named size. It sets d_model, layers, heads, the width of the feed-forward and training keys that the file does
    not set. 1b, 4b, 40b, 200b: mixtures of experts, named by their active parameters. dense-: softmax attention, SwiGLU
    and RMSNorm as in Llama. hybrid-: the same with RWKV-7 in three of four layers."""
    vocab_size: Width = 50272
    """Number of token ids of the model. A tokenizer that is trained on the text gets this size."""
    d_model: Width
    """Width of the residual stream."""
    layers: Annotated[int, Field(ge=1, le=1024)]
    """Number of blocks."""
    schedule: Literal["interleave-x", "top-of-x"] = "interleave-x"
    """Position of the attention layers. interleave-x: evenly distributed. top-of-x: the last layers."""
    attention_fraction: Fraction = 0.25
    """Share of the layers that use attention. The others use RWKV-7, except where mixer_layers sets another mixer."""
    mixer_layers: dict[Text, list[NonNegativeInt]] = {}
    """Layers that use another mixer than `schedule` assigns to them: name of the mixer to its layers, counted from 0.
    Mixers: attention, rwkv7, mamba2, routing_mamba (Mamba-2 whose projections are experts of one router), and those of
    plugins."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Norm before the mixer and before the feed-forward."""
    norm_eps: PositiveFloat = 1e-5
    """Constant added to the variance in a norm."""
    embedding_norm: bool = True
    """Norm between the embedding and the first block (ln0 of RWKV)."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the output matrix too."""
    init_std_scale: PositiveFloat = 1.0
    """Factor on the standard deviation of the initial weights."""
    bigrams: Bigrams | None = None
    """A second embedding, of pairs of successive tokens. null: none."""
    attention: Attention
    rwkv: Rwkv
    mamba: Mamba = Field(default_factory=Mamba)
    feed_forward: FeedForward
    depth: Depth | None = None
    """Branches that skip tokens. null: every layer computes every token."""
    prediction: Prediction | None = None
    """Prediction of several tokens. null: of the next token alone."""

    @property
    def mixers(self) -> tuple[str, ...]:
        """The name of the mixer of each layer."""
        return layer_mixers(self.layers, self.attention_fraction, self.schedule, self.mixer_layers)

    @property
    def routers(self) -> tuple[str, ...]:
        """The names of the routers in model order: "3" in the feed-forward of layer 3, "3.mixer" in its mixer."""
        names = []
        for layer, (mixer, feed_forward) in enumerate(zip(self.mixers, self.feed_forwards, strict=True)):
            names += [f"{layer}.mixer"] if mixer == "routing_mamba" else []
            names += [f"{layer}"] if feed_forward == "moe" else []
        return tuple(names)

    @property
    def has_own_heads(self) -> bool:
        """Whether a head, of the next token or of a later one, has a table of its own beside the embedding."""
        return not self.tie_embeddings or (self.prediction is not None and self.prediction.kind == "heads")

    @property
    def feed_forwards(self) -> tuple[str, ...]:
        """The kind of the feed-forward of each layer."""
        return self.feed_forward.kinds(self.layers)

    def skips(self, layer: int, branch: Literal["mixer", "feed_forward"]) -> bool:
        """Whether a branch of a layer skips tokens. The mixer of the first RWKV-7 layer does not: later layers read its
        values of every token."""
        if self.depth is None or self.depth.part not in (branch, "both"):
            return False
        mixers = self.mixers
        return branch == "feed_forward" or mixers[layer] != "rwkv7" or "rwkv7" in mixers[:layer]

    @property
    def skipping(self) -> tuple[str, ...]:
        """The names of the branches that skip tokens, in model order: "3.mixer" and "3", as in `routers`."""
        names = []
        for layer in range(self.layers):
            names += [f"{layer}.mixer"] if self.skips(layer, "mixer") else []
            names += [f"{layer}"] if self.skips(layer, "feed_forward") else []
        return tuple(names)
