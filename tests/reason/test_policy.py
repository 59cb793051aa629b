"""The policy phase: learning from groups, dropped groups, warnings, and reproducible results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Model, Rwkv
from cdrmix.config.schema_reasoning import (
    Controller,
    EpisodesOfDocuments,
    Imitation,
    Memory,
    Phases,
    PlasticLora,
    Policy,
    Reasoning,
    Rl,
)
from cdrmix.config.schema_run import Run
from cdrmix.config.schema_training import Train
from cdrmix.errors import ConfigError
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.agent import policy
from cdrmix.reason.agent.agent import Reading, Rewards, TokenMemory, read_episodes
from cdrmix.reason.agent.answers import AnswerScorer
from cdrmix.reason.agent.imitation import ImitationPhase
from cdrmix.reason.agent.policy import PolicyPhase, message_of_idleness, objective_of
from cdrmix.reason.episodes import Episodes, EpisodeSource
from cdrmix.reason.experiments.trial import Trial
from cdrmix.reason.model import StageBModel
from cdrmix.reason.rl import rollout
from cdrmix.reason.rl.grpo import OBJECTIVES, Advantages
from cdrmix.reason.sources import check_episodes, source_of
from cdrmix.training.objective import Outcome

PATIENCE = Rl.model_fields["patience"].default


def config_of(*, leak: float = 0.0, **rl: Any) -> Config:
    """A toy agent: 4 questions in groups of 4, two chunks."""
    model = Model(
        vocab_size=40,
        d_model=32,
        layers=2,
        attention_fraction=0.5,
        attention=Attention(heads=2, kv_heads=2),
        rwkv=Rwkv(head_size=16, decay_rank=4, iclr_rank=4, value_rank=4, gate_rank=4),
        feed_forward=FeedForward(kind="channel_mix", hidden=48),
    )
    reasoning = Reasoning(
        chunk=4,
        plastic_lora=PlasticLora(enabled=False, rank=4, alpha=0.2, decay=1.0),
        controller=Controller(step_budget=8, max_branches=1),
        memory=Memory(dim=8, top_k=1, max_tokens=64, tokens=4),
        rl=Rl(**({"horizon": 8, "latency_weight": 1.0, "stability_weight": 0.1, "group_size": 4} | rl)),
        agent=EpisodesOfDocuments(
            task="agent",
            tokens=True,
            chunks=2,
            difficulty={"keys": 6, "values": 6, "noise": 6, "pairs": 2, "queries": 1},
        ),
        phases=Phases(
            imitation=Imitation(steps=1, episodes=6, micro_batch=5, leak=leak),
            policy=Policy(steps=1, episodes=4, micro_batch=7),
        ),
    )
    train = Train(steps=1, batch_rows=1, micro_batch_rows=1, learning_rate=1e-3)
    return Config(run=Run(seed=3, threads=1), model=model, train=train, reasoning=reasoning)


@pytest.fixture
def varied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that an untrained model can do: small ids in the answer give a high reward."""

    def rewards_of(reading: Reading, *_: Any) -> Rewards:
        total = -reading.answer_BA.sum(1).double() / 40
        return Rewards(total, total, total.abs(), total)

    monkeypatch.setattr(policy, "rewards_of", rewards_of)


def phase_of(**rl: Any) -> PolicyPhase:
    config = config_of(**rl)
    return PolicyPhase(config, source_for(config))


def source_for(config: Config) -> EpisodeSource:
    assert config.reasoning is not None
    return source_of(config.reasoning.agent, config.reasoning.chunk)


def model_of() -> StageBModel:
    torch.manual_seed(2)
    model = StageBModel(LanguageModel(config_of().model))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def outcomes(phase: PolicyPhase | ImitationPhase, model: StageBModel, step: int = 0) -> list[Outcome]:
    return [model(loss) for loss in phase.losses(model, step, 0, 1)]


def record_of(phase: PolicyPhase, found: list[Outcome]) -> dict[str, float]:
    sums = torch.stack([one.sums for one in found]).sum(0).tolist()
    return phase.record(dict(zip(phase.measures, sums, strict=True)))


def gradient(model: StageBModel, found: list[Outcome]) -> torch.Tensor:
    model.zero_grad()
    torch.stack([one.total for one in found]).sum().backward()
    return torch.cat([p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in model.parameters()])


