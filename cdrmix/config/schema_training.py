"""The section `train`: steps, rows, rates, precision, memory, processes, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdrmix.config.batch_sizes import BatchSizes, BatchWarmup
from cdrmix.config.schema_optimizer import AnOptimizer, ASchedule, Optimizer, ParameterGroup, Schedule
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


class Profile(Section):
    """Steps that the profiler traces. It writes to profile/ in the run folder."""

    first: PositiveInt = 10
    """First step to trace, counted from the start of this process."""
    steps: PositiveInt = 3
    """Number of steps to trace."""


class LossScale(Section):
    """Dynamic loss scaling of fp16. The scale halves on overflow."""

    initial: PositiveFloat = 65536.0
    """Scale of the first step."""
    interval: PositiveInt = 1000
    """Steps without overflow after which the scale doubles."""


class Skip(Section):
    """Steps whose update is not applied. Their rows are not trained on, and faults.jsonl names the steps."""

    nonfinite: NonNegativeInt = 0
    """Most steps in a row that are skipped because the loss or the gradient norm is NaN or infinite. One more ends the
    training with exit code 9. A stopped run can be resumed with another number. The gradients of fp16 may overflow in
    up to 19 steps in a row in any case."""
    spike: PositiveFloat | None = None
    """Skips a step whose loss is above the median of the last 128 losses by more than this many robust standard
    deviations (1.4826 times the median absolute deviation). After 8 in a row the loss has a new level, and the next 64
    losses are not judged. null: no step is skipped for its loss."""
    rollbacks: NonNegativeInt = 0
    """How often a run goes back to its newest checkpoint from before them, after more than `nonfinite` such steps or 8
    spikes in a row. It then trains on the rows after those of the last of these steps. Stage A only."""


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
