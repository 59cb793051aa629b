"""Reads episodes with operations on memories: the operations, rollouts of a policy, demonstrations of an expert.

A controller step reads a chunk. The head chooses an operation from the window's last hidden state:

    noop           continues with the next chunk
    summarize      puts the window's summaries in front of the next window, and continues
    cache_write    stages the chunk under its key, and continues
    retrieve       finds the stored chunks nearest to the window's query, and stays at the chunk
    splice_window  puts the best found chunk that is not in the window in front of it; the window is read again

An operation that continues also commits the staged changes; a search does not see them before. The question is read
last, as one more chunk; an operation that continues from it ends the rollout with the answer. noop costs nothing;
rl.costs gives the costs of the others. Their sum is at most controller.step_budget.

Shapes: R rollouts, K decisions of all of them, O operations, B episodes, N chunks, A tokens of an answer, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.reason.episodes import Episodes, EpisodeSource
from cdrmix.reason.heads import NOOP, OPERATIONS, RETRIEVE, SPLICE, SUMMARIZE, WRITE
from cdrmix.reason.memory.episode_log import NEVER
from cdrmix.reason.memory.kept_episodes import EpisodesInMemory, EpisodicMemory, Hit, Staged
from cdrmix.reason.model import StageBModel
from cdrmix.reason.operations.windows import Read, Window, Windows


class Limits(NamedTuple):
    """Limits of a rollout. horizon: the most operations. budget: the largest sum of their costs. costs: by operation, 0
    for noop. spliced: the most chunks in front of another."""

    horizon: int
    budget: float
    costs: tuple[float, ...]
    spliced: int

    @classmethod
    def of(cls, reasoning: Reasoning) -> Limits:
        """The limits of a configuration."""
        rl, costs = reasoning.rl, reasoning.rl.costs
        by_operation = (0.0, costs.summarize, costs.retrieve, costs.splice_window, costs.cache_write)
        return cls(rl.horizon, reasoning.controller.step_budget, by_operation, reasoning.memory.max_spliced)


@dataclass
class Row:
    """The state of one rollout."""

    episode: int
    memory: EpisodicMemory | None
    limits: Limits
    chunk: int = 0
    carried: int = -1  # the window whose summaries stand in front of this one
    window: int = -1
    spliced: list[Hit] = field(default_factory=list)
    found: list[Hit] = field(default_factory=list)
    searched: bool = False  # since the window was last read
    staged: Staged = field(default_factory=Staged)
    written: dict[int, int] = field(default_factory=dict)  # chunk -> id of its episode
    counts: list[int] = field(default_factory=lambda: [0] * len(OPERATIONS))
    taken: int = 0  # operations
    done: bool = False

    def next_found(self) -> Hit | None:
        """The best found chunk that is not in the window."""
        spliced_ids = {hit.id for hit in self.spliced}
        return next((hit for hit in self.found if hit.id not in spliced_ids), None)

    def allowed(self, chunks: int) -> list[bool]:
        """Which operations are allowed. A window is searched once. At the horizon a row can only continue. An operation
        that costs more than the rest of the budget is not allowed."""
        needed = chunks - self.chunk + 1  # operations that the answer still needs
        may_splice = len(self.spliced) < self.limits.spliced and self.taken + 1 + needed <= self.limits.horizon
        possible = [True, True, may_splice and not self.searched, may_splice and self.next_found() is not None, True]
        left = self.limits.budget - self.cost
        return [is_possible and cost <= left for is_possible, cost in zip(possible, self.limits.costs, strict=True)]

    def facts(self, chunks: int) -> list[float]:
        """Inputs of the heads: whether there is a chunk to splice, whether this is the question, the share of the
        allowed spliced chunks that are in the window, whether it was searched."""
        full = len(self.spliced) / self.limits.spliced
        return [float(self.next_found() is not None), float(self.chunk == chunks), full, float(self.searched)]

    @property
    def cost(self) -> float:
        return sum(cost * count for cost, count in zip(self.limits.costs, self.counts, strict=True))


class Decisions(NamedTuple):
    """Decisions in the order in which they were made. log_probs_K: under the distribution that was sampled."""

    row_K: Tensor
    window_K: Tensor
    facts_KF: Tensor
    allowed_KO: Tensor
    taken_K: Tensor
    log_probs_K: Tensor

    def features(self, read: Read) -> Tensor:
        """The input of the heads at every decision, [K, D + FACTS]."""
        windows = self.window_K.to(read.last_WD.device)
        return torch.cat([read.last_WD[windows], self.facts_KF.to(read.last_WD)], 1)


class Rollouts(NamedTuple):
    """A batch of rollouts. read: its windows' hidden states, without gradient; None for demonstrations."""

    windows: Windows
    read: Read | None
    rows: list[Row]
    decisions: Decisions
    final_R: Tensor  # the window that each answers from


