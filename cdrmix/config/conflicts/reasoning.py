"""Conflicts in the section `reasoning`: budgets of steps, replay of phases, parts that a phase needs."""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.conflicts.conflict import Conflict
from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.config.schema_run import Sections

OPERATIONS = ("operations_imitation", "operations")
PHASES = "reasoning.phases"


def conflicts(config: Sections) -> Iterator[Conflict]:
    if config.reasoning is not None:
        yield from _sizes(config.reasoning)
        yield from _adapters(config.reasoning)
        yield from _budgets(config.reasoning)
        yield from _episodes(config.reasoning)
        yield from _growth(config.reasoning)
        yield from _replay(config.reasoning)
        yield from _passes(config, config.reasoning)
        yield from _copies(config, config.reasoning)


def _sizes(section: Reasoning) -> Iterator[Conflict]:
    memory, controller = section.memory, section.controller
    if memory.tokens % memory.heads:
        yield Conflict("reasoning.memory.heads", f"a divisor of reasoning.memory.tokens={memory.tokens}")
    if len(controller.write_strengths) < controller.max_branches:
        allowed = f"at least reasoning.controller.max_branches={controller.max_branches} of them"
        yield Conflict("reasoning.controller.write_strengths", allowed)
    if memory.episodic and section.phases.train_on(*OPERATIONS) and memory.max_tokens < section.chunk:
        allowed = f"at least reasoning.chunk={section.chunk}, which is an episode of the index"
        yield Conflict("reasoning.memory.max_tokens", allowed)


def _adapters(section: Reasoning) -> Iterator[Conflict]:
    lora, plasticity, acceptance = section.plastic_lora, section.phases.plasticity, section.phases.acceptance
    adapters = lora.enabled and bool(lora.attention or lora.rwkv7)
    if plasticity.steps and plasticity.train == "own" and not adapters:
        allowed = "all: reasoning.plastic_lora has no adapters, which are all that own trains"
        yield Conflict(f"{PHASES}.plasticity.train", allowed)
    if acceptance.steps and acceptance.train != "own":
        allowed = f"0 with {PHASES}.acceptance.train: all: the phase trains the controller's heads alone"
        yield Conflict(f"{PHASES}.acceptance.steps", allowed)
    elif acceptance.steps and not (section.controller.enabled and adapters):
        needed = "reasoning.controller.enabled and adapters of reasoning.plastic_lora"
        yield Conflict(f"{PHASES}.acceptance.steps", f"0 without {needed}: there is nothing to accept")


def _budgets(section: Reasoning) -> Iterator[Conflict]:
    """Chunks of an episode: each is a step of the controller and of a rollout."""
    phases, budget = section.phases, section.controller.step_budget
    taken = {"reasoning.agent.chunks": (section.agent.chunks, phases.imitation.steps or phases.policy.steps)}
    if section.acceptance is not None:
        taken["reasoning.acceptance.chunks"] = section.acceptance.chunks, phases.acceptance.steps
    else:  # its chunks are those of plasticity
        taken["reasoning.plasticity.chunks"] = section.plasticity.chunks, phases.acceptance.steps
    if phases.policy.chunks is not None:
        taken[f"{PHASES}.policy.chunks"] = phases.policy.chunks, phases.policy.steps
    for key, (chunks, steps) in taken.items():
        if steps and chunks > budget:
            yield Conflict(key, f"at most reasoning.controller.step_budget={budget}")
    of_policy = (f"{PHASES}.policy.chunks", "reasoning.agent.chunks")
    rollouts = (
        (phases.policy.steps, phases.policy.chunks or section.agent.chunks, of_policy),
        (phases.operations.steps, section.operations.chunks, ("reasoning.operations.chunks",)),
    )
    for steps, chunks, keys in rollouts:
        if steps and section.rl.horizon <= chunks:
            allowed = f"at least {chunks + 1}, the chunks of an episode and its answer"
            yield Conflict("reasoning.rl.horizon", allowed, others=keys)


