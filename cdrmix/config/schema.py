"""The schema of a run: every key of a configuration, with its type, range, default and description.

Sections are frozen and refuse unknown keys. The type of a key checks that key; validators*.py check combinations of
keys. A key without a default must be set, unless the autosizers derive it from `model.size`, `model.d_model` or
`model.attention.heads`, or a rule from `train.hyperparameters` and `train.tokens_per_parameter`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr

from cdrmix.config.autosizers import Size
from cdrmix.config.batch_sizes import BatchSizes
from cdrmix.config.check import Problem, config_error
from cdrmix.config.hashing import MEMORY, NOT_HASHED
from cdrmix.config.loader import dump_yaml, load_yaml
from cdrmix.config.mixer_layers import layer_mixers
from cdrmix.config.nodes import Location, Node, found, location_of
from cdrmix.config.schema_ablation import Ablation
from cdrmix.config.schema_data import Data
from cdrmix.config.schema_evaluation import Evaluation
from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.config.schema_layers import Bigrams, Depth, FeedForward
from cdrmix.config.schema_optimizer import AnOptimizer, ASchedule, Optimizer, ParameterGroup, Schedule
from cdrmix.config.schema_prediction import Prediction
from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.config.schema_training import BatchWarmup, LossScale, Profile, Skip
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
    Width,
)
from cdrmix.errors import ConfigError
from cdrmix.json_text import parse_json


class Run(Section):
    """Name, seed, folder and device of the run."""

    name: Text = "run"
    """Name of the run in the report, the model card and the trackers."""
    seed: NonNegativeInt = 1
    """Seed of everything random: initial weights, order of the rows, router jitter."""
    root: Text = "experiments"
    """Folder in which run folders are created."""
    mirror: Text | None = None
    """Folder on another disk or a mounted drive that receives a copy of each checkpoint, and of what is needed to
    resume from it. It is made if its parent exists. null: no mirror."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of this run. auto: a GPU if PyTorch can use one, otherwise the CPU."""
    threads: NonNegativeInt = 0
    """CPU threads of a process. 0: the run measures its own steps and selects the fastest number; models of
    transformers take all cores. With float32 it changes no bit of a model of cdrmix."""


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


class Dpo(Section):
    """Direct preference optimisation (arXiv 2305.18290), equation 7: the loss of pairs of answers.

    The reference is the model that the training starts from.
    """

    beta: PositiveFloat = 0.1
    """Factor on the log-probability ratios. Higher: the model stays closer to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs whose answers are exchanged (conservative DPO)."""