class Reader:
    """Reads episodes of a source with the memory and the horizon of the configuration."""

    def __init__(self, reasoning: Reasoning, source: EpisodeSource) -> None:
        self.reasoning, self.source, self.marks = reasoning, source, source.marks
        self.memory, self.limits = reasoning.memory, Limits.of(reasoning)

    def new_memory(self) -> EpisodicMemory | None:
        """An empty episodic memory for a rollout; None if the configuration has none."""
        return EpisodesInMemory(self.memory.dim, self.memory.max_tokens) if self.memory.episodic else None

    def window(
        self, row: Row, chunks_BNC: Sequence[Sequence[Sequence[int]]], questions: Sequence[Sequence[int]]
    ) -> Window:
        """The window that a rollout reads now."""
        spliced = [token for hit in row.spliced for token in hit.tokens.tolist()]
        chunks = chunks_BNC[row.episode]
        if row.chunk < len(chunks):
            chunk = chunks[row.chunk]
            return Window((*spliced, *chunk, self.marks.update), len(chunk), 1, row.carried)
        question = (self.marks.question, *questions[row.episode], self.marks.answer)
        return Window((*spliced, *question), len(question), 0, row.carried)

    @torch.no_grad()
    def roll_out(
        self,
        model: StageBModel,
        episodes: Episodes,
        group: int,
        generator: torch.Generator | None,
        *,
        temperature: float = 1.0,
        memories: Sequence[EpisodicMemory] | None = None,
    ) -> Rollouts:
        """Rolls out every episode `group` times, in neighbouring rows. generator None: the most probable operations.

        memories: one for each rollout; None: new ones. The random numbers of a rollout do not depend on the others.
        """
        heads = model.operations
        assert heads is not None
        device = next(model.parameters()).device
        count = len(episodes.question_BQ) * group
        read: Read | None = None

        def choose(windows: Windows, rows: list[Row], facts_KF: Tensor, allowed_KO: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal read
            read = windows.read(model, read)
            numbers_K = torch.tensor([row.window for row in rows], device=device)
            features_KD = torch.cat([read.last_WD[numbers_K], facts_KF.to(read.last_WD)], 1)
            log_probs_KO = heads.log_probs(features_KD, allowed_KO.to(device), temperature).cpu()
            if generator is None:
                taken_K = log_probs_KO.argmax(1)
            else:
                points_R = torch.rand(count, generator=generator, dtype=torch.float64)
                points_K = points_R[[order[id(row)] for row in rows]]
                probs_KO = log_probs_KO.double().softmax(-1)
                sums_KO = probs_KO.cumsum(-1)
                taken_K = (sums_KO <= (points_K * sums_KO[:, -1])[:, None]).sum(1)
            return taken_K, log_probs_KO.gather(1, taken_K[:, None]).squeeze(1)

        def keys_of(row: Row, wanted: str) -> np.ndarray:
            assert read is not None
            return (read.keys_WS if wanted == "key" else read.queries_WS)[row.window].float().cpu().numpy()

        all_rows = [
            Row(index // group, self.new_memory() if memories is None else memories[index], self.limits)
            for index in range(count)
        ]
        order = {id(row): index for index, row in enumerate(all_rows)}
        windows, decisions = self._run(episodes, all_rows, choose, keys_of)
        read = windows.read(model, read)
        return Rollouts(windows, read, all_rows, decisions, torch.tensor([row.window for row in all_rows]))

    def _run(
        self,
        episodes: Episodes,
        rows: list[Row],
        choose: Callable[[Windows, list[Row], Tensor, Tensor], tuple[Tensor, Tensor]],
        keys_of: Callable[[Row, str], np.ndarray],
    ) -> tuple[Windows, Decisions]:
        """Lets all rows take operations together until each has answered."""
        chunks_BNC, questions = episodes.chunks_BNC.tolist(), episodes.question_BQ.tolist()
        chunks = episodes.chunks_BNC.shape[1]
        windows = Windows()
        columns: list[tuple[Tensor, ...]] = []
        order = {id(row): index for index, row in enumerate(rows)}
        while active := [row for row in rows if not row.done]:
            for row in active:
                row.window = windows.add(self.window(row, chunks_BNC, questions))
            facts_KF = torch.tensor([row.facts(chunks) for row in active])
            allowed_KO = torch.tensor([row.allowed(chunks) for row in active])
            taken_K, log_probs_K = choose(windows, active, facts_KF, allowed_KO)
            numbers_K = torch.tensor([order[id(row)] for row in active])
            windows_K = torch.tensor([row.window for row in active])
            columns.append((numbers_K, windows_K, facts_KF, allowed_KO, taken_K, log_probs_K))
            for row, operation in zip(active, taken_K.tolist(), strict=True):
                self._apply(row, operation, chunks_BNC, keys_of)
        return windows, Decisions(*(torch.cat(column) for column in zip(*columns, strict=True)))

    def _apply(
        self,
        row: Row,
        operation: int,
        chunks_BNC: Sequence[Sequence[Sequence[int]]],
        keys_of: Callable[[Row, str], np.ndarray],
    ) -> None:
        row.counts[operation] += 1
        row.taken += 1
        if operation == RETRIEVE:
            row.searched = True
            if row.memory is not None:
                query = keys_of(row, "query")
                (row.found,) = row.memory.search(query[None], self.memory.top_k, row.chunk)
            return
        if operation == SPLICE:
            hit = row.next_found()
            assert hit is not None
            row.spliced.insert(0, hit)
            row.staged.use([hit])
            row.searched = False
            return
        chunks = chunks_BNC[row.episode]
        if operation == WRITE and row.chunk < len(chunks):
            time_to_live = self.memory.time_to_live
            expires = NEVER if time_to_live is None else row.chunk + time_to_live
            row.staged.add(keys_of(row, "key"), np.array(chunks[row.chunk], np.uint32), expires)
        if row.memory is not None:
            added = row.memory.commit(row.staged, row.chunk)
            row.written |= dict.fromkeys([row.chunk] if added else [], added[0] if added else 0)
        row.staged = Staged()
        row.carried = row.window if operation == SUMMARIZE else -1
        row.done = row.chunk == len(chunks)
        if not row.done:  # else the answer is generated from this window
            row.chunk += 1
            row.spliced, row.found, row.searched = [], [], False

    def demonstrate(self, episodes: Episodes, waste: float, generator: torch.Generator) -> Rollouts:
        """Rollouts of an expert that knows which chunks contain facts and which of them the answer needs.

        The expert writes the chunks with facts, and retrieves the needed ones from the last to the first. waste: the
        share of the other chunks that it also writes. In some batches it summarises a share of the other chunks instead
        (phases.operations_imitation), so that summaries occur in training; in every batch this would need many more
        passes. Without episodic memory it summarises a share of all chunks. It takes noop where an operation is not
        allowed.
        """
        count, chunks = episodes.chunks_BNC.shape[:2]
        tells_BN = torch.zeros(count, chunks, dtype=torch.bool).scatter_(1, episodes.fact_chunk_BF, True)
        points_BN = torch.rand(count, chunks, generator=generator)
        settings = self.reasoning.phases.operations_imitation
        share = settings.summarised * float(torch.rand((), generator=generator) < settings.summarised_batches)
        summarised_BN = torch.rand(count, chunks, generator=generator) < share
        path = [
            _path(chunk_F, asked_F) for chunk_F, asked_F in zip(episodes.fact_chunk_BF, episodes.asked_BF, strict=True)
        ]
        tokens = episodes.chunks_BNC.numpy().astype(np.uint32)

        def operation_of(row: Row) -> int:
            if row.chunk < chunks:
                if tells_BN[row.episode, row.chunk] and self.memory.episodic:
                    return WRITE
                if summarised_BN[row.episode, row.chunk]:
                    return SUMMARIZE
                return WRITE if self.memory.episodic and points_BN[row.episode, row.chunk] < waste else NOOP
            left = path[row.episode][len(row.spliced) :]
            if not left or not self.memory.episodic or len(row.spliced) == self.limits.spliced:
                return NOOP
            if not row.searched:
                return RETRIEVE
            return SPLICE

        def choose(windows: Windows, rows: list[Row], facts_KF: Tensor, allowed_KO: Tensor) -> tuple[Tensor, Tensor]:
            taken_K = torch.tensor([operation_of(row) for row in rows])
            taken_K = taken_K.where(allowed_KO.gather(1, taken_K[:, None]).squeeze(1), NOOP)
            return taken_K, torch.zeros(len(rows))

        rows = [Row(episode, _Oracle(path[episode], tokens[episode]), self.limits) for episode in range(count)]
        windows, decisions = self._run(episodes, rows, choose, lambda row, wanted: np.ones(self.memory.dim, np.float32))
        return Rollouts(windows, None, rows, decisions, torch.tensor([row.window for row in rows]))


class _Oracle:
    """The expert's memory: a search of it finds exactly the chunks that the answer needs."""

    def __init__(self, path: list[int], chunks: np.ndarray) -> None:
        self._hits = [Hit(chunk, 1.0, chunks[chunk]) for chunk in path]

    def __len__(self) -> int:
        return len(self._hits)

    def __contains__(self, id: object) -> bool:
        return True

    def search(self, queries: np.ndarray, count: int, step: int) -> list[list[Hit]]:
        return [self._hits]

    def commit(self, staged: Staged, step: int) -> list[int]:
        return []


def _path(chunk_F: Tensor, asked_F: Tensor) -> list[int]:
    """The chunks that the answer needs, each once, from the last fact's to the first's."""
    chunks = chunk_F[asked_F].flip(0).tolist()
    return list(dict.fromkeys(chunks))
