"""The schema of stage B: fast weights, controller, memories, agent, and the phases that train them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdrmix.config.schema_data import Source
from cdrmix.config.section import (
    Between0And1,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Paths,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
)


class PlasticLora(Section):
    """Fast weights: low-rank terms of projections that are updated after each chunk of tokens."""

    enabled: bool = True
    """Switch fast weights on."""
    rank: PositiveInt
    """Rank of the low-rank term."""
    key_width: PositiveInt | None = None
    """Width of the keys. null: the rank."""
    alpha: PositiveFloat
    """Factor of the low-rank term."""
    decay: Fraction
    """Factor on the fast weights at each controller step."""
    clamp: PositiveFloat = 2.0
    """Largest norm of a row of the fast weights after a step."""
    rule: Literal["delta", "hebb", "oja"] = "delta"
    """Update rule of the fast weights."""
    gated: bool = True
    """Each token has a learned update strength. false: all tokens have the same."""
    attention: list[Literal["query", "key", "value", "output"]] = ["query", "key", "value", "output"]
    """Projections of attention blocks that have fast weights."""
    rwkv7: list[Literal["receptance", "key", "value", "output"]] = ["receptance", "key", "value"]
    """Projections of RWKV-7 blocks that have fast weights."""
    correlation_weight: NonNegativeFloat = 0.0
    """Weight in the loss of the objective that the update rule minimises. A value above 0 makes the keys collapse."""


class Controller(Section):
    """The controller, which accepts or rolls back updates of the fast weights."""

    enabled: bool = True
    """Switch the controller on. false: every proposal is accepted."""
    step_budget: PositiveInt
    """Budget of an episode: chunks that the controller reads, changes of the token memory, cost of the operations. What
    exceeds it is not done. The latency in the reward is a fraction of it."""
    max_branches: Annotated[int, Field(ge=1, le=4)]
    """Proposals of a step, which differ in update strength."""
    write_strengths: Annotated[list[PositiveFloat], Field(min_length=1)] = [1.0, 0.5, 2.0, 0.25]
    """Update strengths, of which the first max_branches are tried. 1: as trained. The delta rule with strength s keeps
    1 - s beta of the old value of a key; beta is at most 2."""
    accept_threshold: float = 0.0
    """Threshold of the logit of the accept head, or of the advantage with decide_by: value."""
    decide_by: Literal["head", "value"] = "head"
    """head: the accept head decides. value: the value head decides."""


class Memory(Section):
    """Working memory (summaries), token memory (written by the agent) and episodic memory (an index)."""

    dim: PositiveInt
    """Width of summaries and of the keys of the index."""
    summary_stride: PositiveInt = 8
    """Tokens of a summary."""
    top_k: PositiveInt
    """Episodes that a retrieval returns."""
    max_tokens: PositiveInt
    """Capacity of the episodic memory in tokens."""
    time_to_live: PositiveInt | None = None
    """Controller steps until an episode expires. null: never."""
    max_spliced: PositiveInt = 4
    """Episodes that splice_window puts before a chunk, at most."""
    episodic: bool = True
    """Operations have an index to write to. false: the baseline of an ablation."""
    tokens: PositiveInt = 64
    """Tokens of the token memory."""
    heads: PositiveInt = 1
    """Parts of the token memory. A step rewrites the part that was rewritten longest ago."""


class OperationCosts(Section):
    """Costs of operations, in units of controller.step_budget. noop costs nothing."""

    summarize: NonNegativeFloat = 1.0
    """Cost of summarize."""
    retrieve: NonNegativeFloat = 1.0
    """Cost of retrieve."""
    splice_window: NonNegativeFloat = 2.0
    """Cost of splice_window."""
    cache_write: NonNegativeFloat = 1.0
    """Cost of cache_write."""


class Rl(Section):
    """Reinforcement learning with groups of rollouts (GRPO and related objectives)."""

    horizon: PositiveInt
    """Largest number of actions of an episode."""
    objective: Literal["memagent", "grpo", "dapo", "dr_grpo", "gspo"] = "memagent"
    """Policy-gradient objective."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts of a group."""
    clip_low: PositiveFloat | None = None
    """Lower clipping distance of the probability ratio. null: that of the objective."""
    clip_high: PositiveFloat | None = None
    """Upper clipping distance of the probability ratio. null: that of the objective."""
    deviation: bool | None = None
    """Divide advantages by the standard deviation of the group. null: as the objective does."""
    kl_weight: NonNegativeFloat | None = None
    """Weight of the KL divergence to the model before the phase. null: that of the objective."""
    credit: Literal["all_turns", "final_turn", "gain"] = "all_turns"
    """Advantage of a turn of the memory agent. all_turns: that of its episode. final_turn: that of its episode for the
    answer, 0 for others. gain: of the reward less the likelihood of the right answer after the memory that the turn
    found, so that a turn is not credited for the turns before it."""
    entropy_weight: NonNegativeFloat = 0.0
    """Weight in the loss of the mean entropy of a generated token's distribution, in nats, which is maximised; of the
    turns that are learnt from."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of the rollouts."""
    reward: Text = "exact"
    """Reward of the memory agent's answer, from 0 to 1: exact, f1 or contains (of text without case, punctuation and
    articles; the best of the right answers), likelihood (of the right answer's tokens after the memory, their geometric
    mean), package:function, or the name of an entry point of the group cdrmix.rewards. Such a function gets the
    question, the model's answer, and the row of the file as a mapping, and returns a number. Its group of rollouts is
    dropped where it fails."""
    rollouts_every: NonNegativeInt = 0
    """Steps of the policy phase between two whose first group of rollouts is written to rollouts.jsonl in the run
    folder, and shown in the report. 0: none is written."""
    task_weight: NonNegativeFloat = 1.0
    """Weight of a correct answer in the reward."""
    latency_weight: NonNegativeFloat
    """Weight of the cost of the steps in the reward."""
    stability_weight: NonNegativeFloat
    """Weight of retained facts in the reward."""
    costs: OperationCosts = Field(default_factory=OperationCosts)
    """Costs of the operations."""
    patience: PositiveInt = 20
    """Consecutive steps in which the rewards of every group are equal, until the acceptance phase stops with an error
    and the policy phase warns."""
    solved: Fraction = 0.95
    """Mean reward from which equal rewards mean that the task is learned."""