def _episodes(section: Reasoning) -> Iterator[Conflict]:
    for name, episodes in (("plasticity", section.plasticity), ("agent", section.agent)):
        if episodes.tokens and episodes.data is not None:
            allowed = f"false with a section reasoning.{name}.data, whose documents are text"
            yield Conflict(f"reasoning.{name}.tokens", allowed)
    if section.plasticity.data is not None and section.phases.acceptance.steps and section.acceptance is None:
        allowed = "null, or a section reasoning.acceptance: that phase needs chunks of which some are false"
        yield Conflict("reasoning.plasticity.data", allowed)


def _growth(section: Reasoning) -> Iterator[Conflict]:
    policy, fewest = section.phases.policy, section.agent.chunks
    if not policy.growth_steps:
        return
    if policy.steps and policy.growth_steps > policy.steps:
        yield Conflict(f"{PHASES}.policy.growth_steps", f"at most the steps of the phase, {policy.steps}")
    elif policy.chunks is not None and policy.chunks < fewest:
        allowed = f"0: episodes do not grow from reasoning.agent.chunks={fewest} to chunks={policy.chunks}"
        yield Conflict(f"{PHASES}.policy.growth_steps", allowed)


def _replay(section: Reasoning) -> Iterator[Conflict]:
    phases = section.phases
    for name in ("plasticity", "imitation", "operations_imitation"):
        replay = getattr(phases, name).replay
        if name in replay:
            yield Conflict(f"{PHASES}.{name}.replay", "another phase than its own", (replay.index(name),))
    heads_alone = {"acceptance": True, "operations": phases.operations.train == "own"}
    for name, alone in heads_alone.items():
        if alone and getattr(phases, name).replay:
            allowed = "[]: the phase trains heads alone, which other data do not use"
            yield Conflict(f"{PHASES}.{name}.replay", allowed)


def _passes(config: Sections, section: Reasoning) -> Iterator[Conflict]:
    """Separate passes over windows read a chunk twice."""
    if config.model.kind != "cdrmix":
        return
    feed_forward, phases = config.model.feed_forward, section.phases
    jitter = feed_forward.router_jitter
    why = "model.feed_forward.drop" if feed_forward.drop else f"model.feed_forward.router_jitter={jitter}"
    trained = {"operations_imitation": True, "operations": phases.operations.train == "all"}
    for name, reads_twice in trained.items():
        separate = getattr(phases, name).window_passes == "separate"
        if separate and reads_twice and (feed_forward.drop or jitter):
            allowed = f"together with {why}, by which a repeated pass differs"
            yield Conflict(f"{PHASES}.{name}.window_passes", allowed)


def _copies(config: Sections, section: Reasoning) -> Iterator[Conflict]:
    """Copies of the weights: that rollouts read, and that the divergence is from."""
    train, rl, experts = config.train, section.rl, config.train.expert_parallel
    if section.rollout_weights == "copied" and experts > 1:
        why = f"train.expert_parallel={experts}, whose processes need one another in every pass"
        yield Conflict("reasoning.rollout_weights", f"sharded with {why}")
    diverges = rl.kl_weight if rl.kl_weight is not None else rl.objective == "grpo"
    if not section.phases.policy.steps or not diverges:
        return
    divided = train.zero_stage == 3 or (train.zero_stage == "auto" and train.offload == "all")
    if experts > 1:
        why = "the model that the divergence is from would be a copy"
        yield Conflict("reasoning.rl.kl_weight", f"0 with train.expert_parallel={experts}: {why}")
    elif divided and section.rollout_weights == "sharded":
        allowed = (
            "0 under ZeRO-3 with reasoning.rollout_weights=sharded: the model that the divergence is from would be a "
            "copy; set that to copied"
        )
        yield Conflict("reasoning.rl.kl_weight", allowed, others=("train.zero_stage", "train.offload"))
