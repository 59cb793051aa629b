"""Episodes as tensors: a question, chunks that are read one at a time, and an answer; from token ids or from text.

Shapes: B episodes, N chunks, C tokens of a chunk, Q of a question, A of an answer, F facts, W tokens of a fact,
T tokens of a probe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cdrmix.data.tasks import IGNORED, Filler, known_task
from cdrmix.data.tasks import episode as text_episode
from cdrmix.data.tasks import episodes as tokens
from cdrmix.data.tasks.example import Episode
from cdrmix.data.tasks.rng import sentences_of
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.reason.filler import Fillers

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
    """A batch, int64 on the CPU, padded with `pad` of its source. A chunk of padding alone is not read.

    facts_BFW: the tokens that a memory keeps of each fact. fact_chunk_BF: the chunk that contains it, -1: none.
    asked_BF, bool: whether the answer needs it. good_BN, bool: whether the statements of a chunk are true.
    """

    question_BQ: Tensor
    chunks_BNC: Tensor
    answer_BA: Tensor
    facts_BFW: Tensor
    fact_chunk_BF: Tensor
    asked_BF: Tensor
    good_BN: Tensor

    def rows(self, rows: Sequence[int]) -> Episodes:
        """Some of them, by their numbers in the batch."""
        return Episodes(*(column[list(rows)] for column in self))


def filler_for(number: int, fillers: Fillers | None) -> Filler | None:
    """The filler of an episode, by whether it is trained on; None: generated sentences."""
    if fillers is None:
        return None
    return fillers.train if number < FIRST_HELD_OUT else fillers.held_out


def chunk_counts(chunks_BNC: Tensor, pad: int) -> Tensor:
    """The number of chunks of each document up to its last one that is not padding alone, int64 [B]."""
    has_tokens_BN = (chunks_BNC != pad).any(2)
    return (has_tokens_BN * torch.arange(1, chunks_BNC.shape[1] + 1, device=chunks_BNC.device)).amax(1)


def by_length(episodes: Episodes, pad: int) -> list[Episodes]:
    """Episodes with equal numbers of chunks together, without empty chunks behind the last, shortest first.

    The fast weights would read an empty chunk; the memory agent leaves it out itself.
    """
    lengths_B = chunk_counts(episodes.chunks_BNC, pad)
    parts = []
    for length in lengths_B.unique().tolist():
        part = episodes.rows((lengths_B == length).nonzero().flatten().tolist())
        parts.append(part._replace(chunks_BNC=part.chunks_BNC[:, :length], good_BN=part.good_BN[:, :length]))
    return parts


class Asked(NamedTuple):
    """A question and the right answers to it as text. row: what else a reward function is told of them."""

    question: str
    answers: tuple[str, ...]
    row: Mapping[str, Any]


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
    own_lengths: bool  # documents have the lengths they have, at most the chunks that are asked for

    @property
    def held_out(self) -> int | None:
        """The number of episodes from FIRST_HELD_OUT on that differ; None: without limit."""

    def batch(self, numbers: Sequence[int], chunks: int) -> Episodes:
        """Episodes of `chunks` chunks, documents of at most so many; numbers from FIRST_HELD_OUT on are not trained
        on."""

    def questions(self, numbers: Sequence[int], chunks: int) -> list[Asked] | None:
        """The questions of these episodes as text; None for episodes in token ids."""

    def memories(self, numbers: Sequence[int], chunks: int) -> Tensor | None:
        """Demonstrated memories after each chunk, int64 [B, N, M], padded; None: there are facts instead."""

    def text(self, ids: Sequence[int]) -> str:
        """Token ids, without padding and marks, as text."""

    def probe(self, episodes: Episodes) -> Probe:
        """The questions of episodes as probes."""


class TokenSource:
    """Episodes in ids of their own vocabulary (cdrmix.data.tasks.episodes): recall, poisoned, agent, hops.

    difficulty: values by name; names that are not given have the standard values of the kind.
    """

    held_out, own_lengths = None, False

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

    def questions(self, numbers: Sequence[int], chunks: int) -> None:
        """None: there is no text."""

    def memories(self, numbers: Sequence[int], chunks: int) -> None:
        """None: there are facts."""

    def text(self, ids: Sequence[int]) -> str:
        """The numbers of the ids."""
        return " ".join(str(token) for token in ids if token != self.pad and token not in self.marks)

    def probe(self, episodes: Episodes) -> Probe:
        """`key ? key ? ...` with values as targets at the keys, or [question | ANSWER | answer]."""
        if not self.probed:
            return _probe(episodes, self.pad, self.marks, end=False)
        targets = torch.full_like(episodes.question_BQ, IGNORED)
        targets[:, ::2] = episodes.answer_BA
        return Probe(episodes.question_BQ, targets)


class TextEpisodes(ABC):
    """Episodes of text by a tokenizer. Marks are bytes that do not occur in UTF-8, so no text contains them."""

    question: int  # widths in tokens
    answer: int

    def __init__(self, tokenizer: TextTokenizer, chunk: int) -> None:
        self.tokenizer, self.chunk = tokenizer, chunk
        self.vocab_size = tokenizer.vocab_size
        byte_ids = _ids_of_bytes(tokenizer, range(0xF8, 0x100))
        self.pad, self.marks = byte_ids[0xFF], Marks(*(byte_ids[byte] for byte in range(0xF8, 0xFE)))
        self._encoded = lru_cache(maxsize=1 << 17)(tokenizer.encode)

    @abstractmethod
    def batch(self, numbers: Sequence[int], chunks: int) -> Episodes:
        """As of EpisodeSource."""

    @abstractmethod
    def questions(self, numbers: Sequence[int], chunks: int) -> list[Asked]:
        """As of EpisodeSource."""

    def memories(self, numbers: Sequence[int], chunks: int) -> Tensor | None:
        """None: there are facts."""
        return None

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, without padding and marks. Bytes that are not UTF-8 are replaced."""
        kept = [token for token in ids if token != self.pad and token not in self.marks]
        return self.tokenizer.decode(kept).strip()

    def probe(self, episodes: Episodes) -> Probe:
        """[question | ANSWER | answer | END], without gaps."""
        return _probe(episodes, self.pad, self.marks, end=True)

    def _padded(self, ids: Sequence[int], width: int) -> Tensor:
        return torch.tensor([*ids, *[self.pad] * (width - len(ids))], dtype=torch.int64)


