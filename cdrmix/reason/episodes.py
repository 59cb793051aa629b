"""Episodes as tensors: a question, chunks that are read one at a time, and an answer; from token ids or from text.

Shapes: B episodes, N chunks, C tokens of a chunk, Q of a question, A of an answer, F facts, W tokens of a fact,
T tokens of a probe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import EpisodesOfTask
from cdrmix.data.tasks import IGNORED, Filler, known_task
from cdrmix.data.tasks import episode as text_episode
from cdrmix.data.tasks import episodes as tokens
from cdrmix.data.tasks.example import Episode
from cdrmix.data.tasks.rng import sentences_of
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError

FIRST_HELD_OUT = 1 << 40  # episodes from this number on are for evaluation; training takes numbers from 0
SAMPLE = 64  # episodes of text whose widths are measured
MARGIN = 4  # tokens by which a text can be wider than the widest of the sample
ATTEMPTS = 16  # episodes of text that are tried before the error that none fits
CHARACTERS_A_TOKEN = 6  # more than texts have, so that chunks are full


class Marks(NamedTuple):
    """Ids that separate the parts of a window."""

    question: int
    memory: int
    chunk: int
    update: int
    answer: int
    end: int


class Episodes(NamedTuple):
    """A batch, int64 on the CPU, padded with `pad` of its source.

    facts_BFW: the tokens that a memory keeps of each fact. fact_chunk_BF: the chunk that contains it. asked_BF, bool:
    whether the answer needs it. good_BN, bool: whether the statements of a chunk are true.
    """

    question_BQ: Tensor
    chunks_BNC: Tensor
    answer_BA: Tensor
    facts_BFW: Tensor
    fact_chunk_BF: Tensor
    asked_BF: Tensor
    good_BN: Tensor


class Probe(NamedTuple):
    """The question as a sequence whose next tokens are the answer: targets_BT[b, t] is the right token after
    ids_BT[b, : t + 1], or IGNORED."""

    ids_BT: Tensor
    targets_BT: Tensor


class EpisodeSource(Protocol):
    """A source of episodes. Episode n is a function of (seed, n, chunks) alone."""

    vocab_size: int
    pad: int
    marks: Marks
    chunk: int  # widths in tokens
    question: int
    answer: int
    least_chunks: int  # the fewest chunks that hold the facts

    def batch(self, numbers: Sequence[int], chunks: int) -> Episodes:
        """Episodes of `chunks` chunks; numbers from FIRST_HELD_OUT on are not trained on."""

    def probe(self, episodes: Episodes) -> Probe:
        """The questions of episodes as probes."""


class TokenSource:
    """Episodes in ids of their own vocabulary (cdrmix.data.tasks.episodes): recall, poisoned, agent, hops.

    difficulty: values by name; names that are not given have the standard values of the kind.
    """

    def __init__(self, kind: str, seed: int, chunk: int, difficulty: Mapping[str, bool | int | float | str]) -> None:
        if kind not in tokens.GENERATORS.names():
            raise ConfigError(f"episodes: no token episodes {kind!r}; there are {', '.join(tokens.GENERATORS.names())}")
        generator = tokens.GENERATORS[kind]
        self.kind, self.seed, self.chunk = kind, seed, chunk
        self.difficulty = generator.standard.changed(difficulty)
        self.probed = generator.probed
        self.vocab_size = self.difficulty.vocabulary
        self.pad = tokens.PAD
        self.marks = Marks(tokens.QUESTION, tokens.MEMORY, tokens.CHUNK, tokens.UPDATE, tokens.ANSWER, tokens.END)
        sample = self.batch([0], 2 * max(1, self.difficulty.keys // max(1, chunk // 2)))
        self.question, self.answer = sample.question_BQ.shape[1], sample.answer_BA.shape[1]
        self.least_chunks = -(-sample.facts_BFW.shape[1] // (chunk // 2))

    def batch(self, numbers: Sequence[int], chunks: int) -> Episodes:
        """Episodes `numbers` of `chunks` chunks. Raises ConfigError for too few chunks for the difficulty."""
        made = tokens.token_episodes(self.kind, self.seed, numbers, self.difficulty, chunks, self.chunk)
        return Episodes(*(torch.from_numpy(array.copy()) for array in made))

    def probe(self, episodes: Episodes) -> Probe:
        """`key ? key ? ...` with values as targets at the keys, or [question | ANSWER | answer]."""
        if not self.probed:
            return _probe(episodes, self.pad, self.marks, end=False)
        targets = torch.full_like(episodes.question_BQ, IGNORED)
        targets[:, ::2] = episodes.answer_BA
        return Probe(episodes.question_BQ, targets)


class TextSource:
    """Episodes of text by a tokenizer. Marks are bytes that do not occur in UTF-8, so no text contains them.

    Chunks are padded to their width. Sentences without facts are left out where they do not fit. chunks: the number of
    chunks of the sample, whose widths all episodes have.
    """

    def __init__(
        self,
        task: str,
        seed: int,
        chunk: int,
        difficulty: Mapping[str, bool | int | float | str],
        tokenizer: TextTokenizer,
        filler: Filler | None = None,
        chunks: int = 4,
    ) -> None:
        known = known_task(task)
        if known.episode is None:
            raise ConfigError(f"tasks: {task!r} has no chunks, which stage B reads one at a time; chunk_recall has")
        self.task, self.seed, self.chunk = task, seed, chunk
        self.tokenizer, self.filler = tokenizer, filler
        self.difficulty = known.standard.changed(difficulty)
        self.vocab_size, self.least_chunks = tokenizer.vocab_size, 1
        byte_ids = _ids_of_bytes(tokenizer, range(0xF8, 0x100))
        self.pad, self.marks = byte_ids[0xFF], Marks(*(byte_ids[byte] for byte in range(0xF8, 0xFE)))
        self._encoded = lru_cache(maxsize=1 << 17)(tokenizer.encode)
        sample = [self._texts(number, chunks) for number in range(SAMPLE)]
        self.question = MARGIN + max(len(self._encoded(f" {text.question}")) for text in sample)
        self.answer = MARGIN + max(len(self._encoded(f" {text.answer}")) for text in sample)
        self.fact = MARGIN + max(len(self._fact(*fact[:2])) for text in sample for fact in text.facts)

    def batch(self, numbers: Sequence[int], chunks: int) -> Episodes:
        """Episodes `numbers` of `chunks` chunks. Raises ConfigError where facts do not fit their chunk."""
        made = [self._episode(number, chunks) for number in numbers]
        return Episodes(*(torch.stack(column) for column in zip(*made, strict=True)))

    def probe(self, episodes: Episodes) -> Probe:
        """[question | ANSWER | answer | END], without gaps."""
        return _probe(episodes, self.pad, self.marks, end=True)

    def _texts(self, number: int, chunks: int) -> Episode:
        characters = chunks * self.chunk * CHARACTERS_A_TOKEN
        level = self.difficulty.changed({"chunks": chunks, "characters": characters})
        return text_episode(self.task, self.seed, number, level, filler=self.filler)

    def _fact(self, key: str, value: str) -> list[int]:
        return self._encoded(f" {key} {value}")

    def _episode(self, number: int, chunks: int) -> tuple[Tensor, ...]:
        """One episode: the first that fits the widths, of ATTEMPTS episodes derived from `number`."""
        for attempt in range(ATTEMPTS):
            text = self._texts(number + (attempt << 50), chunks)
            rows = [self._chunk(text, index) for index in range(chunks)]
            question, answer = self._encoded(f" {text.question}"), self._encoded(f" {text.answer}")
            facts = [self._fact(fact.key, fact.value) for fact in text.facts]
            fits = len(question) <= self.question and len(answer) <= self.answer
            if fits and all(len(row) <= self.chunk for row in rows) and all(len(fact) <= self.fact for fact in facts):
                return (
                    self._padded(question, self.question),
                    torch.stack([self._padded(row, self.chunk) for row in rows]),
                    self._padded(answer, self.answer),
                    torch.stack([self._padded(fact, self.fact) for fact in facts]),
                    torch.tensor([fact.chunk for fact in text.facts]),
                    torch.tensor([fact in text.asked for fact in text.facts]),
                    torch.tensor([index not in text.bad for index in range(chunks)]),
                )
        raise ConfigError(
            f"reasoning: {self.task}'s facts do not fit chunks of {self.chunk} tokens; make reasoning.chunk larger, or "
            "set fewer pairs in the difficulty"
        )

    def _chunk(self, episode: Episode, index: int) -> list[int]:
        """The chunk's sentences with facts, and as many of its other sentences as fit, in their order."""
        keys = episode.kept or [fact.key for fact in episode.facts if fact.chunk == index]
        sentences = [self._encoded(f" {sentence}") for sentence in sentences_of(episode.chunks[index])]
        have_facts = [any(key in sentence for key in keys) for sentence in sentences_of(episode.chunks[index])]
        left = self.chunk - sum(len(ids) for ids, has_fact in zip(sentences, have_facts, strict=True) if has_fact)
        row: list[int] = []
        for ids, has_fact in zip(sentences, have_facts, strict=True):
            if has_fact or len(ids) <= left:
                left -= 0 if has_fact else len(ids)
                row += ids
        return row

    def _padded(self, ids: Sequence[int], width: int) -> Tensor:
        return torch.tensor([*ids, *[self.pad] * (width - len(ids))])


