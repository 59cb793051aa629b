"""The token memory agent: it reads a document in windows, writes a memory of tokens, and answers from that memory.

After MemAgent (arXiv 2507.02259). Every turn is a sequence of its own and has a fixed width. The time and the memory
of a token therefore do not depend on the length of the document:

    turn     [QUESTION | question | MEMORY | memory | CHUNK | chunk | UPDATE]  ->  a new memory
    last     [QUESTION | question | MEMORY | memory | ANSWER]                  ->  the answer

With several heads (arXiv 2607.01523) the memory has parts, and a turn writes the part that has not changed for longest.
A part that a turn writes without a change counts as unchanged, so the next turn writes the same part. Empty parts are
therefore filled before a full one is overwritten. The part to be written stands last in the window.

Shapes: B episodes (or rollouts), N chunks, C tokens of a chunk, Q of a question, M of the memory, H heads, P = M / H
tokens of a part, A tokens of an answer, F facts, W tokens of a fact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema_reasoning import Reasoning, Rl
from cdrmix.model.decoding import Prefix, prefill, repeat
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.episodes import Episodes, EpisodeSource, Marks, chunk_counts
from cdrmix.reason.rl.rewards import REWARDS
from cdrmix.reason.rl.rollout import Generated, decode


@dataclass(frozen=True)
class Window:
    """The layout of a window: widths of question, memory, chunk and answer in tokens; heads; pad and mark ids."""

    question: int
    memory: int
    heads: int
    chunk: int
    answer: int
    pad: int
    marks: Marks

    @classmethod
    def of(cls, reasoning: Reasoning, source: EpisodeSource) -> Window:
        """The layout of a configuration, whose heads divide the memory's tokens (config.conflicts.reasoning)."""
        memory, heads = reasoning.memory.tokens, reasoning.memory.heads
        return cls(source.question, memory, heads, source.chunk, source.answer, source.pad, source.marks)

    @property
    def part(self) -> int:
        """Tokens that a turn writes."""
        return self.memory // self.heads

    @property
    def length(self) -> int:
        """Tokens of a turn: what it reads and what it writes."""
        return self.question + self.memory + self.chunk + 4 + self.part

    def begin(self, question_BQ: Tensor) -> Tensor:
        """The start of every window of an episode: [QUESTION | question]."""
        return torch.cat([self._mark(question_BQ, self.marks.question), question_BQ], 1)

    def turn(self, memory_BM: Tensor, chunk_BC: Tensor) -> Tensor:
        """The rest of a turn's prompt: [MEMORY | memory | CHUNK | chunk | UPDATE]."""
        memory, chunk, update = (self._mark(chunk_BC, mark) for mark in self.marks[1:4])
        return torch.cat([memory, memory_BM, chunk, chunk_BC, update], 1)

    def last(self, memory_BM: Tensor) -> Tensor:
        """The rest of the last turn's prompt: [MEMORY | memory | ANSWER]."""
        memory, answer = (self._mark(memory_BM, mark) for mark in (self.marks.memory, self.marks.answer))
        return torch.cat([memory, memory_BM, answer], 1)

    def memory_of(self, prompt_BL: Tensor) -> Tensor:
        """The memory that a prompt shows, [B, M]."""
        start = self.question + 2
        return prompt_BL[:, start : start + self.memory]

    def written(self, generated: Generated) -> Tensor:
        """The generated tokens before the end token, padded to the width of the turn."""
        tokens = generated.tokens_BN
        return torch.where(generated.mask_BN & (tokens != self.marks.end), tokens, self.pad)

    def _mark(self, like: Tensor, mark: int) -> Tensor:
        return like.new_full((len(like), 1), mark)


class TokenMemory(NamedTuple):
    """The parts of the memory, and for each the turn that changed it last, counted from 1 (0: none)."""

    parts_BHP: Tensor
    changed_BH: Tensor

    @classmethod
    def empty(cls, window: Window, batch: int, device: torch.device) -> TokenMemory:
        parts = torch.full((batch, window.heads, window.part), window.pad, device=device)
        return cls(parts, torch.zeros(batch, window.heads, dtype=torch.int64, device=device))

    def shown(self) -> Tensor:
        """The memory as a window shows it, [B, M]: the part that changed last stands first."""
        return self.parts_BHP.gather(1, self._order().unsqueeze(2).expand_as(self.parts_BHP)).flatten(1)

    def oldest(self) -> Tensor:
        """The part that the next turn writes, [B]."""
        return self._order()[:, -1]

    def write(self, part_BP: Tensor, turn: int, may_B: Tensor | None = None) -> TokenMemory:
        """The memory after turn `turn` has written; unchanged in rows where may_B is False."""
        rows = torch.arange(len(part_BP), device=part_BP.device)
        oldest = self.oldest()
        if may_B is not None:
            part_BP = torch.where(may_B.unsqueeze(1), part_BP, self.parts_BHP[rows, oldest])
        changes_B = (part_BP != self.parts_BHP[rows, oldest]).any(1)
        parts, changed = self.parts_BHP.clone(), self.changed_BH.clone()
        parts[rows, oldest] = part_BP
        changed[rows, oldest] = torch.where(changes_B, turn, changed[rows, oldest])
        return TokenMemory(parts, changed)

    def _order(self) -> Tensor:
        return self.changed_BH.argsort(dim=1, descending=True, stable=True)