class TextSource(TextEpisodes):
    """Episodes of a generated task that has chunks.

    Chunks are padded to their width. Sentences without facts are left out where they do not fit. chunks: the number of
    chunks of the sample, whose widths all episodes have. question, answer: widths in place of the sample's.
    """

    held_out, own_lengths, least_chunks = None, False, 1

    def __init__(
        self,
        task: str,
        seed: int,
        chunk: int,
        difficulty: Mapping[str, bool | int | float | str],
        tokenizer: TextTokenizer,
        fillers: Fillers | None = None,
        chunks: int = 4,
        *,
        question: int | None = None,
        answer: int | None = None,
    ) -> None:
        known = known_task(task)
        if known.episode is None:
            raise ConfigError(f"tasks: {task!r} has no chunks, which stage B reads one at a time; chunk_recall has")
        super().__init__(tokenizer, chunk)
        self.task, self.seed, self._fillers = task, seed, fillers
        self.difficulty = known.standard.changed(difficulty)
        sample = [self._texts(number, chunks, filler_for(number, fillers)) for number in range(SAMPLE)]
        self.question = question or MARGIN + max(len(self._encoded(f" {text.question}")) for text in sample)
        self.answer = answer or MARGIN + max(len(self._encoded(f" {text.answer}")) for text in sample)
        self.fact = MARGIN + max(len(self._fact(*fact[:2])) for text in sample for fact in text.facts)
        self._fitting = lru_cache(maxsize=1 << 12)(self._episode)

    def batch(self, numbers: Sequence[int], chunks: int) -> Episodes:
        """Episodes `numbers` of `chunks` chunks. Raises ConfigError where facts do not fit their chunk."""
        made = [self._fitting(number, chunks)[0] for number in numbers]
        return Episodes(*(torch.stack(column) for column in zip(*made, strict=True)))

    def questions(self, numbers: Sequence[int], chunks: int) -> list[Asked]:
        """The questions of these episodes, which have one right answer."""
        texts = [self._fitting(number, chunks)[1] for number in numbers]
        return [
            Asked(text.question, (text.answer,), {"task": self.task, "facts": [list(fact) for fact in text.facts]})
            for text in texts
        ]

    def _texts(self, number: int, chunks: int, filler: Filler | None) -> Episode:
        characters = chunks * self.chunk * CHARACTERS_A_TOKEN
        level = self.difficulty.changed({"chunks": chunks, "characters": characters})
        return text_episode(self.task, self.seed, number, level, filler=filler)

    def _fact(self, key: str, value: str) -> list[int]:
        return self._encoded(f" {key} {value}")

    def _episode(self, number: int, chunks: int) -> tuple[tuple[Tensor, ...], Episode]:
        """One episode and its text: the first that fits the widths, of ATTEMPTS episodes derived from `number`."""
        for attempt in range(ATTEMPTS):
            text = self._texts(number + (attempt << 50), chunks, filler_for(number, self._fillers))
            rows = [self._chunk(text, index) for index in range(chunks)]
            question, answer = self._encoded(f" {text.question}"), self._encoded(f" {text.answer}")
            facts = [self._fact(fact.key, fact.value) for fact in text.facts]
            fits = len(question) <= self.question and len(answer) <= self.answer
            if fits and all(len(row) <= self.chunk for row in rows) and all(len(fact) <= self.fact for fact in facts):
                tensors = (
                    self._padded(question, self.question),
                    torch.stack([self._padded(row, self.chunk) for row in rows]),
                    self._padded(answer, self.answer),
                    torch.stack([self._padded(fact, self.fact) for fact in facts]),
                    torch.tensor([fact.chunk for fact in text.facts]),
                    torch.tensor([fact in text.asked for fact in text.facts]),
                    torch.tensor([index not in text.bad for index in range(chunks)]),
                )
                return tensors, text
        raise ConfigError(
            f"reasoning: {self.task}'s facts do not fit chunks of {self.chunk} tokens; make reasoning.chunk larger, or "
            "set fewer pairs in the difficulty"
        )

    def _chunk(self, episode: Episode, index: int) -> list[int]:
        """The chunk's sentences with facts, and as many of its other sentences as fit, in their order.

        If none fits, the beginning of the first one: a chunk is not empty.
        """
        keys = episode.kept or [fact.key for fact in episode.facts if fact.chunk == index]
        sentences = [self._encoded(f" {sentence}") for sentence in sentences_of(episode.chunks[index])]
        have_facts = [any(key in sentence for key in keys) for sentence in sentences_of(episode.chunks[index])]
        left = self.chunk - sum(len(ids) for ids, has_fact in zip(sentences, have_facts, strict=True) if has_fact)
        row: list[int] = []
        for ids, has_fact in zip(sentences, have_facts, strict=True):
            if has_fact or len(ids) <= left:
                left -= 0 if has_fact else len(ids)
                row += ids
        return row or sentences[0][: self.chunk]


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
