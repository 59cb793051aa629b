"""The schema of a run: every key a YAML may hold, its type, its range and its default.

Sections are frozen and refuse unknown keys. What concerns one key is said by its type; what
concerns several is checked in validators.py. A key without a default must be written, unless
the autosizers derive it from `model.size`, `model.d_model` or `model.attention.heads`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdrmix.config.schema_ablation import Ablation
from cdrmix.config.schema_data import Data
from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.config.section import (
    Below1,
    Between0And1,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
)

Size = Literal["1b", "4b", "40b", "200b"]


class Run(Section):
    """Where the run lives and what makes it repeatable."""

    name: Text = "run"
    seed: NonNegativeInt = 1
    root: Text = "experiments"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: NonNegativeInt = 0  # CPU threads a process; 0: chosen by the time of steps; never decides a bit


class Attention(Section):
    """Softmax attention blocks. heads and kv_heads give grouped-query attention."""

    heads: PositiveInt
    kv_heads: PositiveInt
    rope: bool = True
    rope_theta: PositiveFloat = 10000.0
    qk_norm: bool = False


class Rwkv(Section):
    """RWKV-7 time-mix blocks: heads of `head_size`, low-rank maps of the given ranks."""

    head_size: Literal[16, 32, 64, 128] = 64
    removal: Literal[1, 2] = 1  # factor of what a token removes; 2: eigenvalues down to -1, which track states
    decay_rank: PositiveInt
    iclr_rank: PositiveInt  # in-context learning rate, `a` in the paper
    value_rank: PositiveInt
    gate_rank: PositiveInt


class Mamba(Section):
    """Mamba-2 blocks: expand * d_model channels in heads of `head_dim`, each with a state of head_dim x d_state.

    The experts of routing_mamba blocks are as many, chosen and balanced as model.feed_forward says of its own.
    """

    d_state: Annotated[int, Field(ge=8, le=256)] = 128
    head_dim: Annotated[int, Field(ge=8, le=256)] = 64
    expand: PositiveInt = 2
    groups: PositiveInt = 1  # of heads that share their B and C, and their norm
    conv_width: Annotated[int, Field(ge=2, le=16)] = 4


class MixerLayers(Section):
    """Layers, counted from 0, whose mixer is another one than `schedule` gives them."""

    attention: list[NonNegativeInt] = []
    rwkv7: list[NonNegativeInt] = []
    mamba2: list[NonNegativeInt] = []
    routing_mamba: list[NonNegativeInt] = []


class FeedForward(Section):
    """The second half of a block: a mixture of experts, or RWKV-7's dense channel-mix."""

    kind: Literal["moe", "channel_mix"] = "moe"
    hidden: PositiveInt  # of one expert
    experts: PositiveInt = 8
    top_k: PositiveInt = 2
    activation: Literal["relu2", "swiglu"] = "relu2"
    capacity_factor: PositiveFloat = 1.25  # capacity of an expert over its even share: of overflow, and of `drop`
    drop: bool = False  # in training an expert takes no more rows of a micro-batch than its capacity; false: all
    load_balance_weight: NonNegativeFloat = 0.01
    z_loss_weight: NonNegativeFloat = 0.001
    bias_update_rate: NonNegativeFloat = 0.0  # a step of the selection bias that evens the load; 0: no bias
    router_jitter: Below1 = 0.0  # in training the router reads x times a random number within 1 -+ this


