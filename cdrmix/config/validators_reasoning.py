"""Rules about the section `reasoning`: budgets of steps, replay of phases, parts that a phase needs."""

from __future__ import annotations

from functools import partial
from typing import Any

from cdrmix.config.rule import Rule, Violation

STEP_BUDGET = "reasoning.controller.step_budget"
PHASES = ("plasticity", "acceptance", "imitation", "policy", "operations_imitation", "operations", "joint")
OPERATIONS = ("operations_imitation", "operations")
CHANGES_PASSES = ("model.feed_forward.router_jitter", "model.feed_forward.drop")  # repeated passes differ


def _replay(name: str, replay: list[str]) -> Violation | None:
    return Violation((replay.index(name),), "another phase than its own") if name in replay else None


def _heads_alone(replay: list[str], train: str = "own") -> str | None:
    return "[]: the phase trains heads alone, which other data do not use" if replay and train == "own" else None


def _within_budget(chunks: int | None, step_budget: int, *steps: int) -> str | None:
    if chunks is not None and chunks > step_budget and any(steps):
        return f"at most reasoning.controller.step_budget={step_budget}"
    return None


def _acceptance_of_plasticity(chunks: int, step_budget: int, steps: int, own: object) -> str | None:
    return None if own is not None else _within_budget(chunks, step_budget, steps)


def _write_strengths(strengths: list[float], branches: int) -> str | None:
    return f"at least reasoning.controller.max_branches={branches} of them" if len(strengths) < branches else None


def _no_data(tokens: bool, data: object) -> str | None:
    return "false with a section data, whose documents are text" if tokens and data is not None else None


def _acceptance_of_documents(data: object, steps: int, own: object) -> str | None:
    if data is None or not steps or own is not None:
        return None
    return "null, or a section reasoning.acceptance: that phase needs chunks of which some are false"


def _growth(growth_steps: int, steps: int, chunks: int | None, fewest: int) -> str | None:
    if growth_steps and steps and growth_steps > steps:
        return f"at most the steps of the phase, {steps}"
    if growth_steps and chunks is not None and chunks < fewest:
        return f"0: episodes do not grow from reasoning.agent.chunks={fewest} to chunks={chunks}"
    return None


def _same_again(passes: str, jitter: float, drop: bool, train: str = "all") -> str | None:
    if passes == "separate" and (jitter or drop) and train == "all":
        why = "model.feed_forward.drop" if drop else f"model.feed_forward.router_jitter={jitter}"
        return f"together with {why}, by which a repeated pass differs"
    return None


def _has_adapters(train: str, steps: int, enabled: bool, attention: list[str], rwkv7: list[str]) -> str | None:
    if steps and train == "own" and not (enabled and (attention or rwkv7)):
        return "all: reasoning.plastic_lora has no adapters, which are all that own trains"
    return None


def _acceptance(
    steps: int, train: str, controller: bool, enabled: bool, attention: list[str], rwkv7: list[str]
) -> str | None:
    if steps and train != "own":
        return "0 with train: all: the phase trains the controller's heads alone"
    if steps and not (controller and enabled and (attention or rwkv7)):
        return (
            "0 without reasoning.controller.enabled and adapters of reasoning.plastic_lora: there is nothing to accept"
        )
    return None


def _horizon(horizon: int, steps: int, chunks: int, of_phase: int | None = None) -> str | None:
    needed = (of_phase or chunks) + 1
    return f"at least {needed}, the chunks of an episode and its answer" if steps and horizon < needed else None


def _divisor(heads: int, tokens: int) -> str | None:
    return f"a divisor of reasoning.memory.tokens={tokens}" if tokens % heads else None


def _holds_a_chunk(max_tokens: int, chunk: int, episodic: bool, *steps_and_replay: Any) -> str | None:
    steps, replay = steps_and_replay[: len(PHASES)], steps_and_replay[len(PHASES) :]
    own = any(count for name, count in zip(PHASES, steps, strict=True) if name in OPERATIONS)
    replayed = any(count and {*OPERATIONS} & {*names} for count, names in zip(steps, replay, strict=True))
    if episodic and (own or replayed) and max_tokens < chunk:
        return f"at least reasoning.chunk={chunk}, which is an episode of the index"
    return None


RULES = (
    Rule(
        (
            *(f"reasoning.phases.plasticity.{name}" for name in ("train", "steps")),
            *(f"reasoning.plastic_lora.{name}" for name in ("enabled", "attention", "rwkv7")),
        ),
        _has_adapters,
    ),
    Rule(
        (
            *(f"reasoning.phases.acceptance.{name}" for name in ("steps", "train")),
            "reasoning.controller.enabled",
            *(f"reasoning.plastic_lora.{name}" for name in ("enabled", "attention", "rwkv7")),
        ),
        _acceptance,
    ),
    Rule(
        (
            "reasoning.rl.horizon",
            "reasoning.phases.policy.steps",
            "reasoning.agent.chunks",
            "reasoning.phases.policy.chunks",
        ),
        _horizon,
    ),
    Rule(("reasoning.rl.horizon", "reasoning.phases.operations.steps", "reasoning.operations.chunks"), _horizon),
    Rule(("reasoning.memory.heads", "reasoning.memory.tokens"), _divisor),
    Rule(
        (
            "reasoning.memory.max_tokens",
            "reasoning.chunk",
            "reasoning.memory.episodic",
            *(f"reasoning.phases.{name}.steps" for name in PHASES),
            *(f"reasoning.phases.{name}.replay" for name in PHASES),
        ),
        _holds_a_chunk,
    ),
    Rule(("reasoning.phases.operations_imitation.window_passes", *CHANGES_PASSES), _same_again),
    Rule(
        ("reasoning.phases.operations.window_passes", *CHANGES_PASSES, "reasoning.phases.operations.train"), _same_again
    ),
    Rule(("reasoning.controller.write_strengths", "reasoning.controller.max_branches"), _write_strengths),
    Rule(("reasoning.acceptance.chunks", STEP_BUDGET, "reasoning.phases.acceptance.steps"), _within_budget),
    Rule(
        ("reasoning.plasticity.chunks", STEP_BUDGET, "reasoning.phases.acceptance.steps", "reasoning.acceptance"),
        _acceptance_of_plasticity,
    ),
    Rule(
        (
            "reasoning.agent.chunks",
            STEP_BUDGET,
            *(f"reasoning.phases.{name}.steps" for name in ("imitation", "policy")),
        ),
        _within_budget,
    ),
    *(Rule((f"reasoning.{name}.tokens", f"reasoning.{name}.data"), _no_data) for name in ("plasticity", "agent")),
    Rule(
        ("reasoning.plasticity.data", "reasoning.phases.acceptance.steps", "reasoning.acceptance"),
        _acceptance_of_documents,
    ),
    Rule(("reasoning.phases.policy.chunks", STEP_BUDGET, "reasoning.phases.policy.steps"), _within_budget),
    Rule(
        (
            *(f"reasoning.phases.policy.{name}" for name in ("growth_steps", "steps", "chunks")),
            "reasoning.agent.chunks",
        ),
        _growth,
    ),
    *(
        Rule((f"reasoning.phases.{name}.replay",), partial(_replay, name))
        for name in ("plasticity", "imitation", "operations_imitation")
    ),
    Rule(("reasoning.phases.acceptance.replay",), _heads_alone),
    Rule(("reasoning.phases.operations.replay", "reasoning.phases.operations.train"), _heads_alone),
)
