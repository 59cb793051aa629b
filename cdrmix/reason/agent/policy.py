"""The memory agent's second phase: group-relative policy optimisation over rollouts of the same question.

The reward of a rollout comes at its end. Its advantage over its group applies to every turn of it: each turn is a
sequence of its own, and only the answer shows whether the memory was kept. With `rl.credit: gain` a turn is credited
with the reward less P, the likelihood of the right answer after the memory that the turn found. The reward is then the
sum of the turns' own: the change of P of a turn that writes, and the reward less P of the answer. So this is shaping by
a potential, which changes no best policy (Ng, Harada and Russell, 1999).
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
from cdrmix.errors import ConfigError, PluginError
from cdrmix.reason.agent.agent import Reading, Rewards, Turn, Window, read_episodes, rewards_of
from cdrmix.reason.agent.answers import AnswerScorer
from cdrmix.reason.episodes import Asked, EpisodeSource, chunk_counts
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.phase import PHASES, Sources, generator_of, reasoning_of
from cdrmix.reason.rl.grpo import OBJECTIVES, Objective, Totals, entropy, group_advantages, policy_loss
from cdrmix.reason.rl.rollout import micro_batches, taken
from cdrmix.training.distributed import reduce_over_processes
from cdrmix.training.objective import Outcome

LOGGER = logging.getLogger(__name__)

ROLLED_OUT = (
    *("rollouts", "groups", "dropped_groups", "reward", "task", "latency", "stability"),
    *("matched", "asked", "captured", "held", "changes", "turns", "reward_errors"),
)
OF_TOKENS = ("loss", "tokens", "clipped_low", "clipped_high", "divergence", "ratio", "entropy")


def objective_of(settings: schema.Rl) -> Objective:
    """The objective of a name, with the values that the configuration overrides."""
    base = OBJECTIVES[settings.objective]
    names = ("clip_low", "clip_high", "deviation", "kl_weight", "entropy_weight")
    changes = {name: getattr(settings, name) for name in names}
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
    def of(cls, turns: tuple[Turn, ...], advantages_TB: Tensor, kept_TB: Tensor) -> RolloutBatch:
        """Turns of one width that are kept. If none is, one row stays and is masked."""
        if not kept_TB.any():
            prompt, (tokens, log_probs, mask) = (turns[0].prompt_BL[:1], (x[:1] for x in turns[0].generated))
            return cls(prompt, tokens, log_probs, torch.zeros_like(advantages_TB[0, :1]), torch.zeros_like(mask))
        parts = []
        for (prompt, (tokens, log_probs, mask)), advantages, kept in zip(turns, advantages_TB, kept_TB, strict=True):
            parts.append(cls(*(column[kept] for column in (prompt, tokens, log_probs, advantages, mask))))
        return cls.joined(parts)

    @classmethod
    def joined(cls, batches: list[RolloutBatch]) -> RolloutBatch:
        """Sequences of several batches."""
        return cls(*(torch.cat(column) for column in zip(*batches, strict=True)))


class RolledOut(NamedTuple):
    """Rollouts of some questions. credited_TB: what a turn has an advantage of: the reward, with `credit: gain` less
    the likelihood of the right answer before the turn. scored_B: whether the reward function gave a number. asked: the
    questions as text. turns: chunks that are not empty, of all rollouts."""

    reading: Reading
    rewards: Rewards
    credited_TB: Tensor
    scored_B: Tensor
    asked: list[Asked] | None
    turns: int


class LearntFrom(NamedTuple):
    """Sequences to learn from, by their width; kept_groups: groups of which at least one is."""

    batches: list[RolloutBatch]
    kept_groups: int


class ShownRollout(NamedTuple):
    """A rollout as text, for rollouts.jsonl: what was written into the memory after each chunk, the answer, the
    reward and its parts; reward and task are None where the reward function failed."""

    question: str
    right: list[str]
    memories: list[str]
    answer: str
    reward: float | None
    task: float | None
    latency: float
    stability: float


class PolicyPhase:
    """One rollout of every group, and one update from it.

    shown: rollouts of the last step of which some are to be shown, as text. reference: the model at the start of the
    phase, copied in step 0 if the objective has a KL term.
    """

    name = "policy"
    rolls_out = True
    passes_vary = False
    measures = (*ROLLED_OUT, *OF_TOKENS)

    def __init__(self, config: Config, source: EpisodeSource) -> None:
        assert config.reasoning is not None
        reasoning = config.reasoning
        self.settings, self.rl = reasoning.phases.policy, reasoning.rl
        self.fewest_chunks = reasoning.agent.chunks
        self.chunks = self.settings.chunks or reasoning.agent.chunks
        self.step_budget, self.seed = reasoning.controller.step_budget, config.run.seed
        self.source, self.window = source, Window.of(reasoning, source)
        self.objective = objective_of(self.rl)
        self.scorer = AnswerScorer(self.rl, source, self.window)
        self.shown: list[ShownRollout] = []
        self.reference: StageBModel | None = None
        self._idle = 0  # successive steps whose groups were all dropped

    def trains(self, parameter: str) -> bool:
        """The language model without its plastic adapters, as in imitation."""
        return parameter.startswith("language_model.") and ".plastic." not in parameter

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """Rolls out this process's questions. Raises PluginError if the reward function fails for every answer."""
        if self.settings.episodes % processes:
            raise ConfigError(
                f"reasoning.phases.policy.episodes {self.settings.episodes} is no multiple of {processes} processes"
            )
        self._keep_reference(model, step)
        share = self.settings.episodes // processes
        first = step * self.settings.episodes + rank * share
        together = share  # questions whose rollouts are made at once
        if self.settings.rollout_rows is not None:
            together = min(share, max(1, self.settings.rollout_rows // self.rl.group_size))
        generator = generator_of(self.seed, self.name, step, rank)
        chunks = self._chunks_at(step)
        with model.lockstep(model.language_model):
            parts = [
                self._roll_out(model, range(start, min(start + together, first + share)), chunks, generator)
                for start in range(first, first + share, together)
            ]
        rewards = Rewards(*(torch.cat(column) for column in zip(*(part.rewards for part in parts), strict=True)))
        scored_B = torch.cat([part.scored_B for part in parts])
        learnt = [self._learnt_from(part) for part in parts]
        groups = len(scored_B) // self.rl.group_size
        dropped_groups = groups - sum(part.kept_groups for part in learnt)
        errors = len(scored_B) - int(scored_B.sum())
        turns_read = sum(part.turns for part in parts)
        sums = _sums([part.reading for part in parts], groups, dropped_groups, rewards, turns_read, errors)
        if self.rl.rollouts_every and step % self.rl.rollouts_every == 0 and rank == 0:
            self.shown = _shown(parts[0], self.source, self.rl.group_size)
        batches = [RolloutBatch.joined(list(same)) for same in zip(*(part.batches for part in learnt), strict=True)]
        rows = self.settings.micro_batch
        wanted = [-(-len(batch.prompts_SL) // rows) for batch in batches]
        counts = torch.tensor(
            [
                sum(float(batch.mask_SN.sum()) for batch in batches),
                sum(float(batch.mask_SN.any(1).sum()) for batch in batches),
                groups,
                dropped_groups,
                float(rewards.task_B.mean()) / processes,
                float(scored_B.sum()),
            ],
            dtype=torch.float64,
        )
        tokens, sequences, all_groups, all_dropped, solved, given = reduce_over_processes(
            counts, processes, "sum"
        ).tolist()
        if not given:
            reason = f": {self.scorer.error}" if self.scorer.error else ""
            raise PluginError(f"reasoning.rl.reward={self.rl.reward} failed for every answer of a step{reason}")
        least = reduce_over_processes(torch.tensor(wanted), processes, "max").tolist()
        self._watch(all_groups == all_dropped, solved)
        totals = Totals(max(tokens, 1.0), max(sequences, 1.0), max(self.window.part, self.window.answer))
        losses: list[Loss] = [
            _PolicyLoss(RolloutBatch(*micro_batch), self, totals)
            for batch, most in zip(batches, least, strict=True)
            for micro_batch in micro_batches(batch, rows, least=most)
        ]
        losses[0].rolled_out = sums  # type: ignore[attr-defined]
        return losses

    def _chunks_at(self, step: int) -> int:
        """The number of chunks of a step's episodes. In the first `growth_steps` steps it grows from those of imitation
        to those of the phase. Documents of files have lengths of their own."""
        if step >= self.settings.growth_steps or self.source.own_lengths:
            return self.chunks
        return self.fewest_chunks + (self.chunks - self.fewest_chunks) * step // self.settings.growth_steps

    def _roll_out(self, model: StageBModel, numbers: range, chunks: int, generator: torch.Generator) -> RolledOut:
        """One group of rollouts for each of these questions, and their rewards."""
        episodes = self.source.batch(numbers, chunks)
        reading = read_episodes(
            model.language_model,
            self.window,
            episodes,
            temperature=self.rl.temperature,
            generator=generator,
            group=self.rl.group_size,
            keep_turns=True,
            step_budget=self.step_budget,
        )
        asked = self.source.questions(numbers, chunks)
        task_B, scored_B = self.scorer(model.language_model, reading, episodes, asked, self.rl.group_size)
        read_B = chunk_counts(episodes.chunks_BNC, self.window.pad)
        turns = int(read_B.sum()) * self.rl.group_size
        rewards = rewards_of(reading, self.rl, self.step_budget, task_B)
        credited_TB = rewards.total_B.expand(len(reading.turns), -1)
        if self.rl.credit == "gain":
            credited_TB = credited_TB - self.scorer.likelihoods_before(model.language_model, reading, episodes)
        return RolledOut(reading, rewards, credited_TB, scored_B, asked, turns)

    def _learnt_from(self, part: RolledOut) -> LearntFrom:
        """The turns that wrote memories, if they have credit, and those that answered, with their advantages."""
        turns, size = part.reading.turns, self.rl.group_size
        group = group_advantages(
            part.credited_TB.flatten(),  # a group of one turn is successive, as one of rollouts is
            size,
            deviation=self.objective.deviation,
            usable_N=part.scored_B.repeat(len(turns)),
        )
        advantages_TB, kept_TB = (each_N.view(len(turns), -1) for each_N in group[:2])
        batches = [RolloutBatch.of(turns[-1:], advantages_TB[-1:], kept_TB[-1:])]
        if self.rl.credit != "final_turn":
            batches.insert(0, RolloutBatch.of(turns[:-1], advantages_TB[:-1], kept_TB[:-1]))
        return LearntFrom(batches, int(kept_TB.any(0).view(-1, size).any(1).sum()))

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """Means for a rollout of the reward and its parts; capture and retention, if there are facts; the share of
        dropped groups, and of rollouts whose reward function failed; the share of turns that changed the memory; means
        for a token of the entropy (nats), the clipped share, the divergence and the ratio."""
        rollouts, tokens = max(sums["rollouts"], 1.0), max(sums["tokens"], 1.0)
        means = {name: sums[name] / rollouts for name in ("reward", "task", "latency", "stability", "matched")}
        return {
            "loss": sums["loss"],
            **means,
            **({"capture": sums["captured"] / sums["asked"]} if sums["asked"] else {}),
            **({"retention": sums["held"] / sums["captured"]} if sums["captured"] else {}),
            "changes": sums["changes"] / max(sums["turns"], 1.0),
            "reward_errors": sums["reward_errors"] / rollouts,
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
        logits, balance = taken(model.language_model, prompts, tokens, mask)
        logits = logits / self.temperature
        reference = None
        if self.objective.kl_weight:
            assert self.reference is not None
            with torch.no_grad():
                before = taken(self.reference.language_model, prompts, tokens, mask).logits_SNV
                reference = _log_probs(before / self.temperature, tokens)
        result = policy_loss(
            _log_probs(logits, tokens), old_log_probs, advantages, mask, self.objective, self.totals, reference
        )
        weight = self.objective.entropy_weight
        uncertainty = torch.where(mask, entropy(logits if weight else logits.detach()), 0.0).sum()
        loss = result.loss - weight * uncertainty / self.totals.tokens
        sums = torch.stack([x.detach().float() for x in (loss, *result[1:], uncertainty)])
        return Outcome(loss + balance * self.share, torch.cat([self.rolled_out.to(sums), sums]))


def _log_probs(logits_SNV: Tensor, tokens_SN: Tensor) -> Tensor:
    return logits_SNV.log_softmax(-1).gather(-1, tokens_SN.unsqueeze(-1)).squeeze(-1)


def _sums(readings: list[Reading], groups: int, dropped: int, rewards: Rewards, turns: int, errors: int) -> Tensor:
    """The measures of ROLLED_OUT, in that order."""
    of_answers = [float(part.sum()) for part in rewards]
    columns = zip(
        *((each.matched_B, each.asked_BF, each.captured_BF, each.held_BF, each.changes_B) for each in readings),
        strict=True,
    )
    of_readings = [sum(float(part.sum()) for part in column) for column in columns]
    return torch.tensor([len(rewards.total_B), groups, dropped, *of_answers, *of_readings, turns, errors])


def _shown(part: RolledOut, source: EpisodeSource, group_size: int) -> list[ShownRollout]:
    """The first group of rollouts as text."""
    reading = part.reading
    question = source.text(reading.turns[0].prompt_BL[0, : source.question + 1].tolist())
    right = list(part.asked[0].answers) if part.asked is not None else []
    return [
        ShownRollout(
            question,
            right,
            [source.text(_written(turn, row)) for turn in reading.turns[:-1] if turn.generated.mask_BN[row].any()],
            source.text(_written(reading.turns[-1], row)),
            _rounded(part.rewards.total_B[row]) if part.scored_B[row] else None,
            _rounded(part.rewards.task_B[row]) if part.scored_B[row] else None,
            _rounded(part.rewards.latency_B[row]),
            _rounded(part.rewards.stability_B[row]),
        )
        for row in range(group_size)
    ]


def _rounded(value: Tensor) -> float:
    return round(float(value), 6)


def _written(turn: Turn, row: int) -> list[int]:
    ids: list[int] = turn.generated.tokens_BN[row][turn.generated.mask_BN[row]].tolist()
    return ids
