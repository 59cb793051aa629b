"""The experiment of operations: trains a small model by imitation of an expert and then by groups of rollouts."""

from __future__ import annotations

import torch

from cdrmix.config.schema import Config
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.episodes import FIRST_HELD_OUT
from cdrmix.reason.experiments.base import EXPERIMENTS, at_seed
from cdrmix.reason.experiments.trial import Trial
from cdrmix.reason.heads import OperationHeads, Summariser
from cdrmix.reason.model import StageBModel
from cdrmix.reason.operations.policy import evaluate
from cdrmix.reason.operations.rollout import Reader
from cdrmix.reason.sources import source_of


@EXPERIMENTS("operations")
def operations(config: Config, seed: int, trial: Trial) -> dict[str, float]:
    """Trains a small model by imitation and, if that phase has steps, by the policy phase; measures held-out episodes.

    Returns `NAME@N` of episodes of N chunks after all phases, and `imitated_NAME@N` before the policy phase.
    """
    config = at_seed(config, seed)
    reasoning, ablation = config.reasoning, config.ablation
    assert reasoning is not None
    assert ablation is not None
    torch.manual_seed(seed)
    width = config.cdrmix_model.d_model
    model = StageBModel(
        LanguageModel(config.cdrmix_model, reasoning=reasoning),
        operations=OperationHeads(width),
        summary=Summariser(width, reasoning.memory.dim, reasoning.memory.summary_stride),
    )
    source = source_of(reasoning.operations, reasoning.chunk)
    measured: dict[str, float] = {}

    def measure(prefix: str) -> None:
        model.eval()
        for chunks in ablation.chunks:
            numbers = range(FIRST_HELD_OUT, FIRST_HELD_OUT + ablation.episodes)
            result = evaluate(model, Reader(reasoning, source), numbers, chunks)
            measured.update({f"{prefix}{name}@{chunks}": value for name, value in result.items()})
        model.train()

    phases = reasoning.phases
    if phases.operations_imitation.steps:
        trial.train_phase("operations_imitation", config, model, None)
    measure("imitated_" if phases.operations.steps else "")
    if phases.operations.steps:
        trial.train_phase("operations", config, model, None)
        measure("")
    return measured