def holds(parts_BHP: Tensor, facts_BFW: Tensor, pad: int) -> Tensor:
    """Whether a part contains the tokens of a fact in sequence: bool [B, F].

    Padding after a fact's tokens matches anything. A fact that is padding alone is in no part.
    """
    width = facts_BFW.shape[2]
    padded = torch.nn.functional.pad(parts_BHP, (0, width - 1), value=pad)
    positions = padded.unfold(2, width, 1).flatten(1, 2).unsqueeze(1)  # [B, 1, H P, W]
    facts = facts_BFW.unsqueeze(2)
    found_BF = ((positions == facts) | (facts == pad)).all(3).any(2)
    return found_BF & (facts_BFW != pad).any(2)


class Turn(NamedTuple):
    """One sequence: the prompt and what was generated after it."""

    prompt_BL: Tensor
    generated: Generated


class Reading(NamedTuple):
    """The result of reading a batch of episodes.

    turns: one for each chunk, then the one that answers; empty without keep_turns.
    answer_BA: padded. matched_B: share of the answer's tokens that are right, float64. exact_B: whether all are right
    and nothing follows them. asked_BF: facts that the answer needs. captured_BF: those of them that were in the memory
    after the chunk that tells them. held_BF: the captured facts that are in the memory at the end. changes_B: number of
    turns that changed the memory.
    """

    turns: tuple[Turn, ...]
    memory: TokenMemory
    answer_BA: Tensor
    matched_B: Tensor
    exact_B: Tensor
    asked_BF: Tensor
    captured_BF: Tensor
    held_BF: Tensor
    changes_B: Tensor


def read_episodes(
    model: LanguageModel,
    window: Window,
    episodes: Episodes,
    *,
    temperature: float,
    generator: torch.Generator,
    step_budget: int,
    group: int = 1,
    keep_turns: bool = False,
) -> Reading:
    """Rolls the agent out `group` times for each episode (in neighbouring rows). Temperature 0 is greedy.

    step_budget: changes that a rollout may make to its memory; after them the memory stays unchanged. When no rollout
    of the batch may change it, the remaining chunks are not read. A chunk of padding alone changes nothing.
    The question is read once for each episode. keep_turns keeps the tokens of every turn, for the policy's update.
    Without it, what is kept does not grow with the number of chunks.
    """
    device = next(model.parameters()).device
    chunks_BNC = episodes.chunks_BNC  # stays on its device; each chunk is moved when it is read
    rows_R = torch.arange(len(chunks_BNC), device=device).repeat_interleave(group)
    parts = (episodes.answer_BA, episodes.facts_BFW, episodes.fact_chunk_BF, episodes.asked_BF)
    begin_BL = window.begin(episodes.question_BQ.to(device))
    answer, facts, fact_chunks, asked = (part.to(device)[rows_R] for part in parts)
    question_prefix = prefill(model, begin_BL)
    repeated_prefix = repeat(question_prefix, group)
    begin_RL = begin_BL[rows_R]
    memory = TokenMemory.empty(window, len(rows_R), device)
    captured_BF = torch.zeros_like(asked)
    changes_B = torch.zeros(len(rows_R), dtype=torch.int64, device=device)
    turns: list[Turn] = []

    def continue_from(prefix: Prefix, prompt_BL: Tensor, new_tokens: int, written_R: Tensor | None = None) -> Generated:
        generated = decode(
            model, prefix, new_tokens, temperature=temperature, generator=generator, end=window.marks.end
        )
        if written_R is not None:
            generated = generated._replace(mask_BN=generated.mask_BN & written_R.unsqueeze(1))
        if keep_turns:
            turns.append(Turn(torch.cat([begin_RL, prompt_BL], 1), generated))
        return generated

    for number in range(chunks_BNC.shape[1]):
        may_B = changes_B < step_budget
        if not may_B.any():
            break
        chunk_BC = chunks_BNC[:, number].to(device)
        read_R = (chunk_BC != window.pad).any(1)[rows_R]
        prompt = window.turn(memory.shown(), chunk_BC[rows_R])
        if number == 0:  # the same in all rows of a group
            prefix = repeat(prefill(model, prompt[::group], question_prefix.cache), group)
        else:
            prefix = prefill(model, prompt, repeated_prefix.cache)
        generated = continue_from(prefix, prompt, window.part, read_R & may_B)
        memory = memory.write(window.written(generated), number + 1, may_B & read_R)
        changes_B += (memory.changed_BH == number + 1).any(1)
        now = fact_chunks == number
        captured_BF |= now & asked & holds(memory.parts_BHP, facts, window.pad)
    prompt = window.last(memory.shown())
    answered = window.written(continue_from(prefill(model, prompt, repeated_prefix.cache), prompt, window.answer))
    right = answered == answer
    wanted = answer != window.pad
    return Reading(
        tuple(turns),
        memory,
        answered,
        (right & wanted).sum(1).double() / wanted.sum(1).clamp(min=1),
        right.all(1),
        asked,
        captured_BF,
        captured_BF & holds(memory.parts_BHP, facts, window.pad),
        changes_B,
    )