class Model(Section):
    """A stack of blocks: a mixer (attention, RWKV-7 or Mamba-2), then a feed-forward."""

    family: Literal["cdrmix"] = "cdrmix"
    size: Size | None = None
    vocab_size: PositiveInt = 50272
    d_model: PositiveInt
    layers: PositiveInt
    schedule: Literal["interleave-x", "top-of-x"] = "interleave-x"
    attention_fraction: Fraction = 0.25  # of the layers; the others are RWKV-7, but where mixer_layers says otherwise
    mixer_layers: MixerLayers = Field(default_factory=MixerLayers)
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: PositiveFloat = 1e-5
    embedding_norm: bool = True  # RWKV's ln0: a norm between embedding and first block
    tie_embeddings: bool = True
    init_std_scale: PositiveFloat = 1.0
    attention: Attention
    rwkv: Rwkv
    mamba: Mamba = Field(default_factory=Mamba)
    feed_forward: FeedForward

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixer of every layer, by name."""
        attention = attention_layers(self.layers, self.attention_fraction, self.schedule)
        kinds = ["attention" if layer in attention else "rwkv7" for layer in range(self.layers)]
        for kind, layers in self.mixer_layers:
            for layer in layers:
                kinds[layer] = kind
        return tuple(kinds)

    @property
    def routers(self) -> tuple[str, ...]:
        """The routers in the model's order, by layer: "3" is its feed-forward's, "3.mixer" its mixer's."""
        names = []
        for layer, mixer in enumerate(self.mixers):
            names += [f"{layer}.mixer"] if mixer == "routing_mamba" else []
            names += [f"{layer}"] if self.feed_forward.kind == "moe" else []
        return tuple(names)


def attention_layers(layers: int, fraction: float, schedule: str) -> frozenset[int]:
    """Which layers, counted from 0, a schedule makes attention: floor(fraction * layers) of them.

    top-of-x: the last ones. interleave-x: layer i where floor((i + 1) * fraction) steps up; at fraction 1/4,
    where (i + 1) mod 4 = 0, so that the last of every four is attention.
    """
    steps = [int((i + 1) * fraction + 1e-9) for i in range(-1, layers)]
    if schedule == "top-of-x":
        return frozenset(range(layers - steps[-1], layers))
    return frozenset(i for i in range(layers) if steps[i + 1] > steps[i])


class Profile(Section):
    """Steps that are traced, counted from where this process begins; written to profile/ in the run folder."""

    first: PositiveInt = 10
    steps: PositiveInt = 3


class Train(Section):
    """Stage A: next-token training."""

    steps: PositiveInt
    batch_rows: PositiveInt  # rows of one optimizer step, over all processes
    micro_batch_rows: PositiveInt  # rows of one forward pass of one process
    learning_rate: PositiveFloat
    final_learning_rate_ratio: Fraction = 0.1  # the cosine ends at this share of the peak
    warmup_steps: NonNegativeInt = 0
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    gradient_clip: PositiveFloat = 1.0
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    # Of the residual stream between blocks; null: bf16 with precision bf16, else fp32. Norms and sums are computed in
    # float32 either way.
    residual_dtype: Literal["fp32", "bf16"] | None = None
    # What processes share out: nothing, optimizer state (1), gradients too (2), weights too (3). Stages 0 and 1 reduce
    # gradients once a step, 2 and 3 once a micro-batch. auto: 0 in one process, 1 in several.
    zero_stage: Literal["auto", 0, 1, 2, 3] = 0
    # Of gradients while they are summed over processes. bf16 halves what is sent and rounds each term and partial sum.
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    # processes that share out the feed-forwards' experts; divides their number and the processes'
    expert_parallel: PositiveInt = 1
    activation_checkpointing: bool = False
    compile: bool = False  # torch.compile fuses a block's element-wise operations; other bits than without
    ema_decay: Between0And1 | None = None
    log_every: PositiveInt = 10
    evaluate_every: PositiveInt = 500
    evaluate_rows: PositiveInt = 64  # of the periodic validation; the final one reads all
    checkpoint_every: PositiveInt = 1000
    keep_last: PositiveInt = 2  # periodic checkpoints kept, besides the best
    profile: Profile | None = None


class Logging(Section):
    """Trackers beside the run folder; each needs its optional package."""

    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False


class Export(Section):
    """What of a run is exported. With train.ema_decay the running average of that checkpoint's weights."""

    # best: on held-out text, in stage A's validations, and the last after stage B; last; or a checkpoint's name or path
    checkpoint: Text = "best"


class Config(Section):
    """One run. `kind` is read off the structure: a `reasoning` section makes a reasoning run."""

    run: Run = Field(default_factory=Run)
    model: Model
    data: Data = Field(default_factory=Data)
    train: Train
    logging: Logging = Field(default_factory=Logging)
    export: Export = Field(default_factory=Export)
    reasoning: Reasoning | None = None
    ablation: Ablation | None = None

    @property
    def kind(self) -> Literal["core", "reasoning"]:
        return "core" if self.reasoning is None else "reasoning"
