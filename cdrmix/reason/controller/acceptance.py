"""Phase B2: the accept head learns by groups of rollouts which chunks to reject.

A rollout reads an episode chunk by chunk and samples at every chunk whether to commit it (controller.py). Its reward is
the share of the answers that are right afterwards. The baseline is the mean reward of the episode's other rollouts
(rl/grpo.py). The language model and its adapters are frozen, so the update needs nothing but the hidden states at the
ends of chunks. The value head is fitted to the rewards by least squares; the advantages do not use it.

Shapes: R rollouts (G of each episode), N chunks, D model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.data.tasks import IGNORED
from cdrmix.errors import ConfigError, NonFiniteLossError
from cdrmix.reason.agent.policy import objective_of
from cdrmix.reason.controller.controller import (
    Controller,
    Decide,
    EpisodeState,
    action_of,
    sampled,
)
from cdrmix.reason.episodes import EpisodeSource, Probe
from cdrmix.reason.heads import ControllerHeads
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.phase import PHASES, Sources, generator_of, reasoning_of
from cdrmix.reason.rl.grpo import Advantages, Totals, entropy, group_advantages, policy_loss
from cdrmix.training.objective import Outcome

EVALUATION_ROWS = 256  # episodes in one forward pass


class Reading(NamedTuple):
    """The result of reading a batch of episodes: the state; every decision, int64 [B, N] (0: rolled back, 1 + s: branch
    s); the hidden states [B, N, D] that the decisions were made from. Chunks beyond the step budget are not read: their
    decisions and hidden states are 0.
    """

    episode: EpisodeState
    actions_BN: Tensor
    ends_BND: Tensor


@torch.no_grad()
def read(controller: Controller, chunks_BNC: Tensor, decide: Decide) -> Reading:
    """Reads episodes to their last chunk, or to the end of the step budget; `decide` decides on every chunk."""
    episode = controller.begin(len(chunks_BNC))
    actions, ends = [], []
    for ids_BC in chunks_BNC[:, : controller.steps_left(episode)].unbind(1):
        episode, decision, hidden_BCD = controller.step(episode, ids_BC, decide)
        actions.append(action_of(decision))
        ends.append(hidden_BCD[:, -1])
    unread = chunks_BNC.shape[1] - len(actions)
    actions += [torch.zeros_like(actions[0])] * unread
    ends += [torch.zeros_like(ends[0])] * unread
    return Reading(episode, torch.stack(actions, 1), torch.stack(ends, 1))


@torch.no_grad()
def answer(controller: Controller, episode: EpisodeState, probe: Probe) -> Tensor:
    """float32 [B]: the share of the answer's tokens that are most probable, given the right tokens before them.

    1 means that greedy generation gives the answer.
    """
    device = episode.commits_B.device
    targets_BT = probe.targets_BT.to(device)
    asked_BT = targets_BT != IGNORED
    hidden_BTD = controller.ask(episode, probe.ids_BT.to(device))
    right_BT = torch.zeros_like(asked_BT)
    right_BT[asked_BT] = controller.model.logits(hidden_BTD[asked_BT]).argmax(-1) == targets_BT[asked_BT]
    return right_BT.sum(1).float() / asked_BT.sum(1).clamp(min=1)


class _Rollouts(NamedTuple):
    """One step's rollouts of this process, as the update reads them."""

    ends_RND: Tensor
    actions_RN: Tensor
    good_RN: Tensor
    rewards_R: Tensor


