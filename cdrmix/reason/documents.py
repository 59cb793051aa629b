"""Episodes of documents: a text of any length is cut into chunks of tokens, and a question about it is answered.

`FileDocuments` reads documents, questions and answers from files of the user. `TaskDocuments` makes them by a generated
task. A document is cut as `Session` cuts it (`chunking`), so a passage can lie in two chunks.

Shapes: as in `episodes`. M: tokens of the memory's text after a chunk.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cdrmix.config.schema_reasoning import EpisodesOfDocuments
from cdrmix.data.tasks import known_task, make_example
from cdrmix.data.tasks.example import ANSWER, Example
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.eval.evaluation import of_length
from cdrmix.reason.chunking import chunk_bounds
from cdrmix.reason.episodes import FIRST_HELD_OUT, Asked, Episodes, TextEpisodes, filler_for
from cdrmix.reason.filler import fillers_of
from cdrmix.reason.question_files import Document, check_demonstrated, ends_in_order, read_questions

WIDTH = 64  # tokens of a question and of an answer, if the configuration does not set them
QUESTION = "\nQuestion: "  # what stands before the question of a generated task


class DocumentEpisodes(TextEpisodes):
    """Documents as episodes. Documents with fewer chunks than others of the batch end with chunks of padding.

    In training the first chunk may be shorter, so that facts and passages of notes lie in one, if `chunks` allows it.
    Held-out documents are cut as `Session` cuts them; the chunk of a fact is the one in which it ends.
    """

    least_chunks = 1
    own_lengths: bool

    def __init__(self, section: EpisodesOfDocuments, chunk: int, tokenizer: TextTokenizer) -> None:
        super().__init__(tokenizer, chunk)
        self.seed = section.seed
        self.question, self.answer = section.question_tokens or WIDTH, section.answer_tokens or WIDTH
        self._tokens = lru_cache(maxsize=1 << 12)(tokenizer.encode)

    @property
    @abstractmethod
    def held_out(self) -> int | None:
        """As of EpisodeSource."""

    @abstractmethod
    def document(self, number: int, chunks: int) -> Document:
        """The document of an episode, which has at most `chunks` chunks where its source can choose its length."""

    def batch(self, numbers: Sequence[int], chunks: int) -> Episodes:
        """Episodes of documents. Raises ConfigError for one that has more than `chunks` chunks, or is too wide."""
        documents = [self.document(number, chunks) for number in numbers]
        for document in documents:
            if problem := self._problem(document, chunks):
                raise ConfigError(f"{document.place}: {problem}")
        cut = [self._chunks_of(document, chunks, number) for document, number in zip(documents, numbers, strict=True)]
        count = max(1, *(len(pieces) for pieces, _ in cut))
        facts = [[self._encoded(f" {fact}") for fact in document.facts] for document in documents]
        most, width = max(map(len, facts)), max((len(fact) for those in facts for fact in those), default=1)
        empty = [self.pad] * width
        places = [of_facts for _, of_facts in cut]
        return Episodes(
            torch.stack([self._padded(self._encoded(f" {each.question}"), self.question) for each in documents]),
            torch.stack(
                [
                    torch.stack([self._padded(ids, self.chunk) for ids in [*pieces, *[[]] * (count - len(pieces))]])
                    for pieces, _ in cut
                ]
            ),
            torch.stack([self._padded(self._encoded(f" {each.answers[0]}"), self.answer) for each in documents]),
            torch.tensor(
                [[[*fact, *empty][:width] for fact in those] + [empty] * (most - len(those)) for those in facts],
                dtype=torch.int64,
            ).view(len(documents), most, width),
            torch.tensor([those + [-1] * (most - len(those)) for those in places], dtype=torch.int64),
            torch.tensor([[True] * len(those) + [False] * (most - len(those)) for those in places], dtype=torch.bool),
            torch.ones(len(documents), count, dtype=torch.bool),
        )

    def questions(self, numbers: Sequence[int], chunks: int) -> list[Asked]:
        """The questions as text, and the right answers to them."""
        documents = [self.document(number, chunks) for number in numbers]
        return [Asked(each.question, each.answers, each.row) for each in documents]

    def memories(self, numbers: Sequence[int], chunks: int) -> Tensor | None:
        """The memory's tokens after each chunk, int64 [B, N, M], padded; None if the first document has no notes."""
        documents = [self.document(number, chunks) for number in numbers]
        if documents[0].notes is None:
            return None
        rows = [self._memories(document, chunks, number) for document, number in zip(documents, numbers, strict=True)]
        count, width = max(map(len, rows)), max(1, *(len(ids) for row in rows for ids in row))
        return torch.stack(
            [torch.stack([self._padded(ids, width) for ids in [*row, *[[]] * (count - len(row))]]) for row in rows]
        )

    def _memories(self, document: Document, chunks: int, number: int) -> list[list[int]]:
        """The memory after each chunk: that of the last note whose passage has ended."""
        assert document.notes is not None
        texts = ["", *(note.memory for note in document.notes)]
        ends = [last + 1 for _, last in self._note_spans(document)]
        memories = [texts[bisect_right(ends, bound)] for bound in self._cut(document, chunks, number)[1:]]
        return [self._encoded(f" {text}") if text else [] for text in memories]

    def _note_spans(self, document: Document) -> list[tuple[int, int]]:
        """The first and the last token of each note's passage. Raises ConfigError if the tokenizer changes it."""
        assert document.notes is not None
        pieces = self._pieces(self._tokens(document.context))
        passages = [note.passage.encode() for note in document.notes]
        found = ends_in_order(b"".join(pieces), passages)
        if len(found) < len(document.notes):
            raise ConfigError(
                f"{document.place}: the tokenizer changes the passage {document.notes[len(found)].passage!r} of a note;"
                " write it as the tokenizer does"
            )
        return _tokens_at(pieces, [(end - len(each), end - 1) for end, each in zip(found, passages, strict=True)])

    def _pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token."""
        return [self.tokenizer.token_bytes(token) for token in ids]

    def _bounds(self, ids: Sequence[int]) -> list[int]:
        """Where the chunks begin and end as `Session` cuts."""
        return chunk_bounds(self._pieces(ids), self.chunk)

    def _chunks(self, ids: Sequence[int]) -> int:
        return len(self._bounds(ids)) - 1

    def _problem(self, document: Document, chunks: int) -> str | None:
        """What keeps a document from being an episode, with the remedy."""
        question, answer = self._encoded(f" {document.question}"), self._encoded(f" {document.answers[0]}")
        if len(question) > self.question:
            return f"the question has {len(question)} tokens; raise question_tokens={self.question}"
        if len(answer) > self.answer:
            return f"the answer has {len(answer)} tokens; raise answer_tokens={self.answer}"
        count = self._chunks(self._tokens(document.context))
        if count > chunks:
            return f"the document has {count} chunks of {self.chunk} tokens; raise chunks={chunks}, or reasoning.chunk"
        return None

    def _chunks_of(self, document: Document, chunks: int, number: int) -> tuple[list[list[int]], list[int]]:
        """The tokens of each chunk, and the chunk of each fact; -1 in training for a fact that lies in two chunks."""
        ids, bounds, spans = self._tokens(document.context), self._cut(document, chunks, number), self._spans(document)
        ends = number >= FIRST_HELD_OUT
        places = [_chunk_at(bounds, each[0][1]) if ends and each else _chunk_of(bounds, each) for each in spans]
        return [list(ids[start:end]) for start, end in pairwise(bounds)], places

    def _cut(self, document: Document, chunks: int, number: int) -> list[int]:
        """Where the chunks begin and end: in training with the first chunk that leaves the fewest passages in two."""
        ids = self._tokens(document.context)
        if number >= FIRST_HELD_OUT:
            return self._bounds(ids)
        spans = self._spans(document) if document.notes is None else [[span] for span in self._note_spans(document)]

        def divided(bounds: Sequence[int]) -> int:
            return sum(_chunk_of(bounds, those) < 0 for those in spans)

        pieces, best = self._pieces(ids), self._bounds(ids)
        for first in range(self.chunk - 1, 0, -1):
            if not divided(best):
                break
            cut = chunk_bounds(pieces, self.chunk, first)
            best = cut if len(cut) - 1 <= chunks and divided(cut) < divided(best) else best
        return best

    def _spans(self, document: Document) -> list[list[tuple[int, int]]]:
        """The first and the last token of every place of each fact; none if the tokenizer changes it."""
        text = b"".join(pieces := self._pieces(self._tokens(document.context)))
        spans = []
        for wanted in (fact.encode() for fact in document.facts):
            begun = [match.start() for match in re.finditer(b"(?=%s)" % re.escape(wanted), text)]
            spans.append(_tokens_at(pieces, [(start, start + len(wanted) - 1) for start in begun]))
        return spans


def _tokens_at(pieces: Sequence[bytes], places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tokens of the first and the last byte of passages."""
    ends = np.cumsum([len(piece) for piece in pieces])
    found = np.searchsorted(ends, np.array(places, dtype=np.int64).reshape(-1, 2), side="right").tolist()
    return [(first, last) for first, last in found]