def source_of(
    section: EpisodesOfTask, chunk: int, tokenizer: TextTokenizer | None = None, filler: Filler | None = None
) -> TokenSource | TextSource:
    """The source of a section of the configuration. Text needs the run's tokenizer."""
    if section.tokens:
        return TokenSource(section.task, section.seed, chunk, section.difficulty)
    if tokenizer is None:
        raise ConfigError(f"reasoning: {section.task} is text, and there is no tokenizer; set its tokens: true")
    return TextSource(section.task, section.seed, chunk, section.difficulty, tokenizer, filler, section.chunks)


def check_episodes(config: Config, tokenizer: TextTokenizer | None = None) -> None:
    """Makes one episode of every task that a phase trains, at each number of chunks, to find mistakes before training.

    tokenizer: None leaves out the check that text fits the chunks. Raises ConfigError that names the section.
    """
    reasoning = config.reasoning
    assert reasoning is not None
    phases = reasoning.phases
    # plasticity's episodes have 2 chunks and more (those in token ids as many as hold the facts)
    fewest = [] if reasoning.plasticity.tokens else [min(2, reasoning.plasticity.chunks)]
    policy = [phases.policy.chunks] if phases.policy.chunks else []
    used = {
        "plasticity": (reasoning.plasticity, fewest, phases.plasticity.steps),
        "acceptance": (reasoning.acceptance or reasoning.plasticity, [], phases.acceptance.steps),
        "agent": (reasoning.agent, policy, phases.imitation.steps + phases.policy.steps),
        "operations": (reasoning.operations, [], phases.operations_imitation.steps + phases.operations.steps),
    }
    for name, (section, others, steps) in used.items():
        for chunks in sorted({section.chunks, *others, *reasoning.evaluation.chunks}) if steps else ():
            try:
                _check_one(section, reasoning.chunk, chunks, config.cdrmix_model.vocab_size, tokenizer)
            except ConfigError as error:
                raise ConfigError(f"reasoning.{name}, an episode of {chunks} chunks: {error}") from error


