"""The controller: the state change of each chunk is a proposal, which is committed or rolled back as a whole.

One controller step reads one chunk by one forward pass from the episode's state E, and gives a new state. A commit
continues from the new state, a rollback from the old one. Nothing is computed again, and a row that is rolled back
keeps every bit of its state. If all rows decide the same, nothing is copied. Only a commit writes to the log of the
episodic index.

Shapes: B rows (episodes, rollouts), C tokens of a chunk, S branches, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.model import compiled
from cdrmix.model.cache import branch, concatenated, plastic_only, select, unread
from cdrmix.model.fast_weights import FastWeightOptions
from cdrmix.model.language_model import Cache, LanguageModel
from cdrmix.model.mixers.attention import AttentionCache
from cdrmix.reason.heads import ControllerHeads
from cdrmix.reason.memory.kept_episodes import EpisodicMemory, Staged


class Decision(NamedTuple):
    """For every row whether its proposal is committed, bool [B], and its branch, int64 [B] (0 without a commit)."""

    commit_B: Tensor
    branch_B: Tensor


Decide = Callable[[Tensor], Decision]  # of the hidden states at the chunk's last token, [B, D]


def action_of(decision: Decision) -> Tensor:
    """int64 [B]: 0 for rolling back, 1 + s for branch s; the order of log_probs and values."""
    return torch.where(decision.commit_B, decision.branch_B + 1, 0)


def decision_of(action_B: Tensor) -> Decision:
    """The inverse of action_of."""
    return Decision(action_B > 0, (action_B - 1).clamp(min=0))


def always(end_BD: Tensor) -> Decision:
    """Commits every proposal with factor 1."""
    return decision_of(torch.ones(len(end_BD), dtype=torch.int64, device=end_BD.device))


def never(end_BD: Tensor) -> Decision:
    """Rolls every proposal back."""
    return decision_of(torch.zeros(len(end_BD), dtype=torch.int64, device=end_BD.device))


def by_head(heads: ControllerHeads, threshold: float = 0.0) -> Decide:
    """Commits the branch of the largest logit, if that is at least `threshold`."""
    return lambda end_BD: _best(heads.accept_logits(end_BD), threshold)


def by_value(heads: ControllerHeads, threshold: float = 0.0) -> Decide:
    """Commits the branch of the largest value, if it exceeds the value of rolling back by at least `threshold`."""

    def decide(end_BD: Tensor) -> Decision:
        values = heads.values(end_BD)
        return _best(values[:, 1:] - values[:, :1], threshold)

    return decide


def sampled(heads: ControllerHeads, generator: torch.Generator, temperature: float = 1.0) -> Decide:
    """Samples decisions from log_probs; the generator (of the CPU) gives one number for each row."""

    def decide(end_BD: Tensor) -> Decision:
        cumulative = heads.log_probs(end_BD, temperature).double().cpu().exp().cumsum(-1)
        point = torch.rand(len(end_BD), 1, generator=generator, dtype=torch.float64) * cumulative[:, -1:]
        action_B = torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp(max=heads.branches)
        return decision_of(action_B.to(end_BD.device))

    return decide


def configured(reasoning: Reasoning, heads: ControllerHeads | None) -> Decide:
    """The greedy decision rule of `reasoning.controller`; without heads every proposal is committed."""
    if heads is None:
        return always
    rule = by_head if reasoning.controller.decide_by == "head" else by_value
    return rule(heads, reasoning.controller.accept_threshold)


class Group(NamedTuple):
    """Rows int64 [R], ascending, whose caches have one shape, and their cache (None before the first commit).

    Rows that committed different numbers of tokens have attention caches of different lengths, and are in different
    groups. Without attention caches all rows are in one group. A RaggedAttentionCache could hold all rows in one group,
    but it makes one attention pass for each row; a group makes one for all its rows.
    """

    rows_R: Tensor
    cache: Cache | None


class EpisodeState(NamedTuple):
    """The state E of B episodes: the model's cache, memory tokens, transactions with the index, and counts.

    memory_BM, transactions: None without such a memory. A transaction (one for each row, or None) holds what a proposal
    would write to the index; after a step there is none. steps: controller steps so far. commits_B: int64, the number
    of committed steps.
    """

    groups: tuple[Group, ...]
    memory_BM: Tensor | None
    transactions: tuple[Staged | None, ...] | None
    steps: int
    commits_B: Tensor


class Proposal(NamedTuple):
    """The result of a chunk before the decision: the new state, whose caches have all branches; the hidden states."""

    after: EpisodeState
    hidden_BCD: Tensor

    def end_BD(self) -> Tensor:
        """The hidden states at the chunk's last token, which the heads read."""
        return self.hidden_BCD[:, -1]