class EpisodesOfTask(Section):
    """A task, in chunks of `reasoning.chunk` tokens, that a phase is trained and evaluated on."""

    task: Text
    """Name of the task."""
    tokens: bool = False
    """Use token ids of a vocabulary of the task instead of text."""
    chunks: PositiveInt = 4
    """Chunks of a training episode."""
    difficulty: dict[Text, bool | int | float | Text] = {}
    """Name of a task parameter to its value."""
    seed: NonNegativeInt = 1
    """Seed of the episodes."""


class QuestionFiles(Section):
    """Files of documents with questions. Each line is an object with a context, a question and its answers."""

    kind: Literal["jsonl"]
    """Kind of the files: JSON Lines."""
    paths: Paths
    """Files, folders and patterns. Files may end in .gz or .zst."""
    context_field: Text = "context"
    """Field with the document."""
    question_field: Text = "question"
    """Field with the question."""
    answers_field: Text = "answers"
    """Field with the right answer, or a list of right answers. The model is trained on the first."""
    facts_field: Text = "facts"
    """Field with a list of passages of the document that an answer needs, which the demonstrations of the phase
    imitation keep in the memory. Capture and retention are measured by them. It may be missing."""
    notes_field: Text = "notes"
    """Field with a list of notes, as demonstrations in place of facts: objects with a passage of the document and with
    the memory, the text of the memory after this passage. They are in the order of the passages. It may be missing."""
    held_out: Between0And1 = 0.1
    """Share of the documents that are kept for the evaluation, with all their questions."""


class EpisodesOfDocuments(EpisodesOfTask):
    """As EpisodesOfTask, or your own documents."""

    task: Text = "chunk_recall"
    """Name of the task, if there is no section data."""
    data: QuestionFiles | None = None
    """Files of documents with questions, in place of the task. null: the task's documents."""
    filler: Source | None = None
    """Text among which a task hides its facts. The last tenth of its sentences is kept for the evaluation. null:
    generated sentences."""
    question_tokens: PositiveInt | None = None
    """Tokens of the longest question. null: of tasks that have chunks that of 64 generated ones and 4 more, else 64."""
    answer_tokens: PositiveInt | None = None
    """Tokens of the longest answer. null: of tasks that have chunks that of 64 generated ones and 4 more, else 64."""


class Phase(Section):
    """One phase of stage B."""

    steps: NonNegativeInt = 0
    """Optimizer steps of the phase. 0: the phase is skipped."""
    episodes: PositiveInt = 32
    """Episodes of one step, over all processes. In phases with rollouts each episode has group_size rollouts."""
    micro_batch: PositiveInt = 32
    """Sequences of one forward pass."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of the phase."""
    warmup_steps: NonNegativeInt = 10
    """Steps of linear warmup."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW: decoupled weight decay."""
    train: Literal["own", "all"] = "own"
    """own: train only the parameters of the mechanism. all: train the whole model."""
    replay: list[Literal["text", "plasticity", "imitation", "operations_imitation"]] = []
    """Other training data of every step, so that the model does not forget it: text of stage A, or episodes of other
    phases. The phase joint always includes text, and plasticity and policy if they have steps."""


class Plasticity(Phase):
    """The phase of the fast weights. Its episodes may grow during the phase."""

    growth_steps: NonNegativeInt = 0
    """Steps over which episodes grow to their full number of chunks. 0: full length from the start."""


class Acceptance(Phase):
    """The phase of the accept head. The value head learns the rewards by squared error."""

    value_weight: NonNegativeFloat = 1.0
    """Weight of the squared error in the loss."""


class Imitation(Phase):
    """The phase of imitation: demonstrations of the memory agent."""

    leak: Fraction = 0.0
    """Share of the demonstrations of keeping that lose a fact. For ablations."""


