"""Episodes of documents: a text of any length is cut into chunks of tokens, and a question about it is answered.

`FileDocuments` reads documents, questions and answers from files of the user. `TaskDocuments` makes them by a generated
task. A document is cut by its tokens alone, as `Session` cuts it, so a passage can lie in two chunks.

Shapes: as in `episodes`. M: tokens of the memory's text after a chunk.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from cdrmix.config.schema_reasoning import EpisodesOfDocuments, QuestionFiles
from cdrmix.data.sources.base import BadRecord, record_location
from cdrmix.data.sources.files import find_files
from cdrmix.data.sources.tables import JsonLines, decoded, json_lines
from cdrmix.data.tasks import Filler, known_task, make_example
from cdrmix.data.tasks.example import ANSWER, Example
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError, CorpusError
from cdrmix.eval.evaluation import of_length
from cdrmix.reason.episodes import FIRST_HELD_OUT, Asked, Episodes, TextEpisodes

WIDTH = 64  # tokens of a question and of an answer, if the configuration does not set them
MAX_EXPANSION = 1000  # of compressed files, as data.max_expansion
QUESTION = "\nQuestion: "  # what stands before the question of a generated task
NOT_DEMONSTRATED = (
    "the phase imitation needs facts, the passages that an answer needs, or memories, the memory after each chunk;"
    " give them, or set reasoning.phases.imitation.steps: 0"
)


class Document(NamedTuple):
    """A text, a question about it, and its right answers.

    facts: passages of the text that the answer needs. memories: the memory's text after each chunk; None: not given.
    row: what a reward function is given. place: where the document is from, for messages. example: of a generated task.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    facts: tuple[str, ...]
    memories: tuple[str, ...] | None
    row: Mapping[str, Any]
    place: str
    example: Example | None = None


