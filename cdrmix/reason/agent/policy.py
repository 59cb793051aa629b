"""The memory agent's second phase: group-relative policy optimisation over rollouts of the same question.

The reward of a rollout comes at its end. Its advantage over its group applies to every turn of it: each turn is a
sequence of its own, and only the answer shows whether the memory was kept.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config import schema_reasoning as schema
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.reason.agent.agent import Reading, Turn, Window, read_episodes, rewards_of
from cdrmix.reason.episodes import EpisodeSource
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.phase import PHASES, Sources, generator_of, reasoning_of
from cdrmix.reason.rl.grpo import OBJECTIVES, Objective, Totals, entropy, group_advantages, policy_loss
from cdrmix.reason.rl.rollout import micro_batches, taken
from cdrmix.training.distributed import reduce_over_processes
from cdrmix.training.objective import Outcome

LOGGER = logging.getLogger(__name__)

ROLLED_OUT = (
    *("rollouts", "groups", "dropped_groups", "reward", "task", "latency", "stability"),
    *("matched", "asked", "captured", "held", "changes"),
)
OF_TOKENS = ("loss", "tokens", "clipped_low", "clipped_high", "divergence", "ratio", "entropy")


def objective_of(settings: schema.Rl) -> Objective:
    """The objective of a name, with the values that the configuration overrides."""
    base = OBJECTIVES[settings.objective]
    changes = {name: getattr(settings, name) for name in ("clip_low", "clip_high", "deviation", "kl_weight")}
    return dataclasses.replace(base, **{name: value for name, value in changes.items() if value is not None})


class RolloutBatch(NamedTuple):
    """Sequences of one width to learn from: prompts [S, L], generated tokens [S, N], the log-probabilities of those
    tokens under the policy that generated them, the advantages of their rollouts [S], and which tokens count."""

    prompts_SL: Tensor
    tokens_SN: Tensor
    log_probs_SN: Tensor
    advantages_S: Tensor
    mask_SN: Tensor

    @classmethod
    def of(cls, turns: tuple[Turn, ...], advantages_B: Tensor, kept_B: Tensor) -> RolloutBatch:
        """Turns of one width, without rollouts that are not kept. If none is kept, one stays and is masked."""
        if not kept_B.any():
            kept_B = torch.arange(len(kept_B), device=kept_B.device) == 0
            advantages_B = torch.zeros_like(advantages_B)
            turns = tuple(
                Turn(turn.prompt_BL, turn.generated._replace(mask_BN=torch.zeros_like(turn.generated.mask_BN)))
                for turn in turns[:1]
            )
        columns = [
            (turn.prompt_BL[kept_B], *(x[kept_B] for x in turn.generated[:2]), advantages_B[kept_B]) for turn in turns
        ]
        masks = [turn.generated.mask_BN[kept_B] for turn in turns]
        prompts, tokens, log_probs, advantages = (torch.cat(column) for column in zip(*columns, strict=True))
        return cls(prompts, tokens, log_probs, advantages, torch.cat(masks))


class PolicyPhase:
    """One rollout of every group, and one update from it.

    reference: the model at the start of the phase, copied in step 0 if the objective has a KL term.
    """

    name = "policy"
    measures = (*ROLLED_OUT, *OF_TOKENS)

    def __init__(self, config: Config, source: EpisodeSource) -> None:
        assert config.reasoning is not None
        reasoning = config.reasoning
        self.settings, self.rl = reasoning.phases.policy, reasoning.rl
        self.chunks = self.settings.chunks or reasoning.agent.chunks
        self.step_budget, self.seed = reasoning.controller.step_budget, config.run.seed
        self.source, self.window = source, Window.of(reasoning, source)
        self.objective = objective_of(self.rl)
        self.reference: StageBModel | None = None
        self._idle = 0  # successive steps whose groups were all dropped
        if self.chunks + 1 > self.rl.horizon:
            raise ConfigError(
                f"an episode of {self.chunks} chunks and an answer is more than the"
                f" {self.rl.horizon} actions of reasoning.rl.horizon"
            )

    def trains(self, parameter: str) -> bool:
        """The language model without its plastic adapters, as in imitation."""
        return parameter.startswith("language_model.") and ".plastic." not in parameter

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """Rolls out this process's questions. Raises ValueError for a reward that is not finite."""
        if self.settings.episodes % processes:
            raise ConfigError(
                f"reasoning.phases.policy.episodes {self.settings.episodes} is no multiple of {processes} processes"
            )
        self._keep_reference(model, step)
        share = self.settings.episodes // processes
        first = step * self.settings.episodes + rank * share
        reading = read_episodes(
            model.language_model,
            self.window,
            self.source.batch(range(first, first + share), self.chunks),
            temperature=self.rl.temperature,
            generator=generator_of(self.seed, self.name, step, rank),
            group=self.rl.group_size,
            keep_turns=True,
            step_budget=self.step_budget,
        )
        rewards = rewards_of(reading, self.rl, self.step_budget)
        group = group_advantages(rewards.total_B, self.rl.group_size, deviation=self.objective.deviation)
        sums = _sums(reading, group.groups, group.dropped_groups, *rewards)
        taught = reading.turns[-1:] if self.rl.credit == "final_turn" else reading.turns
        batches = [RolloutBatch.of(taught[-1:], group.advantages_N, group.kept_N)]
        if len(taught) > 1:
            batches.insert(0, RolloutBatch.of(taught[:-1], group.advantages_N, group.kept_N))
        rows = self.settings.micro_batch
        wanted = [-(-len(batch.prompts_SL) // rows) for batch in batches]
        counts = torch.tensor(
            [
                sum(float(batch.mask_SN.sum()) for batch in batches),
                sum(float(batch.mask_SN.any(1).sum()) for batch in batches),
                group.groups,
                group.dropped_groups,
                float(reading.exact_B.double().mean()) / processes,
            ],
            dtype=torch.float64,
        )
        tokens, sequences, groups, dropped, solved = reduce_over_processes(counts, processes, "sum").tolist()
        least = reduce_over_processes(torch.tensor(wanted), processes, "max").tolist()
        self._watch(groups == dropped, solved)
        totals = Totals(max(tokens, 1.0), max(sequences, 1.0), max(self.window.part, self.window.answer))
        losses: list[Loss] = [
            _PolicyLoss(RolloutBatch(*micro_batch), self, totals)
            for batch, most in zip(batches, least, strict=True)
            for micro_batch in micro_batches(batch, rows, least=most)
        ]
        losses[0].rolled_out = sums  # type: ignore[attr-defined]
        return losses

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """Means for a rollout of the reward and its parts; capture, retention and the share of dropped groups; means
        for a token of the entropy (nats), the clipped share, the divergence and the ratio."""
        rollouts, tokens = max(sums["rollouts"], 1.0), max(sums["tokens"], 1.0)
        means = {name: sums[name] / rollouts for name in ("reward", "task", "latency", "stability", "matched")}
        return {
            "loss": sums["loss"],
            **means,
            "capture": sums["captured"] / max(sums["asked"], 1.0),
            "retention": sums["held"] / max(sums["captured"], 1.0),
            "changes": sums["changes"] / rollouts / self.chunks,
            "dropped_groups": sums["dropped_groups"] / max(sums["groups"], 1.0),
            "entropy": sums["entropy"] / tokens,
            "clip_fraction": (sums["clipped_low"] + sums["clipped_high"]) / tokens,
            "divergence": sums["divergence"] / tokens,
            "ratio": sums["ratio"] / tokens,
        }

    def _keep_reference(self, model: StageBModel, step: int) -> None:
        if not self.objective.kl_weight or self.reference is not None:
            return
        if step:
            raise ConfigError(
                f"reasoning.rl.kl_weight is {self.objective.kl_weight}: the divergence is from the model at the start"
                " of this phase, which checkpoints do not keep; set kl_weight: 0, or start the phase again"
            )
        self.reference = copy.deepcopy(model).requires_grad_(False)

    def _watch(self, idle: bool, solved: float) -> None:
        """Warns every rl.patience steps if nothing is learnt, with a remedy."""
        self._idle = self._idle + 1 if idle else 0
        if self._idle and self._idle % self.rl.patience == 0:
            LOGGER.warning(message_of_idleness(self._idle, solved, self.rl.group_size))


@PHASES("policy")
def make_policy(config: Config, sources: Sources) -> PolicyPhase:
    """The phase of a configuration."""
    return PolicyPhase(config, sources(reasoning_of(config).agent))


def message_of_idleness(steps: int, solved: float, group_size: int) -> str:
    """The warning after `steps` steps in which every group had equal rewards. solved: share of right answers."""
    problem = (
        f"policy: for {steps} steps every rollout of a group had the same reward as the others, so nothing is learnt"
    )
    if solved > 0.5:
        return f"{problem}. {solved:.0%} of the answers are right: make reasoning.agent harder, or end the phase"
    return (
        f"{problem}. {solved:.0%} of the answers are right, so the task is too hard for random rollouts to solve: give"
        " reasoning.phases.imitation more steps, make reasoning.agent easier (fewer chunks, fewer queries), or raise"
        f" reasoning.rl.group_size ({group_size}) or reasoning.rl.temperature"
    )


class _PolicyLoss:
    """One micro-batch. rolled_out: the sums of the step's rollouts, which only its first micro-batch reports."""

    def __init__(self, batch: RolloutBatch, phase: PolicyPhase, totals: Totals) -> None:
        self.batch, self.totals = batch, totals
        self.share = float(batch.mask_SN.any(1).sum()) / totals.sequences
        self.objective, self.reference, self.temperature = phase.objective, phase.reference, phase.rl.temperature
        self.rolled_out = torch.zeros(len(ROLLED_OUT))

    def __call__(self, model: StageBModel) -> Outcome:
        prompts, tokens, old_log_probs, advantages, mask = self.batch
        logits, balance = taken(model.language_model, prompts, tokens)
        logits = logits / self.temperature
        reference = None
        if self.objective.kl_weight:
            assert self.reference is not None
            with torch.no_grad():
                reference = _log_probs(
                    taken(self.reference.language_model, prompts, tokens).logits_SNV / self.temperature, tokens
                )
        result = policy_loss(
            _log_probs(logits, tokens), old_log_probs, advantages, mask, self.objective, self.totals, reference
        )
        uncertainty = torch.where(mask, entropy(logits.detach()), 0.0).sum()
        of_tokens = [result.loss.detach(), *result[1:], uncertainty]
        sums = torch.stack([x.float() for x in of_tokens])
        return Outcome(result.loss + balance * self.share, torch.cat([self.rolled_out.to(sums), sums]))


def _log_probs(logits_SNV: Tensor, tokens_SN: Tensor) -> Tensor:
    return logits_SNV.log_softmax(-1).gather(-1, tokens_SN.unsqueeze(-1)).squeeze(-1)


def _sums(
    reading: Reading, groups: int, dropped: int, total: Tensor, task: Tensor, latency: Tensor, stability: Tensor
) -> Tensor:
    """The measures of ROLLED_OUT, in that order."""
    parts = (total, task, latency, stability, reading.matched_B)
    facts = (reading.asked_BF, reading.captured_BF, reading.held_BF, reading.changes_B)
    counted = [float(part.sum()) for part in (*parts, *facts)]
    return torch.tensor([len(total), groups, dropped, *counted])