def _chunk_at(bounds: Sequence[int], token: int) -> int:
    return bisect_right(bounds, token) - 1


def _chunk_of(bounds: Sequence[int], spans: Sequence[tuple[int, int]]) -> int:
    """The first chunk that has one of the spans as a whole; -1: none."""
    whole = [first for first, last in spans if _chunk_at(bounds, first) == _chunk_at(bounds, last)]
    return _chunk_at(bounds, whole[0]) if whole else -1


class FileDocuments(DocumentEpisodes):
    """Documents of files. They are read at the first use, so a trained model does not need them.

    Documents with the same text are all trained on, or all held out. Every epoch has its own order.
    """

    own_lengths = True

    def __init__(self, section: EpisodesOfDocuments, chunk: int, tokenizer: TextTokenizer) -> None:
        super().__init__(section, chunk, tokenizer)
        assert section.data is not None
        self._files = section.data
        self._order = lru_cache(maxsize=2)(self._order_of)

    @cached_property
    def _questions(self) -> tuple[list[Document], list[Document]]:
        return read_questions(self._files)

    @property
    def held_out(self) -> int:
        """The number of questions that are not trained on."""
        return len(self._questions[1])

    def document(self, number: int, chunks: int) -> Document:
        """A row of the files: in training each once an epoch, and the held-out ones from FIRST_HELD_OUT on."""
        train, held_out = self._questions
        if number >= FIRST_HELD_OUT:
            return held_out[(number - FIRST_HELD_OUT) % len(held_out)]
        epoch, place = divmod(number, len(train))
        return train[self._order(epoch)[place]]

    def check(self, chunks: int, *, demonstrated: bool = False, memory: int | None = None) -> None:
        """Raises ConfigError if documents do not fit, with their number and the first of them.

        demonstrated: every document that is trained on must have facts or notes. memory: tokens that a turn writes,
        which must hold them; None: not checked.
        """
        train, held_out = self._questions
        found = [
            (document.place, problem)
            for document in (*train, *held_out)
            if (problem := self._problem(document, chunks))
        ]
        if demonstrated and not found:
            check_demonstrated(train)
        if demonstrated and memory is not None and not found:
            found = [
                (document.place, problem) for document in train if (problem := self._memory_problem(document, memory))
            ]
        if demonstrated and not found:
            for document in train:
                if document.notes is None:
                    self._check_facts(document)
                else:
                    self._note_spans(document)  # raises for what the tokenizer changes
        if found:
            place, problem = found[0]
            rest = f" ({len(found) - 1:,} other documents do not fit either)" if len(found) > 1 else ""
            raise ConfigError(f"{place}: {problem}{rest}")

    def _check_facts(self, document: Document) -> None:
        """Raises ConfigError for a fact that the tokenizer changes, or that no chunk can have as a whole."""
        for fact, spans in zip(document.facts, self._spans(document), strict=True):
            if not spans:
                raise ConfigError(
                    f"{document.place}: the tokenizer changes the fact {fact!r}, which its text has otherwise; write it"
                    " as the tokenizer does"
                )
            shortest = min(last + 1 - first for first, last in spans)
            if shortest > self.chunk:
                raise ConfigError(
                    f"{document.place}: the fact {fact!r} has {shortest} tokens, so no chunk has it as a whole; shorten"
                    f" it, or raise reasoning.chunk={self.chunk}"
                )

    def _memory_problem(self, document: Document, memory: int) -> str | None:
        if document.notes is None:
            needed, what = sum(len(self._encoded(f" {fact}")) for fact in document.facts), "facts have"
        else:
            texts = [note.memory for note in document.notes]
            needed, what = max((len(self._encoded(f" {text}")) for text in texts), default=0), "largest memory has"
        if needed <= memory:
            return None
        return f"the {what} {needed} tokens, a turn writes {memory}; raise reasoning.memory.tokens (of a part: / heads)"

    def _order_of(self, epoch: int) -> list[int]:
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order: list[int] = generator.permutation(len(self._questions[0])).tolist()
        return order


