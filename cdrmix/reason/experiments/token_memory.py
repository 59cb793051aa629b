"""The experiment of token memory: trains a small model by imitation and then by groups of rollouts."""

from __future__ import annotations

import copy
import math

from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.reason.agent.agent import Window, evaluate
from cdrmix.reason.episodes import FIRST_HELD_OUT
from cdrmix.reason.experiments.base import EXPERIMENTS, at_seed, small_model, tokenizer_of
from cdrmix.reason.experiments.trial import Trial
from cdrmix.reason.model import StageBModel
from cdrmix.reason.sources import source_of


@EXPERIMENTS("token_memory")
def token_memory(config: Config, seed: int, trial: Trial) -> dict[str, float]:
    """Trains by imitation, and by the policy phase if it has steps; measures the greedy agent at every chunk count N.

    Returns accuracy@N (the share of right tokens of answers), exact@N (the share of answers that are right as a whole),
    capture@N and retention@N where the task has facts, changes@N; and window@N: the accuracy if the agent reads the
    last chunk alone. Arms with the same imitation share the model after it.
    """
    config = at_seed(config, seed)
    reasoning, ablation = config.reasoning, config.ablation
    assert reasoning is not None
    assert ablation is not None
    tokenizer = tokenizer_of(config, reasoning.agent)
    model = _imitated(config, tokenizer, trial)
    if reasoning.phases.policy.steps:
        trial.train_phase("policy", config, model, tokenizer)
    section = reasoning.agent
    asked = source_of(
        section.model_copy(update={"difficulty": {**section.difficulty, **ablation.difficulty}}),
        reasoning.chunk,
        tokenizer,
    )
    window = Window.of(reasoning, source_of(section, reasoning.chunk, tokenizer))
    numbers = range(FIRST_HELD_OUT, FIRST_HELD_OUT + ablation.episodes)
    budget = reasoning.controller.step_budget
    measured: dict[str, float] = {}
    for chunks in ablation.chunks:
        score = evaluate(model.language_model, window, asked, numbers, chunks, step_budget=budget)
        last = evaluate(model.language_model, window, asked, numbers, chunks, step_budget=budget, last_only=True)
        result = {"accuracy": score.matched, "exact": score.exact, "capture": score.capture}
        result |= {"retention": score.retention, "changes": score.changes, "window": last.matched}
        measured |= {f"{name}@{chunks}": value for name, value in result.items() if not math.isnan(value)}
    return measured


_IMITATED: dict[str, dict[str, Tensor]] = {}  # weights after imitation, by everything that determines them


def _imitated(config: Config, tokenizer: TextTokenizer | None, trial: Trial) -> StageBModel:
    """A small model of the configuration after imitation. A process trains it once for all arms that share it."""
    reasoning = config.reasoning
    assert reasoning is not None
    model = small_model(config, config.run.seed)
    phase = reasoning.phases.imitation
    decisive = (config.run.seed, config.cdrmix_model, config.train, phase, reasoning.agent, reasoning.memory)
    replayed = [getattr(reasoning.phases, name) for name in phase.replay]
    others = (reasoning.carry, reasoning.plasticity, reasoning.operations, replayed) if replayed else ()
    key = repr((*decisive, reasoning.chunk, reasoning.plastic_lora, *others))
    if key not in _IMITATED:
        trial.train_phase("imitation", config, model, tokenizer)
        _IMITATED[key] = copy.deepcopy(model.state_dict())
    model.load_state_dict(_IMITATED[key])
    return model
