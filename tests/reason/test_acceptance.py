"""Phase B2: the head learns which chunks to reject, with the same bits every time; its measures; its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import Rl
from cdrmix.errors import ConfigError
from cdrmix.model.cache import select
from cdrmix.reason.controller import acceptance
from cdrmix.reason.controller.acceptance import AcceptancePhase, answer, measure, read
from cdrmix.reason.controller.controller import Controller, EpisodeState, always, by_head, by_value, never
from cdrmix.reason.episodes import FIRST_HELD_OUT, Probe, TokenSource
from cdrmix.reason.experiments.base import small_model
from cdrmix.reason.experiments.trial import Trial
from cdrmix.reason.heads import ControllerHeads
from cdrmix.reason.model import StageBModel
from cdrmix.reason.phase import phase_config
from cdrmix.reason.sources import source_of

FILE = "configs/ablations/accept-head.yaml"
PATIENCE = Rl.model_fields["patience"].default
SMALL = (
    "run.threads=1",
    *("model.d_model=32", "model.rwkv.head_size=16", "reasoning.phases.acceptance.episodes=8", "reasoning.chunk=4"),
    "reasoning.acceptance.difficulty={pairs: 2, queries: 2, good: 2, bad_pairs: 1, noise: 8}",
)


def make(*overrides: str) -> tuple[Config, StageBModel, TokenSource]:
    config = Config.from_yaml(FILE, [*SMALL, *overrides])
    assert config.reasoning is not None
    assert config.reasoning.acceptance is not None
    model = small_model(config, 1)
    model.controller = ControllerHeads(config.model.d_model, config.reasoning.controller.max_branches)
    source = source_of(config.reasoning.acceptance, config.reasoning.chunk)
    assert isinstance(source, TokenSource)
    return config, model, source


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards without a trained language model: the share of right decisions of a rollout, by a bad chunk's mark."""
    decided: list[Tensor] = []
    plain = acceptance.read

    def noting(controller: Controller, chunks_BNC: Tensor, decide: Any) -> Any:
        reading = plain(controller, chunks_BNC, decide)
        decided.append((reading.actions_BN > 0) == (chunks_BNC[:, :, -1] != 8))
        return reading

    def rewarding(controller: Controller, episode: EpisodeState, probe: Probe) -> Tensor:
        return decided.pop().float().mean(1)

    monkeypatch.setattr(acceptance, "read", noting)
    monkeypatch.setattr(acceptance, "answer", rewarding)


def train(*overrides: str) -> tuple[StageBModel, list[dict[str, float]], AcceptancePhase]:
    config, model, source = make(*overrides)
    assert config.reasoning is not None
    phase = AcceptancePhase(config, source)
    section = config.reasoning.phases.acceptance.model_copy(update={"learning_rate": 6e-2, "warmup_steps": 0})
    return model, Trial().train(phase_config(config, section), model, phase), phase


@pytest.mark.usefixtures("judged", "own_settings")
@pytest.mark.parametrize("branches", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_head_learns_to_reject_marked_chunks(branches: int) -> None:
    """On held-out episodes; the value head, fitted to the same rewards, makes the same decisions."""
    model, said, phase = train("reasoning.phases.acceptance.steps=18", f"reasoning.controller.max_branches={branches}")
    first, last = said[0], said[-1]
    # Zero logits: the entropy of as many alternatives, of which all but one commit; 256 decisions, 5 deviations
    assert first["entropy"] == pytest.approx(torch.tensor(1.0 + branches).log().item())
    assert abs(first["accept_bad"] - branches / (1 + branches)) < 5 * 0.5 / 256**0.5
    assert last["reward"] > first["reward"] + 0.2
    assert last["value_error"] < first["value_error"]
    assert model.controller is not None
    controller = Controller(model.language_model, phase.reasoning)
    batch = phase.source.batch(range(FIRST_HELD_OUT, FIRST_HELD_OUT + 32), 8)
    for rule in (by_head(model.controller), by_value(model.controller)):
        actions = read(controller, batch.chunks_BNC, rule).actions_BN
        # Rejecting all is right for 6 of 8 chunks, and deciding by chance for half of them.
        assert ((actions > 0) == batch.good_BN).float().mean() > 0.9


@pytest.mark.usefixtures("judged", "own_settings")
def test_the_same_seed_gives_the_same_heads() -> None:
    models = [train("reasoning.phases.acceptance.steps=4", f"run.seed={seed}")[0] for seed in (1, 1, 2)]
    one, again, other = (list(model.controller.parameters()) for model in models)  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0], other[0])


