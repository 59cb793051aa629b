"""Phase B3 for operations on memories: group-relative policy optimisation, after the imitation of an expert.

The reward of a rollout is

    task [all right] - latency sum(cost) / step_budget + stability [something right] held / captured

held / captured is the share of the written chunks with asked facts that are in the index at the end. It counts only
where a token of the answer is right, because facts that do not serve the answer are worth nothing.

Shapes as in rollout.py; W windows, L decisions of the longest rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.model.decoding import check_finite
from cdrmix.reason.agent.policy import objective_of
from cdrmix.reason.episodes import Episodes, EpisodeSource
from cdrmix.reason.heads import OPERATIONS
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.operations.rollout import Reader, Rollouts
from cdrmix.reason.operations.separate_passes import SeparatePasses, most_tokens
from cdrmix.reason.phase import PHASES, Sources, generator_of, reasoning_of
from cdrmix.reason.rl.grpo import Totals, entropy, group_advantages, policy_loss
from cdrmix.training.distributed import reduce_over_processes
from cdrmix.training.objective import Outcome


class Rewards(NamedTuple):
    """Rewards of every rollout, float64. total_R: the weighted sum of task, latency and stability; the three are given
    without their weights. matched_R: the share of the answer's tokens that are right."""

    total_R: Tensor
    task_R: Tensor
    latency_R: Tensor
    stability_R: Tensor
    matched_R: Tensor


def answers_of(model: StageBModel, rollouts: Rollouts, answer_BA: Tensor) -> Tensor:
    """The most probable tokens [R, A] after every rollout's last window; each distinct window is read once."""
    assert rollouts.read is not None
    read = rollouts.read
    different, back_R = rollouts.final_R.unique(return_inverse=True)
    with torch.no_grad():
        tokens_WA = torch.empty(len(different), 0, dtype=torch.long)
        last_WD = read.last_WD[different]
        for position in range(answer_BA.shape[1]):
            if position:
                last_WD = rollouts.windows.hidden_after(model, different.tolist(), tokens_WA, read)[:, -1]
            logits_WV = model.language_model.logits(last_WD)
            check_finite(logits_WV)
            best_W = logits_WV.argmax(-1).cpu()
            tokens_WA = torch.cat([tokens_WA, best_W[:, None]], 1)
    return tokens_WA[back_R]


def rewards_of(rollouts: Rollouts, answers_RA: Tensor, episodes: Episodes, reader: Reader) -> Rewards:
    """The rewards of rollouts, by the formula at the top of the module."""
    rl, budget = reader.reasoning.rl, reader.reasoning.controller.step_budget
    episode_R = torch.tensor([row.episode for row in rollouts.rows])
    wanted_RA = episodes.answer_BA[episode_R]
    counts_RA = wanted_RA != reader.source.pad
    right_RA = (answers_RA == wanted_RA) & counts_RA
    matched = right_RA.sum(1).double() / counts_RA.sum(1).clamp(min=1)
    task = (matched == 1).double()
    latency = torch.tensor([row.cost for row in rollouts.rows], dtype=torch.float64) / budget
    captured, held = memory_of(rollouts, episodes)
    stability = torch.where((matched > 0) & (captured > 0), held / captured.clamp(min=1), 0.0)
    total = rl.task_weight * task - rl.latency_weight * latency + rl.stability_weight * stability
    return Rewards(total, task, latency, stability, matched)


def memory_of(rollouts: Rollouts, episodes: Episodes) -> tuple[Tensor, Tensor]:
    """(captured, held) [R] float64: numbers of asked facts whose chunk was written, and is in the index at the end."""
    captured, held = [], []
    for row in rollouts.rows:
        asked_chunks = episodes.fact_chunk_BF[row.episode][episodes.asked_BF[row.episode]].tolist()
        ids = [row.written[chunk] for chunk in asked_chunks if chunk in row.written]
        captured.append(len(ids))
        held.append(sum(row.memory is not None and id in row.memory for id in ids))
    return torch.tensor(captured, dtype=torch.float64), torch.tensor(held, dtype=torch.float64)