class Train(Section):
    """Stage A: training on next-token prediction."""

    steps: PositiveInt
    """Number of optimizer steps of stage A."""
    batch_rows: PositiveInt
    """Rows of one optimizer step (global batch), over all processes."""
    micro_batch_rows: PositiveInt
    """Rows of one forward pass of one process. Must divide batch_rows."""
    micro_batch_parts: PositiveInt = 1
    """By what micro_batch_rows was divided since the run began, because memory ran out. So 2 rows in 2 parts continue a
    run that began with 4 rows. `--max-restarts` sets both. The balancing losses are then means over the parts."""
    learning_rate: PositiveFloat
    """Peak learning rate."""
    hyperparameters: Literal["none", "step-law", "svend"] = "none"
    """Rule for learning_rate, batch_rows, warmup_steps, final_learning_rate_ratio and betas, where the file does not
    set them. step-law: StepLaw (arXiv 2503.04715), from the parameters without embeddings and the tokens. svend: the
    table of the specification, whose betas are the default; it sets micro_batch_rows too."""
    tokens_per_parameter: PositiveFloat | None = None
    """Tokens of stage A for each active parameter. It sets steps, if the file does not. 20: compute-optimal (arXiv
    2203.15556). null: steps and batch_rows give the number of tokens."""
    final_learning_rate_ratio: Fraction = 0.1
    """Learning rate at the end of the schedule's decay, as a share of the peak."""
    schedule: ASchedule = Field(default_factory=Schedule)
    """Learning rate after the warmup, as a share of the peak: a section, or its kind."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warmup. Must be below steps."""
    batch_warmup: BatchWarmup | None = None
    """Fewer rows in the first steps. null: every step has batch_rows rows."""
    optimizer: AnOptimizer = Field(default_factory=Optimizer)
    """Optimizer of stage A and of the phases of stage B: a section, or its kind."""
    groups: dict[Text, ParameterGroup] = {}
    """Learning rate, weight decay and schedule by kind of parameter: embedding (with the tied head), head, projection,
    expert, low_rank, router, convolution, decay_bias, vector. matrix means projection and expert; vector also means
    low_rank, router and convolution, where they are not named."""
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    """AdamW: decay rates of the two moments."""
    epsilon: PositiveFloat = 1e-8
    """AdamW: constant added to the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW: decoupled weight decay."""
    decay_bias_multiplier: PositiveFloat = 2.0
    """Learning-rate multiplier of the decay bias w0 of RWKV-7, as published."""
    gradient_clip: PositiveFloat = 1.0
    """Largest global norm of the gradient; a larger gradient is scaled down."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Data type of matrix products. The weights that are trained stay float32."""
    loss_scale: LossScale = Field(default_factory=LossScale)
    """Loss scale of precision fp16."""
    skip: Skip = Field(default_factory=Skip)
    """Steps that are skipped, instead of ending the training."""
    residual_dtype: Literal["fp32", "bf16"] | None = None
    """Data type of the residual stream between blocks. null: bf16 with precision bf16, otherwise fp32. Norms and sums
    are always computed in float32."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = 0
    """ZeRO: what processes shard. 0: nothing. 1: optimizer state. 2: gradients too. 3: weights too. auto: 0 for one
    process, 1 for several; with `weights: bf16` 2 and 1; with `offload` 2, or 3 for all. Stages 0 and 1 reduce
    gradients once a step, 2 and 3 once a micro-batch."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Data type of the weights that the products read. bf16: half the memory; ZeRO keeps the float32 weights that are
    trained and saved. For models of transformers, with precision bf16 and a ZeRO stage."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What is in main memory instead of GPU memory. optimizer: the optimizer's state, the float32 weights of ZeRO and
    their gradients (ZeRO stages 2 and 3). all: the weights too (ZeRO stage 3)."""
    offload_folder: Text | None = None
    """Folder on a fast local disk for what `offload` moves, except weights, in memory-mapped files. null: main
    memory."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of gradients while they are summed over processes. bf16 halves the communication and rounds each
    partial sum."""
    expert_parallel: PositiveInt = 1
    """Number of neighbouring processes that shard the experts of every layer. Must divide the number of experts and of
    processes."""
    sequence_parallel: PositiveInt = 1
    """Number of neighbouring processes that share the tokens of each row, for rows too long for one. Must divide the
    number of processes, `data.row_length` and the number of attention heads."""
    tensor_parallel: PositiveInt = 1
    """Number of neighbouring processes that divide the heads, channels and ids of every layer, for models too large for
    one GPU. They should be GPUs of one machine: each layer sums its output over them. Must divide the number of
    processes, the heads, key/value heads and groups of heads of every mixer, the widths of feed-forwards, the
    vocabulary and the rows of bigrams."""
    pipeline_parallel: PositiveInt = 1
    """Number of groups of processes that each have a range of the blocks, for models too large for the GPUs of one
    machine. Must divide the number of processes, and be at most the number of layers. Micro-batches pass through them
    one after another, so a step should have several times as many."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Use torch.compile to fuse element-wise operations of a block. Results differ in rounding from those without."""
    hang_timeout: NonNegativeFloat | None = 0.0
    """Seconds after which a step that has not ended is a hang: the process writes its stacks and ends with exit code
    16. 0: 20 times the median step, at least 600, in processes that a launcher has started. null: never."""
    async_checkpoints: Literal["auto", True, False] = "auto"
    """Write checkpoints in threads beside the training, which waits only while its state is copied. Main memory is
    needed for the copy. auto: on a GPU."""
    digests: bool = False
    """Write the digests of the weights and of the optimizer's state after each step to digests.jsonl. Of two runs that
    have them, `cdrmix compare` names the first step and tensor that differ."""
    ema_decay: Between0And1 | None = None
    """Decay rate of a running average of the weights. The average is then what the validations measure, of which the
    best is marked, and what is evaluated at the end and exported. null: no average."""
    log_every: PositiveInt = 10
    """Steps between two lines of metrics.jsonl."""
    evaluate_every: PositiveInt = 500
    """Steps between two validations."""
    evaluate_rows: PositiveInt = 64
    """Held-out rows of a validation. The final evaluation uses all of them."""
    checkpoint_every: PositiveInt = 1000
    """Steps between two checkpoints."""
    keep_last: PositiveInt = 2
    """Number of periodic checkpoints to keep. The best checkpoint is kept in addition."""
    keep_every: PositiveInt | None = None
    """Keep the checkpoint of each N-th step for good, in addition; it is written too if `checkpoint_every` does not
    divide N. null: none."""
    best_metric: Text | None = None
    """Held-out figure that chooses the best checkpoint: bits_per_byte, loss, or that of a domain, bits_per_byte/NAME;
    with `dpo` loss, accuracy, margin, chosen_reward or rejected_reward. null: bits_per_byte; with `dpo` no checkpoint
    is the best."""
    best_mode: Literal["min", "max"] | None = None
    """Whether the lowest or the highest value of best_metric is the best. null: max for accuracy, margin and rewards,
    otherwise min."""
    profile: Profile | None = None
    """Trace some steps to profile/ in the run folder. null: no trace."""
    start_from: Text | None = None
    """Run, checkpoint or export folder with the weights that the training starts from, or a file of public RWKV-7
    weights (.pth or .safetensors). null: random weights, or those of model.path."""
    start_made_by: Text | None = None
    """A configuration file that makes the model of `start_from`. If that folder does not exist, it is run first, and
    its export is copied to the folder."""
    dpo: Dpo | None = None
    """Train on preferences instead of next tokens. The sources are then of kind preferences. null: next tokens."""

    @property
    def batch_sizes(self) -> BatchSizes:
        """The rows of each step."""
        return BatchSizes.of(self.batch_rows, self.batch_warmup)

    @property
    def parts(self) -> int:
        """The number of processes that a model is divided among, each weight being in one of them."""
        return self.tensor_parallel * self.pipeline_parallel