def test_heads_read_what_chunks_do_not_share() -> None:
    """The first step sets centre and spread from its episodes, equal in every process: inputs of mean 0, spread 1."""
    config, model, source = make()
    phase, heads = AcceptancePhase(config, source), model.controller
    assert heads is not None
    taken = []
    for step, rank in ((0, 0), (0, 1), (1, 0)):
        phase.losses(model, step, rank, 2)
        taken.append(torch.stack([heads.centre, heads.spread]))
    assert torch.equal(taken[0], taken[1])
    assert torch.equal(taken[0], taken[2]), "later steps change nothing"
    sample = torch.randn(1000, 32, generator=torch.Generator().manual_seed(1)) * heads.spread + heads.centre
    with torch.no_grad():
        heads.accept.weight.fill_(1.0)
        # A mean of 1000 sums of 32 of deviation 1 each: 5 deviations of it
        assert abs(float(heads.accept_logits(sample).mean())) < 5 * (32 / 1000) ** 0.5


def test_only_the_heads_are_trained_and_a_step_knows_no_other() -> None:
    """The language model and the adapters keep their bits; a step's rollouts depend only on its number."""
    config, model, source = make()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    phase = AcceptancePhase(config, source)
    outcome = model(phase.losses(model, 7, 0, 1)[0])
    again = AcceptancePhase(config, source)
    again.losses(model, 3, 0, 1)
    assert torch.equal(model(again.losses(model, 7, 0, 1)[0]).total, outcome.total)
    outcome.total.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name in before if phase.trains(name)}
    assert trained == {f"controller.{head}.{part}" for head in ("accept", "value") for part in ("weight", "bias")}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert len(phase.measures) == len(outcome.sums)


@pytest.mark.usefixtures("judged", "own_settings")
def test_processes_divide_a_step() -> None:
    """Losses and sums of two processes add up to those of one, with each group, decision and rollout counted once."""
    config, model, source = make()
    phase = AcceptancePhase(config, source)
    whole = model(phase.losses(model, 0, 0, 1)[0])
    parts = [model(phase.losses(model, 0, rank, 2)[0]) for rank in range(2)]
    counts = ("rollouts", "good", "bad", "groups", "decisions")
    for name in counts:
        position = phase.measures.index(name)
        assert sum(part.sums[position] for part in parts) == whole.sums[position]
    with pytest.raises(ConfigError, match=r"episodes is 8; .* multiple of the 3 processes"):
        phase.losses(model, 0, 0, 3)


def test_processes_roll_out_other_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    config, model, source = make()
    batch, asked = source.batch, []

    def noted(numbers: list[int], chunks: int) -> Any:
        asked.extend(numbers)
        return batch(numbers, chunks)

    monkeypatch.setattr(source, "batch", noted)
    phase = AcceptancePhase(config, source)
    for rank in range(2):
        phase.losses(model, 1, rank, 2)
    assert sorted(asked) == list(range(8, 16))


@pytest.mark.usefixtures("judged", "own_settings")
def test_micro_batches_change_only_rounding() -> None:
    """Rollouts are sampled row by row in order, so passes of 16 rows make (nearly) the decisions of a pass of 64."""
    outcomes = []
    for rows in (16, 64):
        config, model, source = make(f"reasoning.phases.acceptance.micro_batch={rows}")
        phase = AcceptancePhase(config, source)
        outcomes.append(
            phase.record(dict(zip(phase.measures, model(phase.losses(model, 0, 0, 1)[0]).sums.tolist(), strict=True)))
        )
    assert outcomes[0]["dropped_groups"] == outcomes[1]["dropped_groups"] == 0
    assert outcomes[0]["entropy"] == pytest.approx(outcomes[1]["entropy"])


@pytest.mark.slow
def test_a_task_that_no_one_can_solve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config, model, source = make()
    phase = AcceptancePhase(config, source)

    def losses(reward: float, steps: int) -> None:
        monkeypatch.setattr(acceptance, "answer", lambda *_: torch.full((64,), reward))
        for step in range(steps):
            phase.losses(model, step, 0, 1)

    losses(1.0, PATIENCE + 1)  # all right in all: nothing to be learnt, and nothing wrong
    with pytest.raises(ConfigError, match=r"all 8 groups .* phases\.plasticity more steps, .*fewer than 6 chunks"):
        losses(0.25, PATIENCE)
    assert model.controller is not None
    with torch.no_grad():
        model.controller.accept.bias.fill_(20.0)
    with pytest.raises(ConfigError, match=r"decides with certainty at every chunk .*learning_rate"):
        losses(0.25, PATIENCE)