class AcceptancePhase:
    """Phase B2. A step takes `phases.acceptance.episodes` episodes, each rolled out `rl.group_size` times.

    The loss is a mean over all decisions, also those of dropped groups: so no process needs counts from the others. If
    the objective has a KL term, the reference policy is the initial one, in which all actions are equally probable.
    Raises ConfigError if the configuration does not fit, and after rl.patience steps that taught nothing.
    """

    name = "acceptance"
    rolls_out = True
    passes_vary = False
    measures = (
        "loss",
        "reward",
        "solved",
        "rollouts",
        "committed_good",
        "good",
        "committed_bad",
        "bad",
        "dropped_groups",
        "groups",
        "entropy",
        "clipped",
        "value_error",
        "decisions",
    )

    def __init__(self, config: Config, source: EpisodeSource) -> None:
        assert config.reasoning is not None
        reasoning = config.reasoning
        self.reasoning, self.source, self.seed = reasoning, source, config.run.seed
        self.phase, self.rl = reasoning.phases.acceptance, reasoning.rl
        self.episodes = reasoning.acceptance or reasoning.plasticity
        self.objective = objective_of(self.rl)
        self._idle = 0  # successive steps in which all groups were dropped; starts again at 0 when a run is resumed

    def trains(self, parameter: str) -> bool:
        """The two heads."""
        return parameter.startswith("controller.")

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """Rolls out this process's episodes, and returns the single micro-batch of their update."""
        count, group = self.phase.episodes, self.rl.group_size
        if count % processes:
            raise ConfigError(
                f"reasoning.phases.acceptance.episodes is {count}; it must be a multiple of the {processes} processes"
            )
        if step == 0:
            self._calibrate(model)
        numbers = range(step * count + rank, (step + 1) * count, processes)
        rollouts = self._roll_out(model, numbers, generator_of(self.seed, self.name, step, rank), group)
        try:
            advantages = group_advantages(rollouts.rewards_R, group, deviation=self.objective.deviation)
        except ValueError as error:
            raise NonFiniteLossError(f"phase acceptance, step {step}: {error}") from error
        self._watch(model, rollouts, advantages)
        decisions = count * group * self.episodes.chunks
        return [lambda trained: self._loss(trained, rollouts, advantages, decisions)]

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """Means and rates. A rate without cases is absent, such as accept_bad without bad chunks."""
        rates = {
            "loss": (sums["loss"], 1.0),
            "reward": (sums["reward"], sums["rollouts"]),
            "solved": (sums["solved"], sums["rollouts"]),
            "accept_good": (sums["committed_good"], sums["good"]),
            "accept_bad": (sums["committed_bad"], sums["bad"]),
            "dropped_groups": (sums["dropped_groups"], sums["groups"]),
            "entropy": (sums["entropy"], sums["decisions"]),
            "clip_fraction": (sums["clipped"], sums["decisions"]),
            "value_error": (sums["value_error"], sums["decisions"]),
        }
        return {name: part / whole for name, (part, whole) in rates.items() if whole}

    def _calibrate(self, model: StageBModel) -> None:
        """Sets the heads' centre and spread from all episodes of the first step, so every process has the same."""
        rollouts = self._roll_out(model, range(self.phase.episodes), generator_of(self.seed, "centre", 0), group=1)
        _heads(model).calibrate(rollouts.ends_RND)

    @torch.no_grad()
    def _roll_out(
        self, model: StageBModel, numbers: Sequence[int], generator: torch.Generator, group: int
    ) -> _Rollouts:
        """Rolls out every episode `group` times, in neighbouring rows, with at most micro_batch rows in a pass."""
        heads = _heads(model)
        controller = Controller(model.language_model, self.reasoning)
        decide = sampled(heads, generator, self.rl.temperature)
        batch = self.source.batch(list(numbers), self.episodes.chunks)
        probe = self.source.probe(batch)
        rows_R = torch.arange(len(numbers)).repeat_interleave(group)
        device = next(model.language_model.parameters()).device
        parts = []
        training = model.training
        model.eval()  # without dropped tokens and router jitter
        with model.lockstep(model.language_model):
            for rows in rows_R.split(self.phase.micro_batch):
                reading = read(controller, batch.chunks_BNC[rows].to(device), decide)
                rewards = answer(controller, reading.episode, Probe(probe.ids_BT[rows], probe.targets_BT[rows]))
                good = batch.good_BN[rows].to(device)
                parts.append(_Rollouts(reading.ends_BND, reading.actions_BN, good, rewards))
        model.train(training)
        return _Rollouts(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _loss(self, model: StageBModel, rollouts: _Rollouts, advantages: Advantages, decisions: int) -> Outcome:
        heads = _heads(model)
        ends, actions_RN, good_RN, rewards_R = rollouts
        all_log_probs = heads.log_probs(ends, self.rl.temperature)
        taken_RN1 = actions_RN.unsqueeze(-1)
        log_probs_RN = all_log_probs.gather(-1, taken_RN1).squeeze(-1)
        chunks = self.episodes.chunks
        policy = policy_loss(
            log_probs_RN,
            log_probs_RN.detach(),  # one update for each rollout: the sampling policy is the one in training
            advantages.advantages_N.to(ends.device),
            torch.ones_like(actions_RN, dtype=torch.bool),
            self.objective,
            Totals(decisions, decisions / chunks, chunks),
            torch.full_like(log_probs_RN, -math.log(1 + heads.branches)),
        )
        value_RN = heads.values(ends).gather(-1, taken_RN1).squeeze(-1)
        error_RN = (value_RN - rewards_R.unsqueeze(1)).square()
        total = policy.loss + self.phase.value_weight * (error_RN.sum() / decisions)
        committed_RN = actions_RN > 0
        sums: list[Tensor | int] = [
            total.detach(),
            rewards_R.sum(),
            (rewards_R == 1).sum(),
            len(rewards_R),
            (committed_RN & good_RN).sum(),
            good_RN.sum(),
            (committed_RN & ~good_RN).sum(),
            (~good_RN).sum(),
            advantages.dropped_groups,
            advantages.groups,
            entropy(all_log_probs.detach()).sum(),
            policy.clipped_low + policy.clipped_high,
            error_RN.detach().sum(),
            actions_RN.numel(),
        ]
        return Outcome(total, torch.tensor([float(x) for x in sums], device=ends.device))

    def _watch(self, model: StageBModel, rollouts: _Rollouts, advantages: Advantages) -> None:
        """Counts steps that teach nothing. Raises after rl.patience of them, unless the task is solved."""
        reward = float(rollouts.rewards_R.mean())
        idle = advantages.dropped_groups == advantages.groups and reward < self.rl.solved
        self._idle = self._idle + 1 if idle else 0
        if self._idle < self.rl.patience:
            return
        with torch.no_grad():
            undecided = float(entropy(_heads(model).log_probs(rollouts.ends_RND)).mean())
        if undecided < 0.01:
            cause = (
                f"the accept head decides with certainty at every chunk (entropy {undecided:.4f} nats): lower "
                "phases.acceptance.learning_rate, or set rl.kl_weight above 0"
            )
        else:
            cause = (
                "the accepted chunks do not change the model's answers: give phases.plasticity more steps, or make the "
                f"episodes easier (fewer than {self.episodes.chunks} chunks, fewer pairs), or rl.group_size larger "
                f"than {self.rl.group_size}"
            )
        raise ConfigError(
            f"reasoning.phases.acceptance: in {self.rl.patience} successive steps all {advantages.groups} groups of "
            f"rollouts were dropped, because all rollouts of a group had the same reward (on average {reward:.3f}), so "
            f"nothing is learnt: {cause}"
        )


@PHASES("acceptance")
def make_acceptance(config: Config, sources: Sources) -> AcceptancePhase:
    """The phase of a configuration."""
    return AcceptancePhase(config, sources(reasoning_of(config).acceptance or reasoning_of(config).plasticity))


def measure(
    controller: Controller, source: EpisodeSource, decide: Decide, numbers: Sequence[int], chunks: int
) -> dict[str, float]:
    """The result of a decision rule: "answered", the mean share of right answers; "accept_good" and "accept_bad", the
    committed shares of good and of bad chunks, each absent if there are no such chunks."""
    device = next(controller.model.parameters()).device
    rewards, committed, good = [], [], []
    for first in range(0, len(numbers), EVALUATION_ROWS):
        batch = source.batch(numbers[first : first + EVALUATION_ROWS], chunks)
        reading = read(controller, batch.chunks_BNC.to(device), decide)
        rewards.append(answer(controller, reading.episode, source.probe(batch)))
        committed.append(reading.actions_BN > 0)
        good.append(batch.good_BN.to(device))
    committed_BN, good_BN = torch.cat(committed), torch.cat(good)
    measured = {"answered": float(torch.cat(rewards).mean())}
    for name, kind_BN in (("accept_good", good_BN), ("accept_bad", ~good_BN)):
        if kind_BN.any():
            measured[name] = float(committed_BN[kind_BN].float().mean())
    return measured


def _heads(model: StageBModel) -> ControllerHeads:
    assert model.controller is not None, "phase acceptance needs the controller's heads"
    return model.controller