class DocumentEpisodes(TextEpisodes):
    """Documents as episodes. Documents with fewer chunks than others of the batch end with chunks of padding.

    In training the first chunk may be shorter, so that every fact lies in one chunk. Held-out documents are cut as
    `Session` cuts them; the chunk of a fact is the one in which it ends.
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
        cut = [self._cut(document, chunks, number) for document, number in zip(documents, numbers, strict=True)]
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
        """The memory's tokens after each chunk, int64 [B, N, M], padded; None if the first document has none."""
        documents = [self.document(number, chunks) for number in numbers]
        if documents[0].memories is None:
            return None
        rows = [[self._encoded(f" {text}") if text else [] for text in each.memories or ()] for each in documents]
        count, width = max(map(len, rows)), max(len(ids) for row in rows for ids in row)
        return torch.stack(
            [torch.stack([self._padded(ids, width) for ids in [*row, *[[]] * (count - len(row))]]) for row in rows]
        )

    def _chunks(self, ids: Sequence[int]) -> int:
        return -(-len(ids) // self.chunk)

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
        if document.memories is not None and len(document.memories) != count:
            return (
                f"there are {len(document.memories)} memories, and the document has {count} chunks of {self.chunk}"
                " tokens; give one memory for each chunk"
            )
        return None

    def _cut(self, document: Document, chunks: int, number: int) -> tuple[list[list[int]], list[int]]:
        """The tokens of each chunk, and the chunk of each fact; -1 in training for a fact that lies in two chunks."""
        ids = self._tokens(document.context)
        spans = self._spans(ids, document.facts)
        shift = 0
        if number < FIRST_HELD_OUT and document.memories is None:  # those were written for the plain cut
            shifts = [shift for shift in range(self.chunk) if -(-(shift + len(ids)) // self.chunk) <= chunks]
            shift = min(shifts, key=lambda shift: sum(self._chunk_of(those, shift) < 0 for those in spans), default=0)
        bounds = [0, *range(self.chunk - shift, len(ids), self.chunk), len(ids)]
        pieces = [ids[start:end] for start, end in pairwise(bounds)]
        places = [self._chunk_of(those, shift) for those in spans]
        if number >= FIRST_HELD_OUT:
            places = [(those[0][1] // self.chunk if those else -1) for those in spans]
        return pieces, places

    def _chunk_of(self, spans: Sequence[tuple[int, int]], shift: int) -> int:
        """The first chunk that has one of the spans as a whole, if the first chunk lacks `shift` tokens; -1: none."""
        whole = [first for first, last in spans if (first + shift) // self.chunk == (last + shift) // self.chunk]
        return (whole[0] + shift) // self.chunk if whole else -1

    def _spans(self, ids: Sequence[int], passages: Sequence[str]) -> list[list[tuple[int, int]]]:
        """The first and the last token of every place of each passage; none if the tokenizer changes it."""
        pieces = [self.tokenizer.token_bytes(token) for token in ids]
        text, ends = b"".join(pieces), np.cumsum([len(piece) for piece in pieces])
        spans: list[list[tuple[int, int]]] = []
        for wanted in (passage.encode() for passage in passages):
            spans.append([])
            start = text.find(wanted)
            while start >= 0:
                first, last = np.searchsorted(ends, [start, start + len(wanted) - 1], side="right").tolist()
                spans[-1].append((int(first), int(last)))
                start = text.find(wanted, start + 1)
        return spans


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

        demonstrated: every document that is trained on must have facts or memories. memory: tokens that a turn writes,
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
        if found:
            place, problem = found[0]
            rest = f" ({len(found) - 1:,} other documents do not fit either)" if len(found) > 1 else ""
            raise ConfigError(f"{place}: {problem}{rest}")

    def _memory_problem(self, document: Document, memory: int) -> str | None:
        if document.memories is None:
            needed, what = sum(len(self._encoded(f" {fact}")) for fact in document.facts), "facts have"
        else:
            needed, what = max(len(self._encoded(f" {text}")) for text in document.memories), "largest memory has"
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
        self._documents = [document._replace(memories=None) for document in documents]
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

    def __init__(
        self, section: EpisodesOfDocuments, chunk: int, tokenizer: TextTokenizer, filler: Filler | None = None
    ) -> None:
        super().__init__(section, chunk, tokenizer)
        self._section, self._filler = section, filler
        self._level = known_task(section.task).standard.changed(section.difficulty)
        self._documents = lru_cache(maxsize=1 << 10)(self._document)

    @property
    def held_out(self) -> None:
        """None: there are as many as are asked for."""

    def document(self, number: int, chunks: int) -> Document:
        """Example `number` of the task."""
        return self._documents(number, chunks)

    def _document(self, number: int, chunks: int) -> Document:
        task = self._section.task

        def make(characters: int) -> Example:
            return make_example(task, self.seed, number, self._level.at_length(characters), filler=self._filler)

        def length_of(example: Example) -> int:
            return max(1, len(self.tokenizer.encode(example.prompt.rpartition(QUESTION)[0])))

        made, _, _ = of_length(make, length_of, chunks * self.chunk)
        context, _, rest = made.prompt.rpartition(QUESTION)
        if not context:
            raise ConfigError(f"tasks: {task!r} has no text before its question")
        question = rest.removesuffix(f"\n{ANSWER}")
        answers = (made.answer.strip(),)
        row = {"task": task, "number": number, "question": question, "answers": list(answers)}
        return Document(context, question, answers, (), None, row, f"{task} {number}", made)


def read_documents(section: QuestionFiles) -> list[Document]:
    """All rows of files. Raises CorpusError that names file and line."""
    documents: list[Document] = []
    for path in find_files(list(section.paths), JsonLines.suffixes, key="reasoning: data.paths"):
        for record in json_lines(path, MAX_EXPANSION):
            place = record_location(str(path), record.number)
            try:
                if record.error:
                    raise BadRecord(record.error)
                documents.append(_parsed(decoded(record.raw), section, place))
            except BadRecord as error:
                raise CorpusError(f"{place} {error}") from error
    if not documents:
        raise CorpusError(f"reasoning: data.paths={section.paths} have no rows")
    given = [document.memories is not None for document in documents]
    if any(given) and not all(given):
        without = documents[given.index(False)]
        raise CorpusError(f"{without.place} has no field {section.memories_field!r}, which other rows have")
    return documents


def check_demonstrated(documents: Sequence[Document]) -> None:
    """Raises ConfigError if a document has nothing that imitation could demonstrate."""
    found = [document.place for document in documents if not document.facts and document.memories is None]
    if found:
        rest = f" ({len(found) - 1:,} other documents have none either)" if len(found) > 1 else ""
        raise ConfigError(f"{found[0]}: {NOT_DEMONSTRATED}{rest}")


def read_questions(section: QuestionFiles) -> tuple[list[Document], list[Document]]:
    """The documents that are trained on, and those that are held out. Raises CorpusError as `read_documents`."""
    documents = read_documents(section)
    held_out = [_is_held_out(document.context, section.held_out) for document in documents]
    parts = (
        [document for document, held in zip(documents, held_out, strict=True) if not held],
        [document for document, held in zip(documents, held_out, strict=True) if held],
    )
    for part, missing in zip(parts, ("to train on", "for the evaluation"), strict=True):
        if not part:
            raise CorpusError(
                f"reasoning: data.held_out={section.held_out} leaves no document of {len(documents)} rows {missing};"
                " give more documents, or another share"
            )
    return parts


def _is_held_out(context: str, share: float) -> bool:
    """By the text alone, so that all sections and texts that differ in white space agree."""
    digest = hashlib.blake2b(" ".join(context.split()).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _parsed(record: Any, section: QuestionFiles, place: str) -> Document:
    """A row as a document. Raises BadRecord."""
    if not isinstance(record, dict):
        raise BadRecord(f"is a JSON {type(record).__name__}, not an object")
    context, question = (_text(record, field) for field in (section.context_field, section.question_field))
    answers = record.get(section.answers_field)
    answers = [answers] if isinstance(answers, str) else answers
    if not _are_texts(answers) or not answers:
        raise BadRecord(f"must have a text or a list of texts in the field {section.answers_field!r}")
    facts = record.get(section.facts_field)
    facts = [] if facts is None else facts
    if not _are_texts(facts):
        raise BadRecord(f"must have a list of texts in the field {section.facts_field!r}")
    for fact in facts:
        if fact not in context:
            raise BadRecord(f"has the fact {json.dumps(fact)}, which is no passage of its context")
    memories = record.get(section.memories_field)
    if memories is not None and not (isinstance(memories, list) and all(map(_is_string, memories))):
        raise BadRecord(f"must have a list of strings in the field {section.memories_field!r}")
    noted = None if memories is None else tuple(memories)
    return Document(context, question, tuple(answers), tuple(facts), noted, record, place)


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    if not _is_string(value) or not value.strip():
        found = "no such field" if field not in record else json.dumps(value)[:40]
        raise BadRecord(f"must have a text in the field {field!r} (found {found})")
    return value


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(_is_string(each) and each.strip() for each in value)


def _is_string(value: object) -> TypeGuard[str]:
    """Whether it is a string of Unicode characters: JSON can write halves of one."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False
