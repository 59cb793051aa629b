"""Phases that learn from rollouts: importance ratios of 1 at any temperature, and sums over processes under NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.agent import policy
from cdrmix.reason.agent.agent import Reading, Rewards
from cdrmix.reason.agent.policy import PolicyPhase
from cdrmix.reason.controller.controller import action_of, sampled
from cdrmix.reason.experiments.base import small_model
from cdrmix.reason.heads import ControllerHeads, OperationHeads, Summariser
from cdrmix.reason.model import StageBModel
from cdrmix.reason.operations import policy as operations
from cdrmix.reason.operations.policy import OperationsPhase
from cdrmix.reason.sources import source_of
from cdrmix.training import distributed

ABLATIONS = Path(__file__).parents[2] / "configs" / "ablations"
TEMPERATURES = pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])


def operations_phase(*overrides: str) -> tuple[OperationsPhase, StageBModel]:
    """The phase with a small model whose policy is far from uniform, so that the temperature matters."""
    small = ("model.d_model=32", "reasoning.memory.dim=16", "model.feed_forward.hidden=32")
    episodes = ("reasoning.operations.chunks=4", "reasoning.phases.operations.episodes=4")
    config = Config.from_yaml(ABLATIONS / "operations-index.yaml", [*small, *episodes, *overrides])
    reasoning = config.reasoning
    assert reasoning is not None
    torch.manual_seed(1)
    heads = OperationHeads(config.model.d_model)
    torch.nn.init.normal_(heads.policy.weight, std=0.5)
    model = StageBModel(
        LanguageModel(config.model, reasoning=reasoning),
        operations=heads,
        summary=Summariser(config.model.d_model, reasoning.memory.dim, reasoning.memory.summary_stride),
    )
    return OperationsPhase(config, source_of(reasoning.operations, reasoning.chunk)), model


def policy_config(*overrides: str) -> Config:
    small = ("model.d_model=32", "model.rwkv.head_size=16", "model.feed_forward.hidden=32")
    episodes = ("reasoning.agent.chunks=2", "reasoning.phases.policy.episodes=4")
    return Config.from_yaml(ABLATIONS / "token-memory-rl.yaml", [*small, *episodes, *overrides])


def policy_phase(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[PolicyPhase, StageBModel]:
    """The phase with rewards that differ within a group, although the model is not trained."""

    def rewards_of(reading: Reading, *_: Any) -> Rewards:
        total = -reading.answer_BA.sum(1).double() / 272
        return Rewards(total, total, total.abs(), total)

    monkeypatch.setattr(policy, "rewards_of", rewards_of)
    config = policy_config(*overrides)
    assert config.reasoning is not None
    return PolicyPhase(config, source_of(config.reasoning.agent, config.reasoning.chunk)), small_model(config, 1)


def changes_of(monkeypatch: pytest.MonkeyPatch, module: Any, phase: Any, model: StageBModel) -> Tensor:
    """log(new / old probability) of all tokens or decisions of the first update, as the loss gets them."""
    found: list[Tensor] = []
    plain = module.policy_loss

    def noting(new_SL: Tensor, old_SL: Tensor, advantages_S: Tensor, mask_SL: Tensor, *rest: Any) -> Any:
        found.append((new_SL - old_SL)[mask_SL.bool()].detach())
        return plain(new_SL, old_SL, advantages_S, mask_SL, *rest)

    monkeypatch.setattr(module, "policy_loss", noting)
    for loss in phase.losses(model, 0, 0, 1):
        model(loss)
    return torch.cat(found)


@TEMPERATURES
@pytest.mark.parametrize("train", ["own", "all"])
def test_operations_are_on_policy(monkeypatch: pytest.MonkeyPatch, temperature: float, train: str) -> None:
    """The ratio of every decision is 1; with the stored hidden states ("own") to the last bits of float32."""
    phase, model = operations_phase(
        f"reasoning.rl.temperature={temperature}", f"reasoning.phases.operations.train={train}"
    )
    changes = changes_of(monkeypatch, operations, phase, model)
    assert len(changes) > 100
    assert float(changes.abs().max()) < (2e-6 if train == "own" else 2e-5)


@TEMPERATURES
def test_the_token_memory_is_on_policy(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """A rollout runs token by token on a cache, the update in one pass: the ratios are 1 up to rounding."""
    phase, model = policy_phase(monkeypatch, f"reasoning.rl.temperature={temperature}")
    changes = changes_of(monkeypatch, policy, phase, model)
    assert len(changes) > 100
    assert float(changes.abs().max()) < 1e-4


@TEMPERATURES
def test_the_accept_head_is_sampled_from_what_is_learnt(temperature: float) -> None:
    """Its update uses no stored probabilities, so the decisions must have those that the update computes."""
    heads, rows = ControllerHeads(4, 2), 40_000
    torch.nn.init.constant_(heads.accept.bias, 1.0)
    ends_BD = torch.zeros(rows, 4)
    actions_B = action_of(sampled(heads, torch.Generator().manual_seed(1), temperature)(ends_BD))
    wanted_A = heads.log_probs(ends_BD[:1], temperature)[0].exp().double()
    found_A = torch.bincount(actions_B, minlength=3).double() / rows
    assert ((found_A - wanted_A).abs() < 5 * (wanted_A * (1 - wanted_A) / rows).sqrt()).all()


class Reached(Exception):
    """A collective was called."""


@pytest.mark.parametrize("name", ["operations", "policy"])
def test_collectives_get_tensors_of_their_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A process group with only NCCL refuses CPU tensors. Here the device `meta` takes the role of the GPU."""

    def all_reduce(values: Tensor, *_: Any) -> None:
        raise Reached(values.device.type)

    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert distributed.collective_device().type == "cuda"
    monkeypatch.setattr(distributed, "collective_device", lambda: torch.device("meta"))
    phase, model = operations_phase() if name == "operations" else policy_phase(monkeypatch)
    with pytest.raises(Reached, match="meta"):
        phase.losses(model, 0, 0, 2)


def test_sums_and_maxima_of_one_process_are_its_own_values() -> None:
    values = torch.tensor([1.0, 3.0])
    assert torch.equal(distributed.reduce_over_processes(values, 1, "sum"), values)
    assert torch.equal(distributed.reduce_over_processes(values, 1, "max"), values)
