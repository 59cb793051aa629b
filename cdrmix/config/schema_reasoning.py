"""The schema of stage B: plastic adapters, the controller, memories, the agent, and the phases that train them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdrmix.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Text


class PlasticLora(Section):
    """Fast weights beside projections: a chunk of tokens reads them, its end writes them."""

    enabled: bool = True
    rank: PositiveInt
    key_width: PositiveInt | None = None  # of the keys; null: as wide as the rank
    alpha: PositiveFloat
    decay: Fraction  # of the fast weights, each controller step
    clamp: PositiveFloat = 2.0  # the norm that a row of fast weights may have after a step
    rule: Literal["delta", "hebb", "oja"] = "delta"
    gated: bool = True  # whether tokens say how strongly they are written; false: all alike
    attention: list[Literal["query", "key", "value", "output"]] = ["query", "key", "value", "output"]
    rwkv7: list[Literal["receptance", "key", "value", "output"]] = ["receptance", "key", "value"]
    correlation_weight: NonNegativeFloat = 0.0  # of the writes' own objective in the loss; above 0 keys collapse


class Controller(Section):
    """Accepts or rolls back what the plastic adapters propose."""

    enabled: bool = True
    # Of an episode: the chunks that the controller reads, the changes of the token memory, the cost of the operations.
    # What would exceed it is not done; the price of latency is a share of it.
    step_budget: PositiveInt
    max_branches: Annotated[int, Field(ge=1, le=4)]  # proposals of a step, by the strength of their writes
    # The strengths, of which the first max_branches are tried. The delta rule leaves 1 - s beta of the error to a key's
    # old value: as trained; half; twice (beta is kept at 2 at most); and a quarter, an average of four tellings.
    write_strengths: Annotated[list[PositiveFloat], Field(min_length=1)] = [1.0, 0.5, 2.0, 0.25]
    accept_threshold: float = 0.0  # on the accept head's logit, or on the advantage in value
    decide_by: Literal["head", "value"] = "head"


class Memory(Section):
    """Working memory (summaries put in front), token memory (what the agent writes) and episodic memory (an index)."""

    dim: PositiveInt  # of summaries and of the index's keys
    summary_stride: PositiveInt = 8  # tokens a summary
    top_k: PositiveInt  # episodes that a retrieval gives
    max_tokens: PositiveInt  # of the episodic memory
    time_to_live: PositiveInt | None = None  # in controller steps; null: for ever
    max_spliced: PositiveInt = 4  # episodes in front of a chunk: what a window may be wider
    episodic: bool = True  # whether operations have an index to write to; false: what an ablation compares with
    tokens: PositiveInt = 64  # of the token memory
    heads: PositiveInt = 1  # parts of the token memory, of which a step rewrites the one that was not for longest


class OperationCosts(Section):
    """What operations cost of controller.step_budget, and of the reward by rl.latency_weight. noop costs nothing."""

    summarize: NonNegativeFloat = 1.0
    retrieve: NonNegativeFloat = 1.0
    splice_window: NonNegativeFloat = 2.0
    cache_write: NonNegativeFloat = 1.0


class Rl(Section):
    """Reinforcement learning by groups of rollouts (GRPO and its relatives)."""

    horizon: PositiveInt  # most actions of an episode
    objective: Literal["memagent", "grpo", "dapo", "dr_grpo", "gspo"] = "memagent"
    group_size: Annotated[int, Field(ge=2)] = 8
    clip_low: PositiveFloat | None = None  # null: the objective's own
    clip_high: PositiveFloat | None = None
    deviation: bool | None = None  # whether advantages are divided by the group's standard deviation
    kl_weight: NonNegativeFloat | None = None
    credit: Literal["all_turns", "final_turn"] = "all_turns"  # whose tokens an episode's advantage teaches
    temperature: PositiveFloat = 1.0
    task_weight: NonNegativeFloat = 1.0
    latency_weight: NonNegativeFloat
    stability_weight: NonNegativeFloat
    costs: OperationCosts = Field(default_factory=OperationCosts)
    # Steps in a row in which no group's rewards differ: the acceptance phase then gives up, the policy phase warns.
    patience: PositiveInt = 20
    solved: Fraction = 0.95  # mean reward from which such steps mean that nothing is left to learn


class EpisodesOfTask(Section):
    """What stage B is trained and measured on: a task in chunks of `reasoning.chunk` tokens."""

    task: Text
    tokens: bool = False  # of ids of the task's own vocabulary instead of text
    chunks: PositiveInt = 4  # of a training episode
    difficulty: dict[Text, bool | int | float | Text] = {}  # a field of the task's difficulty -> its value
    seed: NonNegativeInt = 1


class Phase(Section):
    """One phase of stage B. Steps 0: passed over."""

    steps: NonNegativeInt = 0
    episodes: PositiveInt = 32  # of one step, over all processes; with groups each is rolled out group_size times
    micro_batch: PositiveInt = 32  # sequences of one forward pass
    learning_rate: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 10
    weight_decay: NonNegativeFloat = 0.0
    train: Literal["own", "all"] = "own"  # the phase's own parts, or the whole model
    # What every step learns too, lest it be forgotten: stage A's text, episodes of other phases. `joint` has the text,
    # and plasticity and policy where they have steps, in any case. Not in ablations.
    beside: list[Literal["text", "plasticity", "imitation", "operations_imitation"]] = []


class Plasticity(Phase):
    """Episodes may grow: what has nothing but its states to carry a fact learns long ones through short ones alone."""

    growth_steps: NonNegativeInt = 0  # until episodes have all their chunks, evenly from the fewest; 0: from the start


class Acceptance(Phase):
    """The controller's heads; the value head is fitted to the rewards by squares."""

    value_weight: NonNegativeFloat = 1.0  # of those squares in the loss