class Logging(Section):
    """Experiment trackers, in addition to the run folder. Each needs an optional package."""

    tensorboard: bool = False
    """Log to TensorBoard."""
    wandb: bool = False
    """Log to Weights & Biases."""
    mlflow: bool = False
    """Log to MLflow."""


class Export(Section):
    """The checkpoint of a run that is exported, and what its model card says. With train.ema_decay the average of the
    weights is exported."""

    checkpoint: Text = "best"
    """best: that of the best validation of stage A (train.best_metric); after stage B the last one. last: the last one.
    Or the name or path of a checkpoint."""
    average: PositiveInt = 1
    """Number of checkpoints whose weights are averaged: that of `checkpoint` and those before it. 1: no average."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Data type of the exported weights of a model of transformers. bf16 halves the files and rounds the weights. fp32
    for `lora: adapter`."""
    license: Text | None = None
    """License of the exported model for the model card, as an identifier of the Hugging Face Hub such as apache-2.0.
    null: unknown."""
    base_model: Text | None = None
    """Model that this model was trained from, for the model card: its name on the Hugging Face Hub. null: none."""
    lora: Literal["merge", "adapter"] = "merge"
    """Of a run with model.lora. merge: the model with the adapters merged into it. adapter: the adapters alone, as peft
    reads them."""
    prediction_heads: Literal["drop", "keep"] = "drop"
    """Of a run with model.prediction. drop: the model that predicts the next token. keep: also the parameters of the
    other depths, with which it can draft (`cdrmix generate --speculative`)."""