class OperationsPhase:
    """Groups of rollouts of one question: operations of better rollouts become more probable."""

    name = "operations"
    rolls_out = True
    measures: tuple[str, ...] = (
        *(
            "rollouts",
            "groups",
            "dropped_groups",
            "reward",
            "task",
            "latency",
            "stability",
            "captured",
            "held",
            "asked",
        ),
        *(f"count_{operation}" for operation in OPERATIONS),
        *("loss", "decisions", "clipped_low", "clipped_high", "ratio", "entropy", "value_error"),
    )

    def __init__(self, config: Config, source: EpisodeSource) -> None:
        assert config.reasoning is not None
        self.settings, self.rl = config.reasoning.phases.operations, config.reasoning.rl
        self.chunks, self.source, self.seed = config.reasoning.operations.chunks, source, config.run.seed
        self.most_tokens = most_tokens(config.reasoning, self.settings)
        self.passes_vary = self.settings.train == "all"  # otherwise the update reads what the rollouts have read
        self.reader, self.objective = Reader(config.reasoning, source), objective_of(self.rl)
        if self.objective.kl_weight:
            raise ConfigError(
                "reasoning.rl.kl_weight works with the token memory only; set it to 0 for the phase operations"
            )

    def trains(self, parameter: str) -> bool:
        """The operations' heads; with `train: all` also the summariser and the language model without its adapters."""
        return parameter.startswith("operations.") if self.settings.train == "own" else is_trained(parameter, "all")

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """Rolls out this process's questions."""
        if self.settings.episodes % processes:
            raise ConfigError(
                f"reasoning.phases.operations.episodes {self.settings.episodes} is no multiple of {processes} processes"
            )
        share, size = self.settings.episodes // processes, self.rl.group_size
        first = step * self.settings.episodes + rank * share
        generator = generator_of(self.seed, self.name, step, rank)
        per_micro = max(1, self.settings.micro_batch // size)
        made = []
        with model.lockstep(model.language_model):
            for begin in range(first, first + share, per_micro):
                episodes = self.source.batch(range(begin, min(begin + per_micro, first + share)), self.chunks)
                rollouts = self.reader.roll_out(model, episodes, size, generator, temperature=self.rl.temperature)
                rewards = rewards_of(rollouts, answers_of(model, rollouts, episodes.answer_BA), episodes, self.reader)
                made.append(
                    (
                        episodes,
                        rollouts,
                        rewards,
                        group_advantages(rewards.total_R, size, deviation=self.objective.deviation),
                    )
                )
        decided = torch.tensor(
            float(sum(group.kept_N[rollouts.decisions.row_K].sum() for _, rollouts, _, group in made))
        )
        decided = reduce_over_processes(decided, processes, "sum")
        totals = Totals(max(decided.item(), 1.0), self.settings.episodes * size, self.rl.horizon)
        losses = []
        for episodes, rollouts, rewards, group in made:
            measured = _measured(episodes, rollouts, rewards, group.groups, group.dropped_groups)
            losses += self._losses(rollouts, rewards, group.advantages_N * group.kept_N, group.kept_N, totals, measured)
        return losses

    def _losses(
        self,
        rollouts: Rollouts,
        rewards: Rewards,
        advantages_R: Tensor,
        kept_R: Tensor,
        totals: Totals,
        measured: list[float],
    ) -> list[Loss]:
        """The loss of the decisions; with separate passes then one for each pass over windows."""
        decisions = rollouts.decisions
        position_K, longest = _positions(decisions.row_K, len(rollouts.rows))
        all_rollouts = self.settings.episodes * self.rl.group_size
        known, separate = rollouts.read, None  # known None: the loss reads all windows itself
        assert known is not None
        if self.settings.train == "all":
            if self.settings.window_passes == "separate":
                separate = SeparatePasses(rollouts.windows, known, len(self.measures), self.most_tokens)
            known = None if separate is None else separate.read

        def loss(model: StageBModel) -> Outcome:
            heads = model.operations
            assert heads is not None
            read = rollouts.windows.read(model) if known is None else known
            device = read.last_WD.device
            features = decisions.features(read)
            log_probs_KO = heads.log_probs(features, decisions.allowed_KO.to(device), self.rl.temperature)
            taken_K = log_probs_KO.gather(1, decisions.taken_K.to(device)[:, None]).squeeze(1)

            def table(values_K: Tensor) -> Tensor:
                empty = values_K.new_zeros(len(rollouts.rows), longest)
                return empty.index_put((decisions.row_K.to(device), position_K.to(device)), values_K)

            mask_RL = table(kept_R.to(device)[decisions.row_K.to(device)])
            found = policy_loss(
                table(taken_K),
                table(decisions.log_probs_K.to(device)),
                advantages_R.to(device),
                mask_RL,
                self.objective,
                totals,
            )
            value_K = heads.value(features.detach()).squeeze(1).float()
            error_K = (value_K - rewards.total_R.to(value_K)[decisions.row_K.to(device)]).square()
            errors = (table(error_K).sum(1) / table(torch.ones_like(error_K)).sum(1)).sum() / all_rollouts
            total = found.loss + self.settings.value_weight * errors
            extra = [
                found.loss.detach(),
                torch.tensor(float(len(decisions.row_K))),
                found.clipped_low,
                found.clipped_high,
                found.ratio,
                entropy(log_probs_KO.detach()).sum(),
                errors.detach() * all_rollouts,
            ]
            sums = torch.stack([torch.as_tensor(value).float().cpu() for value in [*measured, *extra]]).to(device)
            outcome = Outcome(total, sums)
            return outcome if separate is None else separate.of_read(outcome, first=True)

        return [loss] if separate is None else [loss, *separate.losses()]

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """Means per rollout, per group and per decision."""
        rollouts, decisions = max(sums["rollouts"], 1), max(sums["decisions"], 1)
        shown = {name: sums[name] / rollouts for name in ("reward", "task", "latency", "stability", "value_error")}
        shown |= {operation: sums[f"count_{operation}"] / rollouts for operation in OPERATIONS}
        shown |= {"entropy": sums["entropy"] / decisions}
        shown |= {"clip_fraction": (sums["clipped_low"] + sums["clipped_high"]) / decisions}
        return shown | {
            "loss": sums["loss"],
            "capture": sums["captured"] / max(sums["asked"], 1),
            "retention": sums["held"] / max(sums["captured"], 1),
            "dropped_groups": sums["dropped_groups"] / max(sums["groups"], 1),
        }


@PHASES("operations")
def make_operations(config: Config, sources: Sources) -> OperationsPhase:
    """The phase of a configuration."""
    return OperationsPhase(config, sources(reasoning_of(config).operations))


def evaluate(model: StageBModel, reader: Reader, numbers: Sequence[int], chunks: int) -> dict[str, float]:
    """Measures greedy rollouts: accuracy, operations other than noop and their cost per episode, capture, retention,
    and the number of each operation per episode."""
    episodes = reader.source.batch(numbers, chunks)
    rollouts = reader.roll_out(model, episodes, 1, None)
    rewards = rewards_of(rollouts, answers_of(model, rollouts, episodes.answer_BA), episodes, reader)
    captured, held = memory_of(rollouts, episodes)
    rows = len(rollouts.rows)
    measured = {
        "accuracy": rewards.task_R.mean().item(),
        "operations": sum(sum(row.counts[1:]) for row in rollouts.rows) / rows,
        "cost": sum(row.cost for row in rollouts.rows) / rows,
        "capture": captured.sum().item() / max(int(episodes.asked_BF.sum()), 1),
        "retention": held.sum().item() / max(captured.sum().item(), 1),
    }
    return measured | {
        name: sum(row.counts[operation] for row in rollouts.rows) / rows for operation, name in enumerate(OPERATIONS)
    }


def is_trained(parameter: str, train: str) -> bool:
    """Whether a phase of the operations with this value of `train` changes a parameter, other than the value head."""
    if train == "all" and parameter.startswith("language_model."):
        return ".plastic." not in parameter
    return parameter.startswith(("operations.", "summary."))


def _positions(row_K: Tensor, rows: int) -> tuple[Tensor, int]:
    """The number of every decision within its rollout, from 0; and the length of the longest rollout."""
    order = row_K.argsort(stable=True)
    counts = torch.bincount(row_K, minlength=rows)
    within = torch.arange(len(row_K)) - (counts.cumsum(0) - counts)[row_K[order]]
    positions = torch.empty_like(row_K)
    positions[order] = within
    return positions, int(counts.max())


def _measured(episodes: Episodes, rollouts: Rollouts, rewards: Rewards, groups: int, dropped: int) -> list[float]:
    captured, held = memory_of(rollouts, episodes)
    asked = episodes.asked_BF.sum(1)[torch.tensor([row.episode for row in rollouts.rows])]
    counts = torch.tensor([row.counts for row in rollouts.rows], dtype=torch.float64).sum(0)
    sums = (rewards.total_R, rewards.task_R, rewards.latency_R, rewards.stability_R, captured, held, asked)
    return [float(len(rollouts.rows)), float(groups), float(dropped), *(float(x.sum()) for x in sums), *counts.tolist()]