def _check_one(
    section: EpisodesOfTask, chunk: int, chunks: int, vocabulary: int, tokenizer: TextTokenizer | None
) -> None:
    if tokenizer is None and not section.tokens:
        known = known_task(section.task)
        if known.episode is not None:
            text_episode(
                section.task, section.seed, 0, known.standard.changed({**section.difficulty, "chunks": chunks})
            )
            return
    source = source_of(section, chunk, tokenizer)
    if source.vocab_size > vocabulary:
        raise ConfigError(f"{section.task} has {source.vocab_size} ids; model.vocab_size is {vocabulary}")
    source.batch([0], chunks)


def _probe(episodes: Episodes, pad: int, marks: Marks, *, end: bool) -> Probe:
    """[question | ANSWER | answer], then padding. The targets are the answer's tokens, and END with `end`."""
    question, answer = episodes.question_BQ, episodes.answer_BA
    batch = len(question)

    def column(mark: int) -> Tensor:
        return torch.full((batch, 1), mark)

    whole = torch.cat([column(marks.question), question, column(marks.answer), answer, column(marks.end)], 1)
    asked = torch.zeros_like(whole, dtype=torch.bool)
    asked[:, question.shape[1] + 2 :] = True
    asked[:, -1] = end
    order = (whole == pad).long().argsort(dim=1, stable=True)  # tokens first, in their order; then padding
    whole, asked = whole.gather(1, order), asked.gather(1, order)
    asked &= whole != pad
    targets = torch.where(asked[:, 1:], whole[:, 1:], IGNORED)
    return Probe(whole[:, :-1].contiguous(), targets)


def _ids_of_bytes(tokenizer: TextTokenizer, wanted: range) -> dict[int, int]:
    """The ids of single bytes."""
    id_of_byte = {}
    for token in range(tokenizer.vocab_size):
        content = tokenizer.token_bytes(token)
        if len(content) == 1 and content[0] in wanted:
            id_of_byte[content[0]] = token
    missing = [byte for byte in wanted if byte not in id_of_byte]
    if missing:
        raise ConfigError(f"the tokenizer has no token for the byte 0x{missing[0]:02x}, which stage B needs as a mark")
    return id_of_byte