class Imitation(Phase):
    """Demonstrations of the memory agent; an ablation makes them worse than they could be."""

    leak: Fraction = 0.0  # of the demonstrations of keeping, the share that loses a fact


class Policy(Phase):
    """Rollouts of the memory agent; shorter ones than its demonstrations are cheaper."""

    chunks: PositiveInt | None = None  # of an episode; null: as many as reasoning.agent says


class OperationsImitation(Phase):
    """Demonstrations of operations on memories."""

    key_temperature: PositiveFloat = 0.03  # divides the keys' cosines in the loss; at 0.1 they are learnt half as fast
    # Of the chunks that tell nothing, the share that is summarised, in so large a share of the batches.
    summarised: Fraction = 0.4
    summarised_batches: Fraction = 0.25
    waste: Fraction = 0.0  # of the chunks that tell nothing, the share that is written to the index all the same


class Operations(Phase):
    """The policy over operations; the value head is fitted to the rewards by squares."""

    value_weight: NonNegativeFloat = 0.5  # of those squares in the loss


class Phases(Section):
    """In this order."""

    plasticity: Plasticity = Field(default_factory=Plasticity)  # B1: adapters, by cross-entropy through their writes
    acceptance: Acceptance = Field(
        default_factory=Acceptance
    )  # B2: the accept head, by groups of rollouts; all else is frozen
    imitation: Imitation = Field(default_factory=Imitation)  # B3: the memory agent, by demonstrations
    policy: Policy = Field(default_factory=Policy)  # B3: the memory agent, by groups of rollouts
    operations_imitation: OperationsImitation = Field(default_factory=OperationsImitation)  # B3: operations, likewise
    operations: Operations = Field(default_factory=Operations)  # B3: the operations head, likewise
    joint: Phase = Field(default_factory=Phase)  # B4: text, writes and memory together


class StageBEvaluation(Section):
    """Every mechanism on and off, over numbers of chunks, on episodes that no phase trained on."""

    chunks: Annotated[list[PositiveInt], Field(min_length=1)] = [2, 4, 16]
    episodes: PositiveInt = 64


class Reasoning(Section):
    """Stage B; its presence makes a configuration a reasoning one."""

    backbone: Text | None = None  # a run, checkpoint or export of stage A to begin with; null: this run's own
    chunk: PositiveInt = 64  # tokens of a controller step
    carry: Literal["all", "fast"] = "all"  # from step to step: also the mixers' states, or the fast weights alone
    plastic_lora: PlasticLora
    controller: Controller
    memory: Memory
    rl: Rl
    plasticity: EpisodesOfTask = Field(default_factory=lambda: EpisodesOfTask(task="chunk_recall"))
    acceptance: EpisodesOfTask | None = None  # what the accept head learns by; null: plasticity's
    agent: EpisodesOfTask = Field(default_factory=lambda: EpisodesOfTask(task="chunk_recall"))
    operations: EpisodesOfTask = Field(default_factory=lambda: EpisodesOfTask(task="hops"))
    phases: Phases = Field(default_factory=Phases)
    evaluation: StageBEvaluation = Field(default_factory=StageBEvaluation)