class Rewards(NamedTuple):
    """total = task_weight task - latency_weight latency + stability_weight stability; float64 [B].

    task: of the answer. latency: turns that changed the memory, divided by the step budget.
    stability: the share of the captured facts that are held at the end; 0 where no token of the answer is right,
    because facts that do not serve the answer are worth nothing.
    """

    total_B: Tensor
    task_B: Tensor
    latency_B: Tensor
    stability_B: Tensor


def rewards_of(reading: Reading, settings: Rl, step_budget: int, task_B: Tensor | None = None) -> Rewards:
    """The rewards of rollouts, and their parts. task_B: those of the answers; None: 1 where all tokens are right."""
    task = reading.exact_B.double() if task_B is None else task_B
    latency = reading.changes_B.double() / step_budget
    captured = reading.captured_BF.sum(1)
    kept = reading.held_BF.sum(1).double() / captured.clamp(min=1)
    stability = torch.where(reading.matched_B > 0, kept, 0.0)
    total = settings.task_weight * task - settings.latency_weight * latency + settings.stability_weight * stability
    return Rewards(total, task, latency, stability)


class Score(NamedTuple):
    """Means over episodes, all shares; NaN for shares of nothing.

    matched: right tokens of the answer. exact: answers that are right as a whole, as text where there is text. f1: of
    the words of the answer; without text as matched. capture: captured facts of those asked for. retention: captured
    facts that are held at the end. changes: turns that changed the memory.
    """

    matched: float
    exact: float
    f1: float
    capture: float
    retention: float
    changes: float


def last_chunk_only(episodes: Episodes, pad: int) -> Episodes:
    """The episodes with their last chunk alone that is not empty."""
    last_B = (chunk_counts(episodes.chunks_BNC, pad) - 1).clamp(min=0)
    return episodes._replace(
        chunks_BNC=episodes.chunks_BNC[torch.arange(len(last_B)), last_B].unsqueeze(1),
        fact_chunk_BF=episodes.fact_chunk_BF - last_B.unsqueeze(1),
    )


def evaluate(
    model: LanguageModel,
    window: Window,
    source: EpisodeSource,
    numbers: range,
    chunks: int,
    *,
    step_budget: int,
    last_only: bool = False,
    rows: int = 256,
) -> Score:
    """The greedy agent's score on episodes `numbers`.

    last_only: the agent reads the last chunk alone, like a window without a memory. rows: episodes in one batch.
    """
    sums, turns = torch.zeros(7, dtype=torch.float64), 0
    for start in range(0, len(numbers), rows):
        episodes = source.batch(numbers[start : start + rows], chunks)
        if last_only:
            episodes = last_chunk_only(episodes, window.pad)
        reading = read_episodes(
            model, window, episodes, temperature=0.0, generator=torch.Generator(), step_budget=step_budget
        )
        exact_B, f1_B = reading.exact_B.double(), reading.matched_B
        asked = source.questions(numbers[start : start + rows], chunks)
        if asked is not None:
            texts = [source.text(ids) for ids in reading.answer_BA.tolist()]
            pairs = [(text, each.answers) for text, each in zip(texts, asked, strict=True)]
            exact_B = torch.tensor([REWARDS["exact"](*pair) for pair in pairs])
            f1_B = torch.tensor([REWARDS["f1"](*pair) for pair in pairs])
        parts = (reading.matched_B, exact_B, f1_B, reading.asked_BF, reading.captured_BF, reading.held_BF)
        sums += torch.stack([part.sum().double().cpu() for part in (*parts, reading.changes_B)])
        turns += int(chunk_counts(episodes.chunks_BNC, window.pad).sum())
    matched, exact, f1, of_facts, captured, held, changes = sums.tolist()
    count = len(numbers)
    return Score(
        matched / count,
        exact / count,
        f1 / count,
        captured / of_facts if of_facts else math.nan,
        held / captured if captured else math.nan,
        changes / max(turns, 1),
    )
