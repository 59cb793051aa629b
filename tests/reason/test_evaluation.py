"""The evaluation of stage B: which of a mechanism's figures is on, and which is off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")

from cdrmix.config.schema import Config
from cdrmix.reason import evaluation
from cdrmix.reason.agent.agent import Score
from cdrmix.reason.controller.controller import always, never
from cdrmix.reason.model import StageBModel
from cdrmix.reason.operations.rollout import Reader
from cdrmix.reason.plasticity.phase import swapped, zeroed

REASON = Path(__file__).parents[2] / "configs" / "cdrmix-reason-tiny.yaml"
IDS = (
    "reasoning.agent={task: agent, tokens: true, chunks: 2}",
    "reasoning.operations={task: hops, tokens: true, chunks: 4}",
    "reasoning.phases.imitation={steps: 1, replay: []}",
    "reasoning.phases.plasticity.replay=[]",
    "reasoning.phases.operations_imitation.replay=[]",
    "reasoning.evaluation={chunks: [4], episodes: 2}",
)


def test_on_and_off_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measures of the mechanisms are replaced by numbers that tell how they were called."""

    def plasticity(*arguments: Any) -> dict[str, float]:
        changes: Mapping[str, Callable[..., Any]] = arguments[-1]
        return {"accuracy": 1.0, **{name: {zeroed: 2.0, swapped: 3.0}[change] for name, change in changes.items()}}

    def acceptance(controller: object, source: object, rule: object, *_: object) -> dict[str, float]:
        return {"answered": 5.0 if rule is always else 6.0 if rule is never else 4.0}

    def agent(*_: object, step_budget: int, last_only: bool = False) -> Score:
        assert step_budget == 64
        return Score(8.0 if last_only else 7.0, 0.0, 0.0, 0.25, 0.5, 0.0)

    def operations(model: object, reader: Reader, *_: object) -> dict[str, float]:
        return {"accuracy": 9.0 if reader.new_memory() is not None else 10.0}

    monkeypatch.setattr(evaluation.plasticity, "accuracy", plasticity)
    monkeypatch.setattr(evaluation.acceptance, "measure", acceptance)
    monkeypatch.setattr(evaluation.agent, "evaluate", agent)
    monkeypatch.setattr(evaluation.operations, "evaluate", operations)
    monkeypatch.setattr(evaluation, "Controller", lambda *_: None)
    monkeypatch.setattr(evaluation, "configured", lambda *_: None)
    model = SimpleNamespace(language_model=None, controller=object(), eval=lambda: None)
    config = Config.from_yaml(REASON, list(IDS))
    found = evaluation.evaluate_stage_b(cast(StageBModel, model), config, None, lambda line: None)
    assert found == {
        "plasticity": {"4": {"on": 1.0, "off": 2.0, "swapped": 3.0}},
        "acceptance": {"4": {"on": 4.0, "off": 5.0, "never": 6.0}},
        "agent": {"4": {"on": 7.0, "off": 8.0, "capture": 0.25, "retention": 0.5}},
        "operations": {"4": {"on": 9.0, "off": 10.0}},
    }