class Controller:
    """Reads episodes chunk by chunk, as `reasoning` configures branches and what is carried from step to step.

    Each of B episodes has its own decisions. Reading them in one batch changes nothing but rounding.
    """

    def __init__(self, model: LanguageModel, reasoning: Reasoning) -> None:
        self.model, self.reasoning = model, reasoning
        self.scales = tuple(reasoning.controller.write_strengths[: reasoning.controller.max_branches])
        self._grows = model.attends and reasoning.carry == "all"  # whether caches grow with committed tokens

    def begin(self, rows: int, memory_BM: Tensor | None = None) -> EpisodeState:
        """The state of `rows` episodes before their first chunk."""
        device = next(self.model.parameters()).device
        every = torch.arange(rows, device=device)
        return EpisodeState((Group(every, None),), memory_BM, None, 0, torch.zeros_like(every))

    def steps_left(self, episode: EpisodeState) -> int:
        """Chunks that the episode may still read: `controller.step_budget` minus its steps."""
        return self.reasoning.controller.step_budget - episode.steps

    def propose(self, episode: EpisodeState, ids_BC: Tensor, prefix_BPD: Tensor | None = None) -> Proposal:
        """One forward pass over a chunk from the state of an episode, with every branch. The old state is kept.

        The episode must have steps left.
        """
        assert self.steps_left(episode) > 0, "a controller step is within the step budget"
        assert ids_BC.shape[1] == self.reasoning.chunk, "a controller step reads a whole chunk"
        scale_S = None
        if len(self.scales) > 1:
            scale_S = torch.tensor(self.scales, device=ids_BC.device)
        groups, hidden = [], []
        for rows_R, cache in episode.groups:
            prefix = None if prefix_BPD is None else prefix_BPD[rows_R]
            states, hidden_RCD = self._read(ids_BC[rows_R], cache, prefix, scale_S)
            groups.append(Group(rows_R, states if self.reasoning.carry == "all" else plastic_only(states)))
            hidden.append(hidden_RCD)
        after = episode._replace(groups=tuple(groups), steps=episode.steps + 1, commits_B=episode.commits_B + 1)
        return Proposal(after, _gathered(groups, hidden))

    def _read(
        self, ids_RC: Tensor, cache: Cache | None, prefix_RPD: Tensor | None, scale_S: Tensor | None
    ) -> tuple[Cache, Tensor]:
        """The states after a chunk, and its hidden states; by the compiled step where it serves the model."""
        if prefix_RPD is None and scale_S is None:
            read = compiled.read(self.model, ids_RC, cache, wants_hidden=True, head=False)
            if read is not None:
                assert read.hidden_BTD is not None
                return read.cache, read.hidden_BTD
        output = self.model(
            ids_RC,
            cache=cache,
            return_cache=True,
            fast_weights=FastWeightOptions(scale_S=scale_S),
            prefix_BPD=prefix_RPD,
        )
        assert output.cache is not None
        return output.cache, output.hidden_BTD

    def settle(
        self, episode: EpisodeState, proposal: Proposal, decision: Decision, index: EpisodicMemory | None = None
    ) -> EpisodeState:
        """The state after the decision: rows that commit get the proposal's chosen branch, the others their old state.

        index: gets the transactions of rows that commit, in the order of rows. They are durable when this returns.
        """
        commit_B, after = decision.commit_B, proposal.after
        parts: list[Group] = []
        for (rows_R, before), (_, proposed) in zip(episode.groups, after.groups, strict=True):
            assert proposed is not None
            commit_R = commit_B[rows_R]
            if commit_R.any():
                if len(self.scales) > 1:
                    proposed = branch(proposed, decision.branch_B[rows_R])
                parts.append(_part(Group(rows_R, proposed), commit_R))
            if not commit_R.all():
                parts.append(_part(Group(rows_R, before), ~commit_R))
        if index is not None and after.transactions is not None:
            for commit, staged in zip(commit_B.tolist(), after.transactions, strict=True):
                if commit and staged is not None:
                    index.commit(staged, after.steps)
        memory_BM = after.memory_BM
        if memory_BM is not None and episode.memory_BM is not None:
            memory_BM = torch.where(commit_B.unsqueeze(1), memory_BM, episode.memory_BM)
        commits_B = torch.where(commit_B, after.commits_B, episode.commits_B)
        return EpisodeState(self._together(parts), memory_BM, None, after.steps, commits_B)

    def step(self, episode: EpisodeState, ids_BC: Tensor, decide: Decide) -> tuple[EpisodeState, Decision, Tensor]:
        """Proposal, decision, commit or rollback: gives the new state, the decision and the hidden states [B, C, D]."""
        proposal = self.propose(episode, ids_BC)
        decision = decide(proposal.end_BD())
        return self.settle(episode, proposal, decision), decision, proposal.hidden_BCD

    def ask(self, episode: EpisodeState, ids_BT: Tensor) -> Tensor:
        """Hidden states [B, T, D] of tokens that continue the episode. The state of the episode is kept."""
        hidden = [self.model(ids_BT[rows_R], cache=cache).hidden_BTD for rows_R, cache in episode.groups]
        return _gathered(episode.groups, hidden)

    def _together(self, parts: Sequence[Group]) -> tuple[Group, ...]:
        """Joins the parts whose caches have the same shape."""
        by_length: dict[int, list[Group]] = {}
        for part in parts:
            by_length.setdefault(_length(part.cache) if self._grows else 0, []).append(part)
        return tuple(_joined(by_length[length]) for length in sorted(by_length))