@pytest.mark.usefixtures("varied")
def test_on_the_policy_nothing_is_clipped() -> None:
    """The rollout's probabilities are those of the update, up to rounding: the ratio is 1."""
    phase, model = phase_of(), model_of()
    record = record_of(phase, outcomes(phase, model))
    assert record["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert record["clip_fraction"] == 0
    assert 0 < record["entropy"] <= math.log(40)
    assert record["latency"] > 0
    assert record["dropped_groups"] < 1


@pytest.mark.usefixtures("varied")
def test_the_gradient_raises_what_was_better() -> None:
    """One step along the gradient raises the mean of advantage times log probability of the same rollouts."""
    phase, model = phase_of(), model_of()

    def gain() -> float:
        return -sum(one.total.item() for one in found_of(model))

    losses = phase.losses(model, 0, 0, 1)

    def found_of(model: StageBModel) -> list[Outcome]:
        return [model(loss) for loss in losses]

    before, direction = gain(), gradient(model, found_of(model))
    with torch.no_grad():
        start = 0
        for parameter in model.parameters():
            size = parameter.numel()
            parameter -= 1e-3 * direction[start : start + size].view_as(parameter) / direction.norm()
            start += size
    assert gain() > before


@pytest.mark.usefixtures("varied")
def test_micro_batches_do_not_matter() -> None:
    """Sums in another order: float32, terms of one size."""
    small, large = phase_of(), phase_of()
    large.settings = large.settings.model_copy(update={"micro_batch": 1000})
    model = model_of()
    one, many = outcomes(large, model), outcomes(small, model)
    assert len(many) > len(one) == 2
    torch.testing.assert_close(gradient(model, many), gradient(model, one), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(
        torch.stack([x.sums for x in many]).sum(0), torch.stack([x.sums for x in one]).sum(0), rtol=1e-4, atol=1e-4
    )


@pytest.mark.usefixtures("varied")
def test_the_same_step_is_the_same_whatever_came_before() -> None:
    model = model_of()
    fresh, used = phase_of(), phase_of()
    for step in (0, 1):
        outcomes(used, model, step)
    assert torch.equal(gradient(model, outcomes(fresh, model, 2)), gradient(model, outcomes(used, model, 2)))
    assert not torch.equal(gradient(model, outcomes(fresh, model, 2)), gradient(model, outcomes(fresh, model, 3)))


@pytest.mark.usefixtures("varied", "own_settings")
def test_two_trainings_are_the_same_bit_for_bit(training: Callable[[Config, int, float], Config]) -> None:
    weights = []
    for _ in range(2):
        model = model_of()
        Trial().train(training(config_of(), 3, 1e-2), model, phase_of(kl_weight=0.1))
        weights.append(model.state_dict())
    for name, x in weights[0].items():
        assert torch.equal(x, weights[1][name]), name


@pytest.mark.usefixtures("varied")
def test_credit_to_the_final_turn_teaches_answers_alone() -> None:
    every, last = phase_of(), phase_of(credit="final_turn")
    model = model_of()
    all_turns, final = every.losses(model, 0, 0, 1), last.losses(model, 0, 0, 1)
    answer = 1 + 1 + 1 + 4 + 1
    assert {loss.batch.prompts_SL.shape[1] for loss in final} == {answer}  # type: ignore[attr-defined]
    assert {loss.batch.prompts_SL.shape[1] for loss in all_turns} == {answer, answer + 5}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("heads", "rows", "short"), [(1, None, False), (2, None, False), (1, 8, False), (2, 4, True)])
def test_gain_credits_a_turn_without_those_before_it(
    heads: int, rows: int | None, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advantage of a turn is the reward of the episode less the likelihood of the right answer after the memory
    before the turn, less the mean of that over the group. Memories are put together here from what was written.

    rows: of rollouts that are made at once. short: every second document has an empty second chunk.
    """
    readings = []

    def read(*arguments: Any, **named: Any) -> Reading:
        readings.append((read_episodes(*arguments, **named), arguments[2]))
        return readings[-1][0]

    monkeypatch.setattr(policy, "read_episodes", read)
    config = config_of(credit="gain")
    assert config.reasoning is not None
    memory = config.reasoning.memory.model_copy(update={"heads": heads})
    settings = config.reasoning.phases.policy.model_copy(update={"rollout_rows": rows})
    phases = config.reasoning.phases.model_copy(update={"policy": settings})
    changes = {"memory": memory, "phases": phases}
    config = config.model_copy(update={"reasoning": config.reasoning.model_copy(update=changes)})
    source = source_for(config)
    made = source.batch

    def batch(numbers: Sequence[int], chunks: int) -> Episodes:
        episodes = made(numbers, chunks)
        if short:
            episodes.chunks_BNC[[number % 2 == 1 for number in numbers], 1] = source.pad
        return episodes

    monkeypatch.setattr(source, "batch", batch)
    phase, model = PolicyPhase(config, source), model_of()
    losses = phase.losses(model, 0, 0, 1)
    assert len(readings) == (1 if rows is None else 16 // rows)
    writes, answers = [], []
    for reading, episodes in readings:
        parts = TokenMemory.empty(phase.window, len(reading.exact_B), torch.device("cpu"))
        for number, turn in enumerate(reading.turns, 1):
            likelihood = phase.scorer.likelihood(model.language_model, parts.shown(), episodes)
            credit_G4 = (policy.rewards_of(reading, phase.rl, 8).total_B - likelihood).view(-1, 4)
            learnt_G = (credit_G4 != credit_G4[:, :1]).any(1)  # before the first chunk a group has one memory
            advantages = (credit_G4 - credit_G4.mean(1, keepdim=True))[learnt_G].flatten()
            if number == len(reading.turns):
                answers.append(advantages)
                break
            read_R = (episodes.chunks_BNC[:, number - 1] != source.pad).any(1).repeat_interleave(4)
            assert torch.equal(turn.generated.mask_BN.any(1), read_R)
            writes.append(advantages)
            parts = parts.write(phase.window.written(turn.generated), number, read_R)
    found = torch.cat([loss.batch.advantages_S for loss in losses])  # type: ignore[attr-defined]
    torch.testing.assert_close(found, torch.cat([*writes, *answers]))
    assert len(set(found.tolist())) > 16, "turns of an episode differ"


def test_gain_leaves_out_all_turns_of_a_group_with_a_failed_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    phase, model = phase_of(credit="gain"), model_of()
    whole = sum(len(loss.batch.prompts_SL) for loss in phase.losses(model, 0, 0, 1))  # type: ignore[attr-defined]
    scored = phase.scorer.__class__.__call__

    def one_fails(self: AnswerScorer, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values_B, _ = scored(self, *arguments)
        return values_B, torch.arange(len(values_B)) != 6  # of the second group

    monkeypatch.setattr(AnswerScorer, "__call__", one_fails)
    losses = phase_of(credit="gain").losses(model, 0, 0, 1)
    assert whole == 2 * 16  # the second chunk and the answer: before the first chunk a group has one memory
    assert sum(len(loss.batch.prompts_SL) for loss in losses) == 2 * 12  # type: ignore[attr-defined]
    assert record_of(phase, [model(loss) for loss in losses])["reward_errors"] == 1 / 16


def test_a_turn_that_may_not_write_is_not_learnt_from() -> None:
    """With a budget of one change, rows that have spent it write nothing in the later turns, in which others write."""
    phase, model = phase_of(), model_of()
    episodes, some = phase.source.batch(range(4), 3), False
    for seed in range(10):  # in most of them all rows change their memory in the first turn, and there is no second
        generator = torch.Generator().manual_seed(seed)
        options = {"temperature": 1.0, "generator": generator, "group": 4, "keep_turns": True}
        reading = read_episodes(model.language_model, phase.window, episodes, step_budget=1, **options)
        memory, spent = TokenMemory.empty(phase.window, 16, torch.device("cpu")), torch.zeros(16, dtype=torch.bool)
        for number, turn in enumerate(reading.turns[:-1], 1):
            assert torch.equal(turn.generated.mask_BN.any(1), ~spent)
            some |= bool(spent.any())
            memory = memory.write(phase.window.written(turn.generated), number, ~spent)
            spent |= (memory.changed_BH == number).any(1)
    assert some


@pytest.mark.usefixtures("varied")
def test_entropy_is_rewarded_by_its_weight() -> None:
    """The loss falls by the weight times the mean entropy of a token, and so does its gradient."""
    model, found = model_of(), []
    for weight in (0.0, 0.5, 1.0):
        phase = phase_of(entropy_weight=weight)
        losses = outcomes(phase, model)
        found.append((sum(one.total.item() for one in losses), gradient(model, losses), record_of(phase, losses)))
    (plain, plain_gradient, record), (half, half_gradient, _), (_, whole_gradient, whole_record) = found
    assert record["entropy"] > 0.1
    assert plain - half == pytest.approx(0.5 * record["entropy"], rel=1e-4)
    assert whole_record["loss"] == pytest.approx(record["loss"] - record["entropy"], rel=1e-4)
    # Float32 sums of some hundred terms.
    change = half_gradient - plain_gradient
    assert change.norm() > 0
    torch.testing.assert_close(whole_gradient - plain_gradient, 2 * change, rtol=1e-3, atol=1e-6)


def test_equal_rewards_teach_nothing_and_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """All weights are 0, so all rewards and the gradient are 0; after rl.patience steps a warning gives remedies."""
    phase = phase_of(task_weight=0.0, latency_weight=0.0, stability_weight=0.0)
    model = model_of()
    found = outcomes(phase, model)
    assert not gradient(model, found).any()
    record = record_of(phase, found)
    assert record["dropped_groups"] == 1
    for step in range(1, PATIENCE - 1):
        phase.losses(model, step, 0, 1)
    assert not capsys.readouterr().err
    phase.losses(model, PATIENCE - 1, 0, 1)
    (said,) = capsys.readouterr().err.splitlines()
    assert f"for {PATIENCE} steps" in said
    assert "reasoning.phases.imitation" in said


def test_what_is_solved_is_not_called_too_hard() -> None:
    assert "make reasoning.agent harder" in message_of_idleness(20, 1.0, 8)
    assert "too hard" in message_of_idleness(20, 0.0, 8)


def test_a_group_without_difference_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four groups, three get equal rewards: the update uses only the sequences of the fourth."""

    def read(*arguments: Any, **named: Any) -> Reading:
        reading = read_episodes(*arguments, **named)
        return reading._replace(changes_B=torch.tensor([1] * 12 + [0, 1, 2, 2]), exact_B=torch.zeros(16).bool())

    monkeypatch.setattr(policy, "read_episodes", read)
    phase, model = phase_of(stability_weight=0.0), model_of()
    losses = phase.losses(model, 0, 0, 1)
    assert sum(len(loss.batch.prompts_SL) for loss in losses) == 4 * 3  # type: ignore[attr-defined]
    assert record_of(phase, [model(loss) for loss in losses])["dropped_groups"] == 0.75


def test_a_reward_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any, **named: Any) -> Reading:
        reading = read_episodes(*arguments, **named)
        return reading._replace(changes_B=torch.where(torch.arange(16) == 5, math.nan, 1.0))

    monkeypatch.setattr(policy, "read_episodes", read)
    with pytest.raises(ValueError, match="the reward of rollout 5 is nan"):
        phase_of().losses(model_of(), 0, 0, 1)


def test_options_change_the_objective() -> None:
    reasoning = config_of(objective="dapo", clip_low=0.1, kl_weight=0.02, deviation=False).reasoning
    assert reasoning is not None
    found = objective_of(reasoning.rl)
    assert (found.clip_low, found.clip_high, found.kl_weight, found.deviation) == (0.1, 0.28, 0.02, False)
    standard = config_of().reasoning
    assert standard is not None
    assert objective_of(standard.rl) == OBJECTIVES["memagent"]


@pytest.mark.usefixtures("varied")
def test_the_divergence_is_from_the_model_as_it_was() -> None:
    phase, model = phase_of(kl_weight=0.1), model_of()
    assert record_of(phase, outcomes(phase, model))["divergence"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        model.language_model.embedding.weight.mul_(1.2)
    assert record_of(phase, outcomes(phase, model, 1))["divergence"] > 1e-3
    with pytest.raises(ConfigError, match="kl_weight: 0"):
        phase_of(kl_weight=0.1).losses(model, 5, 0, 1)


def test_imitation_is_divided_among_processes() -> None:
    """The micro-batches of two processes together are those of one, and both have the same number."""
    config, model = config_of(leak=0.5), model_of()
    phase = ImitationPhase(config, source_for(config))
    whole = outcomes(phase, model)
    shares = [[model(loss) for loss in phase.losses(model, 0, rank, 2)] for rank in range(2)]
    assert len(shares[0]) == len(shares[1])
    torch.testing.assert_close(gradient(model, [*shares[0], *shares[1]]), gradient(model, whole), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("own_settings")
def test_imitation_learns(training: Callable[[Config, int, float], Config]) -> None:
    config, model = config_of(), model_of()
    phase = ImitationPhase(config, source_for(config))
    first = sum(one.total.item() for one in outcomes(phase, model))
    *_, last = Trial().train(training(config, 60, 1e-2), model, phase)
    assert last["loss"] < 0.7 * first


def test_rollouts_in_parts_are_those_of_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts of the most probable tokens, since the drawn numbers depend on the rows that are made at once. Those of
    a group are equal then, so their advantages are set to 1 to 4, whose sum is not 0."""

    def group_advantages(rewards_N: torch.Tensor, group_size: int, **_: Any) -> Advantages:
        advantages = 1.0 + torch.arange(len(rewards_N), dtype=torch.float64) % group_size
        return Advantages(advantages, torch.ones(len(rewards_N), dtype=torch.bool), len(rewards_N) // group_size, 0)

    def most_probable(logits_BV: torch.Tensor, temperature: float, _: object) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs_B, token_B = (logits_BV / temperature).log_softmax(-1).max(-1)
        return token_B, log_probs_B

    monkeypatch.setattr(policy, "group_advantages", group_advantages)
    monkeypatch.setattr(rollout, "_take", most_probable)
    model, gradients, records = model_of(), [], []
    for rows in (None, 1, 8, 1000):
        phase = phase_of(rollouts_every=1)
        phase.settings = phase.settings.model_copy(update={"rollout_rows": rows})
        found = outcomes(phase, model)
        gradients.append(gradient(model, found))
        records.append(record_of(phase, found))
        assert len(phase.shown) == 4, "the rollouts of the first question"
    assert gradients[0].abs().max() > 0
    for other, record in zip(gradients[1:], records[1:], strict=True):
        # The same sums in another order: float32, some hundred terms of the largest gradient's size.
        torch.testing.assert_close(other, gradients[0], rtol=0, atol=1e-5 * float(gradients[0].abs().max()))
        assert record == pytest.approx(records[0], rel=1e-4, abs=1e-6)


def test_the_likelihood_of_the_right_answer_is_a_reward() -> None:
    """The geometric mean of the probabilities of the answer's tokens, by one pass a token."""
    config = config_of(reward="likelihood")
    source, phase, model = source_for(config), phase_of(reward="likelihood"), model_of()
    episodes = source.batch(range(4), 2)
    reading = read_episodes(
        model.language_model,
        phase.window,
        episodes,
        temperature=1.0,
        generator=torch.Generator().manual_seed(1),
        step_budget=8,
        group=4,
    )
    found = phase.scorer.likelihood(model.language_model, reading.memory.shown(), episodes)
    window = phase.window
    for row in range(16):
        answer = episodes.answer_BA[row // 4]
        wanted = [*answer[answer != window.pad].tolist(), window.marks.end][: window.answer]
        ids = torch.cat(
            [
                window.begin(episodes.question_BQ[row // 4 : row // 4 + 1])[0],
                window.last(reading.memory.shown()[row : row + 1])[0],
            ]
        ).tolist()
        logarithms = []
        for token in wanted:
            with torch.no_grad():
                logits = model.language_model.logits(model.language_model(torch.tensor([ids])).hidden_BTD[:, -1])
            logarithms.append(float(logits.log_softmax(-1)[0, token]))
            ids.append(token)
        # float32 logits of two passes with other lengths
        assert float(found[row]) == pytest.approx(math.exp(sum(logarithms) / len(logarithms)), rel=1e-4)


def test_token_ids_have_no_rewards_by_text() -> None:
    for check in (lambda: check_episodes(config_of(reward="f1")), lambda: phase_of(reward="f1")):
        with pytest.raises(ConfigError, match="reward=f1 compares texts, and the agent's task has none"):
            check()


@pytest.mark.usefixtures("varied")
def test_episodes_grow_from_those_of_imitation() -> None:
    """With growth_steps a step's rollouts have 2 to 6 chunks, and then stay at 6."""
    config = config_of()
    assert config.reasoning is not None
    growing = Policy(steps=1, episodes=4, micro_batch=7, chunks=6, growth_steps=4)
    reasoning = config.reasoning.model_copy(update={"phases": Phases(policy=growing)})
    phase = PolicyPhase(config.model_copy(update={"reasoning": reasoning}), source_for(config))
    model = model_of()
    turns = [record_of_turns(phase, model, step) for step in range(6)]
    assert turns == [2, 3, 4, 5, 6, 6]


def record_of_turns(phase: PolicyPhase, model: StageBModel, step: int) -> float:
    """Chunks of a rollout; a step has 4 questions in groups of 4."""
    sums = torch.stack([one.sums for one in outcomes(phase, model, step)]).sum(0)
    return sums[phase.measures.index("turns")].item() / 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["growth_steps=9", "steps=8"], "at most the steps of the phase, 8"),
        (["growth_steps=2", "steps=8", "chunks=1"], "episodes do not grow from reasoning.agent.chunks=3 to chunks=1"),
    ],
)
def test_growth_that_cannot_be_is_refused(changes: list[str], message: str) -> None:
    overrides = [f"reasoning.phases.policy.{change}" for change in changes]
    with pytest.raises(ConfigError, match=message):
        Config.from_yaml("configs/cdrmix-reason-tiny.yaml", overrides)
