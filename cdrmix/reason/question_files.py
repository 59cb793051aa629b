"""Files of documents with questions: their rows are read and checked, and some documents are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, AnyStr, NamedTuple, TypeGuard

from cdrmix.config.schema_reasoning import QuestionFiles
from cdrmix.data.sources.base import BadRecord, record_location
from cdrmix.data.sources.files import find_files
from cdrmix.data.sources.tables import JsonLines, decoded, json_lines
from cdrmix.data.tasks.example import Example, Note
from cdrmix.errors import ConfigError, CorpusError

MAX_EXPANSION = 1000  # of compressed files, as data.max_expansion
NOT_DEMONSTRATED = (
    "the phase imitation needs facts, the passages that an answer needs, or notes, the memory after each passage that"
    " changes it; give them, or set reasoning.phases.imitation.steps: 0"
)


class Document(NamedTuple):
    """A text, a question about it, and its right answers.

    facts: passages of the text that the answer needs. notes: passages in their order, and the text of the memory after
    each; None: not given. row: what a reward function is given. place: where the document is from, for messages.
    example: of a generated task.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    facts: tuple[str, ...]
    notes: tuple[Note, ...] | None
    row: Mapping[str, Any]
    place: str
    example: Example | None = None


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
    given = [document.notes is not None for document in documents]
    if any(given) and not all(given):
        without = documents[given.index(False)]
        raise CorpusError(f"{without.place} has no list in the field {section.notes_field!r}, which other rows have")
    return documents


def check_demonstrated(documents: Sequence[Document]) -> None:
    """Raises ConfigError if a document has nothing that imitation could demonstrate."""
    found = [document.place for document in documents if not document.facts and document.notes is None]
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


def same_text(context: str) -> str:
    """The text of a document without its kinds of white space: documents in which it is equal are the same."""
    return " ".join(context.split())


def _is_held_out(context: str, share: float) -> bool:
    """By the text alone, so that all sections and texts that differ in white space agree."""
    digest = hashlib.blake2b(same_text(context).encode(), digest_size=8).digest()
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
    notes = _notes(record, section.notes_field, context)
    return Document(context, question, tuple(answers), tuple(facts), notes, record, place)


def _notes(record: Mapping[str, Any], field: str, context: str) -> tuple[Note, ...] | None:
    """The notes of a row; None without any. Their passages stand in the context in the same order."""
    given = record.get(field)
    if given is None:
        return None
    wanted = f"must have a list of objects with the texts passage and memory in the field {field!r}"
    if not isinstance(given, list):
        raise BadRecord(wanted)
    for number, note in enumerate(given, 1):
        is_object = isinstance(note, dict) and note.get("passage")
        if not is_object or not all(_is_string(note.get(key)) for key in Note._fields):
            raise BadRecord(f"{wanted} (note {number} is {json.dumps(note)[:80]})")
    passages = [note["passage"] for note in given]
    found = ends_in_order(context, passages)
    if len(found) < len(passages):
        raise BadRecord(
            f"has a note with the passage {json.dumps(passages[len(found)])}, which is not in its context after the"
            " passages of the notes before it"
        )
    return tuple(Note(note["passage"], note["memory"]) for note in given)


def ends_in_order(text: AnyStr, passages: Sequence[AnyStr]) -> list[int]:
    """Where each passage ends, found behind the one before it; without those from the first that is not found on."""
    ends: list[int] = []
    for passage in passages:
        start = text.find(passage, ends[-1] if ends else 0)
        if start < 0:
            break
        ends.append(start + len(passage))
    return ends


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
