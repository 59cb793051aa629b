"""The memory agent's first phase: imitation of a teacher that captures the facts of the question and keeps them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.reason.agent.agent import TokenMemory, Window
from cdrmix.reason.episodes import Episodes, EpisodeSource
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.phase import PHASES, Sources, generator_of, reasoning_of
from cdrmix.reason.rl.rollout import micro_batches, taken
from cdrmix.training.objective import Outcome


class Demonstrations(NamedTuple):
    """Sequences of one width: prompts [S, L], the tokens to write after them [S, N], and which tokens count."""

    prompts_SL: Tensor
    targets_SN: Tensor
    mask_SN: Tensor


def demonstrate(window: Window, episodes: Episodes, leak: float, generator: torch.Generator) -> list[Demonstrations]:
    """Every turn of a teacher that captures the facts asked for and keeps them; then every answer.

    leak: of the turns whose part holds facts, the share in which the demonstration drops one of them. The teacher's own
    memory keeps that fact. Facts that do not fit the part are not captured. Facts that a chunk contains word for word
    are written in the order of the chunk, so that they can be copied in reading order.
    """
    question, chunks, answer, facts, fact_chunks, asked, _ = episodes
    batch, count = chunks.shape[:2]
    lengths_BF = (facts != window.pad).sum(2)
    longest = int(torch.where(asked, lengths_BF, 0).max()) if asked.numel() else 0
    if longest > window.part:
        raise ConfigError(
            f"reasoning.memory: a part of {window.part} tokens (tokens / heads) does not hold a fact of"
            f" {longest}; make reasoning.memory.tokens larger, or heads fewer"
        )
    slots = facts.shape[1]
    begin = window.begin(question)
    read_BN = (chunks != window.pad).any(2)
    held_BHS = torch.full((batch, window.heads, slots), -1)  # facts in the slots of the parts, -1: none
    memory = TokenMemory.empty(window, batch, chunks.device)
    turns: list[Demonstrations] = []
    numbers = torch.arange(facts.shape[1])
    rows = torch.arange(batch)
    for number in range(count):
        oldest = memory.oldest()
        kept_BS = held_BHS[rows, oldest]
        news_BF = torch.where(asked & (fact_chunks == number), numbers, -1)  # none in a chunk that is not read
        news_BF = news_BF.gather(1, _first_positions(chunks[:, number], facts, window.pad).argsort(dim=1, stable=True))
        prompt = torch.cat([begin, window.turn(memory.shown(), chunks[:, number])], 1)
        lost_BS = _without_one(kept_BS, leak, generator)
        shown_BS = _compact(lost_BS, news_BF, lengths_BF, window.part)
        turns.append(_sequence(window, prompt, _spell(facts, shown_BS, window), read_BN[:, number]))
        after_BS = _compact(kept_BS, news_BF, lengths_BF, window.part)
        held_BHS[rows, oldest] = after_BS
        memory = memory.write(_spell(facts, after_BS, window), number + 1, read_BN[:, number])
    prompt = torch.cat([begin, window.last(memory.shown())], 1)
    complete_B = (~asked | (held_BHS.flatten(1).unsqueeze(2) == numbers).any(1)).all(1)
    last = _sequence(window, prompt, answer)
    last = last._replace(mask_SN=last.mask_SN & complete_B.unsqueeze(1))  # not in memory: no answer
    return [Demonstrations(*(torch.cat(column) for column in zip(*turns, strict=True))), last]


def demonstrate_memories(window: Window, episodes: Episodes, memories_BNM: Tensor) -> list[Demonstrations]:
    """Every turn of a teacher whose memory after each chunk is given; then every answer."""
    question, chunks, answer = episodes[:3]
    check_memories(memories_BNM, window.pad, window.memory, window.heads)
    begin = window.begin(question)
    read_BN = (chunks != window.pad).any(2)
    missing = max(0, window.memory - memories_BNM.shape[2])
    texts_BNM = functional.pad(memories_BNM, (0, missing), value=window.pad)[:, :, : window.memory]
    memory = TokenMemory.empty(window, len(chunks), chunks.device)
    turns = []
    for number in range(chunks.shape[1]):
        prompt = torch.cat([begin, window.turn(memory.shown(), chunks[:, number])], 1)
        turns.append(_sequence(window, prompt, texts_BNM[:, number], read_BN[:, number]))
        memory = memory.write(texts_BNM[:, number], number + 1, read_BN[:, number])
    last = _sequence(window, torch.cat([begin, window.last(memory.shown())], 1), answer)
    return [Demonstrations(*(torch.cat(column) for column in zip(*turns, strict=True))), last]


def check_memories(memories_BNM: Tensor, pad: int, tokens: int, heads: int) -> None:
    """Raises ConfigError for demonstrated memories that a token memory of these sizes does not hold."""
    if heads > 1:
        raise ConfigError("demonstrated memories have one part; set reasoning.memory.heads: 1")
    most = int((memories_BNM != pad).sum(2).max())
    if most > tokens:
        raise ConfigError(f"a demonstrated memory has {most} tokens; make reasoning.memory.tokens {tokens} larger")


def _first_positions(chunk_BC: Tensor, facts_BFW: Tensor, pad: int) -> Tensor:
    """The position of each fact's first token in a chunk, [B, F]; the chunk's width for a fact that is not in it."""
    width = facts_BFW.shape[2]
    windows = functional.pad(chunk_BC, (0, width - 1), value=pad).unfold(1, width, 1).unsqueeze(1)  # [B, 1, C, W]
    facts = facts_BFW.unsqueeze(2)
    found_BFC = ((windows == facts) | (facts == pad)).all(3)
    positions_C = torch.arange(chunk_BC.shape[1], device=chunk_BC.device)
    return torch.where(found_BFC, positions_C, chunk_BC.shape[1]).amin(2)


def _without_one(kept_BS: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Drops one kept fact in a share of the rows."""
    points = torch.rand(len(kept_BS), 2, generator=generator, dtype=torch.float64)
    count_B = (kept_BS >= 0).sum(1)
    loses_B = points[:, 0] < share
    which_B = (points[:, 1] * count_B).long()
    slot_S = torch.arange(kept_BS.shape[1])
    return torch.where(loses_B.unsqueeze(1) & (slot_S == which_B.unsqueeze(1)), -1, kept_BS)


