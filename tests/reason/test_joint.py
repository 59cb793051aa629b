"""Losses in one step: their sum, the positions of their measures, and a text loss equal to stage A's."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import TrainLoader
from cdrmix.errors import ConfigError
from cdrmix.model.loss import LossModel
from cdrmix.reason.experiments.base import small_model
from cdrmix.reason.joint import JointPhase
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.training.objective import Outcome


class Pull:
    """A phase whose loss is `strength` times the sum of the embedding, in two micro-batches."""

    measures = ("sum", "count")
    rolls_out = False
    passes_vary = False

    def __init__(self, name: str, strength: float, trained: str = "") -> None:
        self.name, self.strength, self.trained = name, strength, trained

    def trains(self, parameter: str) -> bool:
        return self.trained in parameter

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        del model, step, rank, processes

        def loss(model: StageBModel) -> Outcome:
            total = 0.5 * self.strength * model.language_model.embedding.weight.sum()
            return Outcome(total, torch.tensor([self.strength, 2.0]))

        return [loss, loss]

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        return {"mean": sums["sum"] / sums["count"]}


class Text:
    """A loader of one row in the given number of micro-batches."""

    def __init__(self, micro_batches: int) -> None:
        ids = torch.randint(0, 200, (micro_batches, 1, 12), generator=torch.Generator().manual_seed(1))
        ends = torch.tensor([0, 12], dtype=torch.int32)
        self.batches = [
            Batch(row, row.roll(-1), torch.ones(1, 12), ends, step=0, token_count=12.0 * micro_batches) for row in ids
        ]
        self.asked: list[int] = []

    def micro_batches(self, step: int) -> list[Batch]:
        self.asked.append(step)
        return self.batches


@pytest.fixture
def config() -> Config:
    changes = ["train.steps=7", "train.batch_rows=2", "reasoning.plastic_lora.rank=4"]
    return Config.from_yaml("configs/ablations/delta-recall.yaml", changes)


def test_losses_add_up_and_measures_keep_their_places(config: Config) -> None:
    model, text = small_model(config, 1), Text(2)
    own, other = Pull("own", 3.0, "embedding"), Pull("other", -1.0)
    joint = JointPhase(config, "own", own, [other], cast(TrainLoader, text))
    assert joint.measures == ("sum", "count", "text/loss", "text/tokens", "other/sum", "other/count")
    assert joint.trains("embedding.weight")
    assert not joint.trains("blocks.0")
    losses = joint.losses(model, 5, 0, 1)
    assert text.asked == [7 + 5]  # behind stage A's batches
    assert len(losses) == 2 + 2 + 2
    sums, total = torch.zeros(6), torch.zeros(())
    for loss in losses:
        outcome = loss(model)
        total = total + outcome.total
        sums += outcome.sums.detach()
    embedding = model.language_model.embedding.weight
    alone, nats = torch.zeros(()), 0.0
    for each in text.batches:
        parts = LossModel(model.language_model)(
            each.ids_BT, each.targets_BT, each.weights_BT, each.cu_seqlens_N, each.token_count, 0.5
        )
        alone, nats = alone + parts.total, nats + parts.next_token_sum.item()
    torch.testing.assert_close(total, alone + (3.0 - 1.0) * embedding.sum())
    shown = joint.record(dict(zip(joint.measures, sums.tolist(), strict=True)))
    assert shown == pytest.approx({"mean": 1.5, "text_loss": nats / 24, "other/mean": -0.5})
    assert 0.5 * math.log(272) < shown["text_loss"] < 2 * math.log(272)


def test_without_a_phase_of_its_own_the_whole_model_learns(config: Config) -> None:
    joint = JointPhase(config, "joint", None, [Pull("other", 1.0)], None)
    assert joint.trains("anything")
    assert joint.measures == ("other/sum", "other/count")
    assert len(joint.losses(small_model(config, 1), 0, 0, 1)) == 2


@pytest.mark.parametrize("phase", ["acceptance", "operations"])
def test_phases_that_train_heads_alone_replay_nothing(phase: str) -> None:
    with pytest.raises(ConfigError, match="the phase trains heads alone"):
        Config.from_yaml(
            "configs/cdrmix-reason-tiny.yaml", [f"reasoning.phases.{phase}={{train: own, replay: [text]}}"]
        )