class Policy(Phase):
    """The phase of rollouts of the memory agent."""

    chunks: PositiveInt | None = None
    """Chunks of an episode. null: reasoning.agent.chunks."""
    growth_steps: NonNegativeInt = 0
    """Steps over which episodes grow from reasoning.agent.chunks to chunks. Short ones cost less and are learned first.
    0: full length from the start. Documents of files keep their length."""
    rollout_rows: PositiveInt | None = None
    """Rollouts that a process makes at once, in whole groups: fewer need less memory. null: all of a step."""


class WindowPhase(Phase):
    """A phase whose loss reads the windows of the operations."""

    window_passes: Literal["together", "separate"] = "together"
    """How the windows of a micro-batch get their gradients. together: by one backward pass, for which all of them keep
    their activations. separate: the windows are read without gradients, and the loss gives the gradients of what was
    read; then every pass over windows of one shape has a backward pass of its own. That needs the memory of one pass,
    which has at most as many tokens as the chunks of `micro_batch` episodes, or one window. Under ZeRO-2 and ZeRO-3
    each pass reduces all gradients; under ZeRO-3 the gradients of all weights are then never whole in one process. In
    operations_imitation it needs one more forward pass, because only rollouts have read their windows before. Without
    effect in operations with `train: own`, which reads no window again."""


class OperationsImitation(WindowPhase):
    """The phase of imitation of operations on memories."""

    key_temperature: PositiveFloat = 0.03
    """Temperature of the cosines in the loss of the keys."""
    summarised: Fraction = 0.0
    """Share of the chunks that are summarised, in summarised_batches of the batches. With an index, of the chunks
    without facts."""
    summarised_batches: Fraction = 0.25
    """Share of the batches in which chunks are summarised."""
    waste: Fraction = 0.0
    """Share of the chunks without facts that are written to the index all the same. For ablations."""


class Operations(WindowPhase):
    """The phase of rollouts of the operations. The value head learns the rewards by squared error."""

    value_weight: NonNegativeFloat = 0.5
    """Weight of the squared error in the loss."""


class Phases(Section):
    """The phases of stage B, in order."""

    plasticity: Plasticity = Field(default_factory=Plasticity)
    """Phase B1: fast weights, by cross-entropy through their updates."""
    acceptance: Acceptance = Field(default_factory=Acceptance)
    """Phase B2: the accept head, by groups of rollouts. All other parameters are frozen."""
    imitation: Imitation = Field(default_factory=Imitation)
    """Phase B3: the memory agent, by demonstrations."""
    policy: Policy = Field(default_factory=Policy)
    """Phase B3: the memory agent, by groups of rollouts."""
    operations_imitation: OperationsImitation = Field(default_factory=OperationsImitation)
    """Phase B3: the operations, by demonstrations."""
    operations: Operations = Field(default_factory=Operations)
    """Phase B3: the operations head, by groups of rollouts."""
    joint: Phase = Field(default_factory=Phase)
    """Phase B4: text, fast weights and memory together."""

    def train_on(self, *phases: str) -> bool:
        """Whether the data of one of these phases are trained on, by the phase itself or by replay."""
        return any(section.steps and {*phases} & {name, *section.replay} for name, section in self)


class StageBEvaluation(Section):
    """The evaluation of stage B: every mechanism on and off, on held-out episodes."""

    chunks: Annotated[list[PositiveInt], Field(min_length=1)] = [2, 4, 16]
    """Numbers of chunks at which every mechanism is evaluated."""
    episodes: PositiveInt = 64
    """Episodes at each number of chunks."""


class Reasoning(Section):
    """Stage B."""

    backbone: Text | None = None
    """A run, checkpoint or export of stage A to start from, or a file of public RWKV-7 weights (.pth or .safetensors).
    null: this run trains stage A first."""
    chunk: PositiveInt = 64
    """Tokens of a controller step."""
    carry: Literal["all", "fast"] = "all"
    """State that is carried from step to step. all: the states of the mixers and the fast weights. fast: the fast
    weights only."""
    rollout_weights: Literal["sharded", "copied"] = "sharded"
    """Weights that make rollouts under ZeRO-3. sharded: those of the training, of which each layer is gathered for
    every token. copied: a copy of the whole model in every process, 4 bytes for each parameter; faster, with the same
    results."""
    plastic_lora: PlasticLora
    controller: Controller
    memory: Memory
    rl: Rl
    plasticity: EpisodesOfDocuments = Field(default_factory=EpisodesOfDocuments)
    """Episodes of the phase plasticity."""
    acceptance: EpisodesOfTask | None = None
    """Episodes of the phase acceptance. null: those of plasticity."""
    agent: EpisodesOfDocuments = Field(default_factory=EpisodesOfDocuments)
    """Episodes of the memory agent."""
    operations: EpisodesOfTask = Field(default_factory=lambda: EpisodesOfTask(task="hops"))
    """Episodes of the operations."""
    phases: Phases = Field(default_factory=Phases)
    evaluation: StageBEvaluation = Field(default_factory=StageBEvaluation)