def _best(score_BS: Tensor, threshold: float) -> Decision:
    best_B, branch_B = score_BS.max(-1)
    commit_B = best_B >= threshold
    return Decision(commit_B, torch.where(commit_B, branch_B, 0))


def _gathered(groups: Sequence[Group], parts: Sequence[Tensor]) -> Tensor:
    """The groups' rows in the order of the batch."""
    if len(groups) == 1:
        return parts[0]
    return torch.cat(list(parts))[torch.cat([rows_R for rows_R, _ in groups]).argsort()]


def _part(group: Group, mask_R: Tensor) -> Group:
    """The rows of a group that the mask keeps; the group itself if it keeps all."""
    if mask_R.all():
        return group
    kept = mask_R.nonzero().squeeze(1)
    return Group(group.rows_R[kept], None if group.cache is None else select(group.cache, kept))


def _length(cache: Cache | None) -> int:
    """Tokens in the attention caches."""
    mixers = [block.mixer for block in cache or ()]
    return next((mixer.keys.shape[2] for mixer in mixers if isinstance(mixer, AttentionCache)), 0)


def _joined(groups: list[Group]) -> Group:
    if len(groups) == 1:
        return groups[0]
    rows_R = torch.cat([group.rows_R for group in groups])
    order = rows_R.argsort()
    made = next((group.cache for group in groups if group.cache is not None), None)
    if made is None:
        return Group(rows_R[order], None)
    caches = [unread(made, len(rows)) if cache is None else cache for rows, cache in groups]
    return Group(rows_R[order], select(concatenated(*caches), order))