class GivenDocuments(DocumentEpisodes):
    """A list of documents, all of them held out. Windows are wide enough for every question and answer."""

    own_lengths = True

    def __init__(
        self, documents: Sequence[Document], section: EpisodesOfDocuments, chunk: int, tokenizer: TextTokenizer
    ) -> None:
        super().__init__(section, chunk, tokenizer)
        self._documents = [document._replace(notes=None) for document in documents]
        self.question = max(self.question, *(len(self._encoded(f" {each.question}")) for each in documents))
        self.answer = max(self.answer, *(len(self._encoded(f" {each.answers[0]}")) for each in documents))

    @property
    def held_out(self) -> int:
        """The number of documents."""
        return len(self._documents)

    @property
    def longest(self) -> int:
        """Chunks of the longest document."""
        return max(self._chunks(self._tokens(document.context)) for document in self._documents)

    def document(self, number: int, chunks: int) -> Document:
        """The documents in their order, from FIRST_HELD_OUT on."""
        return self._documents[number - FIRST_HELD_OUT]


class TaskDocuments(DocumentEpisodes):
    """Documents of a generated task that has no chunks of its own, with the questions of its examples.

    A document is about as long as `chunks` chunks, unless its task needs more.
    """

    own_lengths = False

    def __init__(self, section: EpisodesOfDocuments, chunk: int, tokenizer: TextTokenizer) -> None:
        super().__init__(section, chunk, tokenizer)
        self._section = section
        self._level = known_task(section.task).standard.changed(section.difficulty)
        self._documents = lru_cache(maxsize=1 << 10)(self._document)

    @property
    def held_out(self) -> None:
        """None: there are as many as are asked for."""

    def document(self, number: int, chunks: int) -> Document:
        """Example `number` of the task."""
        return self._documents(number, chunks)

    def _document(self, number: int, chunks: int) -> Document:
        task, filler = self._section.task, filler_for(number, fillers_of(self._section.filler))

        def make(characters: int) -> Example:
            return make_example(task, self.seed, number, self._level.at_length(characters), filler=filler)

        def length_of(example: Example) -> int:
            """Tokens with those that fill the chunks before the last."""
            context, asked, _ = example.prompt.rpartition(QUESTION)
            if not asked:  # its length would never be that of the chunks
                raise ConfigError(f"tasks: {task!r} has no text before its question")
            bounds = self._bounds(self.tokenizer.encode(context))
            return max(1, self.chunk * (len(bounds) - 2) + bounds[-1] - bounds[max(0, len(bounds) - 2)])

        made, _, _ = of_length(make, length_of, chunks * self.chunk)
        context, _, rest = made.prompt.rpartition(QUESTION)
        question = rest.removesuffix(f"\n{ANSWER}")
        answers = (made.answer.strip(),)
        row = {"task": task, "number": number, "question": question, "answers": list(answers)}
        return Document(context, question, answers, (), made.notes or None, row, f"{task} {number}", made)