def test_answers_are_what_greedy_generation_would_give() -> None:
    """The share of right answers uses the most probable token at each key, from the state after the last chunk."""
    config, model, source = make()
    assert config.reasoning is not None
    controller = Controller(model.language_model, config.reasoning)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".plastic." in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    batch = source.batch(range(4), 6)
    probe = source.probe(batch)
    episode = read(controller, batch.chunks_BNC, always).episode
    likeliest = torch.stack(
        [
            model.language_model.logits(
                model.language_model(row[None, : t + 1], cache=one_row(episode, n)).hidden_BTD[0, -1]
            ).argmax()
            for n, row in enumerate(probe.ids_BT)
            for t in range(0, probe.ids_BT.shape[1], 2)
        ]
    ).view(4, -1)
    forged = Probe(probe.ids_BT, probe.targets_BT.clone())
    forged.targets_BT[:, ::2] = likeliest
    assert answer(controller, episode, forged).tolist() == [1.0] * 4
    forged.targets_BT[1, 0] = (likeliest[1, 0] + 1) % source.vocab_size
    share = (likeliest.shape[1] - 1) / likeliest.shape[1]
    assert answer(controller, episode, forged).tolist() == [1.0, share, 1.0, 1.0]


def one_row(episode: EpisodeState, row: int) -> Any:
    (group,) = episode.groups
    assert group.cache is not None
    return select(group.cache, torch.tensor([row]))


def test_measures_of_a_rule() -> None:
    config, model, source = make()
    assert config.reasoning is not None
    controller = Controller(model.language_model, config.reasoning)
    numbers = range(FIRST_HELD_OUT, FIRST_HELD_OUT + 5)
    every, none = (measure(controller, source, rule, numbers, 6) for rule in (always, never))
    assert (every["accept_good"], every["accept_bad"]) == (1.0, 1.0)
    assert (none["accept_good"], none["accept_bad"]) == (0.0, 0.0)


def test_the_committed_shares_are_of_good_and_of_bad_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every good chunk is committed, and the bad ones of the first of five episodes."""
    config, model, source = make()
    assert config.reasoning is not None
    numbers = range(FIRST_HELD_OUT, FIRST_HELD_OUT + 5)
    good_BN = source.batch(numbers, 6).good_BN
    committed_BN = good_BN.clone()
    committed_BN[0] = True
    plain = acceptance.read
    decided = committed_BN.long()
    monkeypatch.setattr(acceptance, "read", lambda *arguments: plain(*arguments)._replace(actions_BN=decided))
    controller = Controller(model.language_model, config.reasoning)
    measured = measure(controller, source, always, numbers, 6)
    bad, of_first = int((~good_BN).sum()), int((~good_BN[0]).sum())
    assert 0 < of_first < bad
    assert measured["accept_good"] == 1
    assert measured["accept_bad"] == pytest.approx(of_first / bad)


def test_chunks_beyond_the_step_budget_are_not_read() -> None:
    config, model, source = make("reasoning.controller.step_budget=6")
    assert config.reasoning is not None
    controller = Controller(model.language_model, config.reasoning)
    batch = source.batch(range(3), 8)
    within, beyond = (read(controller, chunks, always) for chunks in (batch.chunks_BNC[:, :6], batch.chunks_BNC))
    assert beyond.episode.steps == 6
    assert controller.steps_left(beyond.episode) == 0
    assert torch.equal(beyond.episode.commits_B, torch.tensor([6, 6, 6]))
    assert torch.equal(beyond.actions_BN[:, :6], within.actions_BN)
    assert not beyond.actions_BN[:, 6:].any()
    assert torch.equal(beyond.ends_BND[:, :6], within.ends_BND)
    probe = source.probe(batch)
    assert torch.equal(*(answer(controller, reading.episode, probe) for reading in (within, beyond)))
    with pytest.raises(AssertionError, match="within the step budget"):
        controller.step(beyond.episode, batch.chunks_BNC[:, 6], always)


def test_training_episodes_are_within_the_step_budget() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)reasoning.acceptance.chunks.*at most reasoning.controller.step_budget=5"
    ):
        make("reasoning.controller.step_budget=5")