@dataclass(frozen=True)
class Written:
    """What the files and overrides of a configuration have, with locations. All are equal: a Config is its values."""

    root: Node = field(compare=False)


def _with_kind(model: object) -> object:
    """The model section with its kind, which is cdrmix if it is not written."""
    return {"kind": "cdrmix", **model} if isinstance(model, dict) else model


@functools.lru_cache(maxsize=8)
def _as_yaml(data: str) -> str:
    """JSON as YAML. A run writes the same text with every checkpoint, and PyYAML takes longer than a small step."""
    return dump_yaml(parse_json(data))


class Config(Section):
    """One run. A `reasoning` section makes it a reasoning run (stage A, then stage B)."""

    run: Run = Field(default_factory=Run)
    model: Annotated[Model | HuggingFaceModel, Field(discriminator="kind"), BeforeValidator(_with_kind)]
    data: Data = Field(default_factory=Data)
    train: Train
    logging: Logging = Field(default_factory=Logging)
    export: Export = Field(default_factory=Export)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    reasoning: Reasoning | None = None
    """Stage B. null: the run trains stage A only."""
    ablation: Ablation | None = None
    """Comparison of small models for `cdrmix ablate`. null: this file is not an ablation."""
    _written: Written = PrivateAttr(default=Written(Node({}, Location("the configuration"))))

    @property
    def cdrmix_model(self) -> Model:
        """The section `model` of a model of this package. Raises ConfigError for a model of transformers."""
        if isinstance(self.model, Model):
            return self.model
        raise ConfigError(f"this works only with model.kind: cdrmix; the model of {self.run.name} is of transformers")

    @property
    def kind(self) -> Literal["core", "reasoning"]:
        return "core" if self.reasoning is None else "reasoning"

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Reads a YAML file with all files that it inherits from, applies overrides, and validates.

        Args:
            path: a YAML file.
            overrides: `key.path=value` each, the value in YAML; a later one takes precedence.

        Raises:
            ConfigError: with every problem, its file and line, what is allowed and the nearest name.
        """
        config, written = load_yaml(path, overrides, cls)
        config._written = Written(written)
        return config

    def refuse(self, problems: Iterable[tuple[str, object, str]]) -> None:
        """Raises ConfigError if there are problems: (key, its value, what is allowed), which are found after loading.

        The message has the file and line of each key.
        """
        root = self._written.root
        found_problems = [
            Problem(location_of(root, tuple(key.split("."))), key, found(value), allowed)
            for key, value, allowed in problems
        ]
        if found_problems:
            raise config_error(found_problems)

    def to_yaml(self) -> str:
        """The configuration as YAML with every key and without `base:`. `from_yaml` reads it as an equal Config."""
        data = self.model_dump(mode="json")
        for section in ("reasoning", "ablation"):
            if data[section] is None:
                del data[section]
        comment = f"# One {self.kind} run of cdrmix, fully resolved: every key, inherited, autosized or default.\n"
        return comment + _as_yaml(json.dumps(data))

    def hash(self) -> str:
        """SHA-256 (hexadecimal) of all keys except NOT_HASHED. Runs with the same hash have the same results.

        So a run can be resumed after it was moved, renamed, or given other logging or disk; or another expert
        parallelism, ZeRO stage or other MEMORY, which change the rounding at most; or smaller micro-batches
        (train.micro_batch_parts). The origin of a value (inherited, override, autosizer, default) and the order of the
        keys do not matter.
        """
        return hashlib.sha256(json.dumps(self.hashed(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def hashed(self) -> dict[str, Any]:
        """The keys that `hash` depends on, as plain data."""
        data = self.model_dump(mode="json", exclude=NOT_HASHED)
        data["train"] |= MEMORY
        data["train"]["micro_batch_rows"] *= self.train.micro_batch_parts
        del data["ablation"]  # each arm of an ablation is a configuration of its own
        return data