def _compact(kept_BS: Tensor, news_BF: Tensor, lengths_BF: Tensor, part: int) -> Tensor:
    """The kept facts, then the new ones, without gaps, as many as a part's tokens hold."""
    both = torch.cat([kept_BS, news_BF], 1)
    order = (both < 0).long().argsort(dim=1, stable=True)
    both = both.gather(1, order)[:, : kept_BS.shape[1]]
    if not both.shape[1]:
        return both
    lengths = torch.where(both >= 0, lengths_BF.gather(1, both.clamp(min=0)), 0)
    return torch.where(lengths.cumsum(1) <= part, both, -1)


def _spell(facts_BFW: Tensor, slots_BS: Tensor, window: Window) -> Tensor:
    """The tokens of facts by number, without gaps, padded to a part."""
    width = facts_BFW.shape[2]
    spelled = facts_BFW.gather(1, slots_BS.clamp(min=0).unsqueeze(2).expand(-1, -1, width))
    spelled = torch.where(slots_BS.unsqueeze(2) >= 0, spelled, window.pad).flatten(1)
    order = (spelled == window.pad).long().argsort(dim=1, stable=True)
    missing = max(0, window.part - spelled.shape[1])
    return functional.pad(spelled.gather(1, order), (0, missing), value=window.pad)[:, : window.part]


def _sequence(window: Window, prompt_SL: Tensor, text_SN: Tensor, counts_S: Tensor | None = None) -> Demonstrations:
    """A sequence whose target is the text and then the end mark, if it fits. counts_S: which count; None: all."""
    lengths_S1 = (text_SN != window.pad).sum(1, keepdim=True)
    positions_N = torch.arange(text_SN.shape[1])
    targets = torch.where(positions_N == lengths_S1, window.marks.end, text_SN)
    mask_SN = positions_N <= lengths_S1
    return Demonstrations(prompt_SL, targets, mask_SN if counts_S is None else mask_SN & counts_S.unsqueeze(1))


class ImitationPhase:
    """Cross-entropy of the teacher's tokens, averaged over those of a step."""

    name = "imitation"
    rolls_out = False
    passes_vary = False
    measures = ("loss", "right", "tokens")

    def __init__(self, config: Config, source: EpisodeSource) -> None:
        assert config.reasoning is not None
        self.settings, self.chunks = config.reasoning.phases.imitation, config.reasoning.agent.chunks
        self.seed = config.run.seed
        self.source, self.window = source, Window.of(config.reasoning, source)

    def trains(self, parameter: str) -> bool:
        """The language model without its plastic adapters, since the agent remembers by its memory tokens."""
        return parameter.startswith("language_model.") and ".plastic." not in parameter

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """Every process makes the demonstrations of the whole step, which is cheap, and takes its share of them."""
        generator = generator_of(self.seed, self.name, step)
        numbers = range(step * self.settings.episodes, (step + 1) * self.settings.episodes)
        episodes = self.source.batch(numbers, self.chunks)
        memories = self.source.memories(numbers, self.chunks)
        if memories is None:
            made = demonstrate(self.window, episodes, self.settings.leak, generator)
        else:
            made = demonstrate_memories(self.window, episodes, memories)
        tokens, sequences = (sum(float(part.mask_SN.sum()) for part in made), sum(len(part.mask_SN) for part in made))
        return [
            _ImitationLoss(Demonstrations(*batch), tokens, sequences)
            for part in made
            for batch in micro_batches(part, self.settings.micro_batch, rank, processes)
        ]

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """The loss of a step, and the share of tokens for which the teacher's token is the most probable."""
        return {"loss": sums["loss"], "accuracy": sums["right"] / max(sums["tokens"], 1.0)}


@PHASES("imitation")
def make_imitation(config: Config, sources: Sources) -> ImitationPhase:
    """The phase of a configuration."""
    return ImitationPhase(config, sources(reasoning_of(config).agent))


class _ImitationLoss:
    """One micro-batch. tokens, sequences: of the whole step."""

    def __init__(self, part: Demonstrations, tokens: float, sequences: int) -> None:
        self.part, self.tokens, self.sequences = part, tokens, sequences

    def __call__(self, model: StageBModel) -> Outcome:
        device = next(model.parameters()).device
        prompts, targets, mask = (x.to(device) for x in self.part)
        logits, balance = taken(model.language_model, prompts, targets, mask)
        costs = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(mask.shape)
        total = torch.where(mask, costs, 0.0).sum() / self.tokens
        right = ((logits.detach().argmax(-1) == targets) & mask).sum()
        sums = torch.stack([total.detach().float(), right.float(), mask.sum().float()])
        return Outcome(total + balance * (mask.any(1).sum() / self.sequences), sums)
