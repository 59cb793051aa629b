"""The experiment of token memory: a small model that imitates and then learns by groups of rollouts."""

from __future__ import annotations

import copy

from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.reason.agent.agent import Window, evaluate
from cdrmix.reason.agent.imitation import ImitationPhase
from cdrmix.reason.agent.policy import PolicyPhase
from cdrmix.reason.episodes import FIRST_HELD_OUT, EpisodeSource, source_of
from cdrmix.reason.experiments.base import EXPERIMENTS, Say, small_model
from cdrmix.reason.model import StageBModel
from cdrmix.reason.phase import phase_config, train_alone


@EXPERIMENTS("token_memory")
def token_memory(config: Config, seed: int, say: Say) -> dict[str, float]:
    """Imitation, then policy where it has steps, then the greedy agent at every number of chunks of the ablation.

    Gives accuracy@N (the share of the answers' tokens that are right), exact@N (of answers right in all), capture@N,
    retention@N, changes@N; and window@N: the accuracy where the agent is shown the last chunk alone. Arms that imitate
    alike share the model that comes of it.
    """
    reasoning, ablation = config.reasoning, config.ablation
    assert reasoning is not None
    assert ablation is not None
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    section = reasoning.agent.model_copy(update={"seed": reasoning.agent.seed + 1000 * seed})
    source = source_of(section, reasoning.chunk)
    model = _imitated(config, source, say)
    if reasoning.phases.policy.steps:
        train_alone(phase_config(config, reasoning.phases.policy), model, PolicyPhase(config, source), say)
    asked = source_of(
        section.model_copy(update={"difficulty": {**section.difficulty, **ablation.difficulty}}), reasoning.chunk
    )
    window, numbers = Window.of(reasoning, source), range(FIRST_HELD_OUT, FIRST_HELD_OUT + ablation.episodes)
    budget = reasoning.controller.step_budget
    measured: dict[str, float] = {}
    for chunks in ablation.chunks:
        score = evaluate(model.language_model, window, asked, numbers, chunks, step_budget=budget)
        last = evaluate(model.language_model, window, asked, numbers, chunks, step_budget=budget, last_only=True)
        found = {"accuracy": score.matched, "exact": score.exact, "capture": score.capture}
        found |= {"retention": score.retention, "changes": score.changes, "window": last.matched}
        measured |= {f"{name}@{chunks}": value for name, value in found.items()}
    return measured


_IMITATED: dict[str, dict[str, Tensor]] = {}  # weights after imitation, by all that decides them


def _imitated(config: Config, source: EpisodeSource, say: Say) -> StageBModel:
    """A small model of the configuration after imitation, which is done once a process for arms that share it."""
    reasoning = config.reasoning
    assert reasoning is not None
    model = small_model(config, config.run.seed)
    phase = reasoning.phases.imitation
    decisive = (config.run.seed, config.model, phase, reasoning.agent, reasoning.memory, reasoning.chunk)
    key = repr((*decisive, reasoning.plastic_lora))
    if key not in _IMITATED:
        train_alone(phase_config(config, phase), model, ImitationPhase(config, source), say)
        _IMITATED[key] = copy.deepcopy(model.state_dict())
    model.load_state_dict(_IMITATED[key])
    return model
