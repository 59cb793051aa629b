"""The first stage: from the records of the sources to clean texts with content hashes.

A part of a source is cut into units of about `unit_bytes`. One task parses, cleans and filters each unit, and writes
one Arrow file sorted by content hash. The following stages do not depend on the order of the corpus.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet

from cdrmix import _text
from cdrmix.config.schema_data import Filters
from cdrmix.data.chat.rendering import Renderer
from cdrmix.data.cleaning.filters import FilterChain, FilterResult
from cdrmix.data.cleaning.normalize import SURROGATES, html_text, normalize
from cdrmix.data.cleaning.pii import scrub
from cdrmix.data.cleaning.urls import canonical_url, registrable_domain
from cdrmix.data.pipeline.stats import Amount, PipelineStats, Sample, add_counts, excerpt
from cdrmix.data.pipeline.storage import atomic_file, read_report, write_table
from cdrmix.data.sources.base import (
    BAD_RECORDS_SHOWN,
    BadRecord,
    Metadata,
    Record,
    Source,
    parse_record,
    record_location,
    shortened,
    utf8_size,
)
from cdrmix.data.sources.conversations import UNWRITTEN, Conversation, Pair, from_json
from cdrmix.errors import ConfigError

UNIT_RECORDS = 50_000
NO_ASSISTANT_TURN = "no_assistant_turn"  # the rule, in the report, that filters conversations without one
NO_TRAINED_TURN = "no_trained_turn"  # the same for those whose turns to train on have the weight 0
EQUAL_ANSWERS = "equal_answers"  # the same for pairs whose answers are the same
META_CHARACTERS = 4096  # of one metadata field; longer fields, such as the page of a text, are left out
META_DEPTH = 100  # of lists and mappings in a metadata field; deeper fields are left out
LONE_SURROGATE = re.compile(f"[{SURROGATES}]")  # JSON can write one; UTF-8 cannot
HELD_OUT_KEY = b"cdrmix held-out split 1"  # fixed, so that a text is in the same split in every corpus

COLUMNS = pa.schema(
    {
        "hash": pa.binary(16),  # of the text, with white space normalised
        "text": pa.large_string(),
        "domain": pa.uint16(),
        "quality": pa.float64(),
        "priority": pa.int32(),
        "url_hash": pa.uint64(),  # hash of the canonical URL; 0: none
        "host_hash": pa.uint64(),  # hash of its registrable domain
        "split_hash": pa.uint64(),  # determines whether the document is held out
        "language": pa.large_string(),
        "where": pa.large_string(),
        "meta": pa.large_string(),  # JSON
        "marks": pa.large_string(),  # of a rendered conversation: `Rendered.marks`; empty for other texts
    }
)


@dataclass(frozen=True)
class Cleaning:
    """How the documents of one domain are cleaned and filtered."""

    number: int  # of the domain
    priority: int
    html: bool
    url_field: str | None
    cap_hosts: bool
    quality_field: str | None
    filters: Filters
    pii: tuple[str, ...]
    renderer: Renderer | None = None  # of conversations; None: the documents are texts


class Parsed(NamedTuple):
    """A document that is read and normalised. filtered: the text that the filters see. marks: of `Rendered`, or ""."""

    where: str
    text: str
    metadata: Metadata
    filtered: str
    marks: str = ""
    prompt: str = ""


@dataclass(frozen=True)
class Part:
    """Some parts of the source of a domain, read one after the other. name: unique and sortable."""

    name: str
    parts: tuple[str, ...]
    source: Source
    cleaning: Cleaning
    folder: Path
    unit_bytes: int

    def unit(self, number: int) -> Path:
        """The file of unit `number` of the part."""
        return self.folder / f"{self.name}-{number:06d}.arrow"


@dataclass(frozen=True)
class Unit:
    """A task: records of a part, to be written to `path`."""

    path: Path
    parse: Callable[[Any], tuple[str, Metadata]]
    cleaning: Cleaning
    records: list[tuple[str, Record]]  # with the part of each
    checkpoint: Any  # of the source, after the last record


def grouped(source: Source, unit_bytes: int) -> Iterator[tuple[str, ...]]:
    """The parts of a source in order, small ones grouped, so that thousands of short files become a few units."""
    group: list[str] = []
    total = 0
    for part in source.parts():
        size = source.size(part)
        if group and (size is None or total + size > unit_bytes):
            yield tuple(group)
            group, total = [], 0
        group.append(part)
        total += unit_bytes if size is None else size
    if group:
        yield tuple(group)


class Quota:
    """The number of records of a domain that may still be read. None: no limit."""

    def __init__(self, left: int | None) -> None:
        self.left = left

    def take(self, count: int) -> None:
        if self.left is not None:
            self.left -= count


def units(part: Part, quota: Quota | None = None) -> Iterator[Unit]:
    """The units of a part that are not finished yet."""
    quota = quota or Quota(None)
    number, checkpoint = 0, None
    # A source with checkpoints continues after the finished units.
    while (path := part.unit(number)).exists() and (found := read_report(path))["checkpoint"] is not None:
        quota.take(found["records"])
        number, checkpoint = number + 1, found["checkpoint"]
    pending: list[tuple[str, Record]] = []
    size = 0
    every = ((name, record) for name in part.parts for record in part.source.records(name, checkpoint))
    for name, record in islice(every, quota.left):
        quota.take(1)
        pending.append((name, record))
        size += record.size
        if size >= part.unit_bytes or len(pending) >= UNIT_RECORDS:
            yield from _unit(part, number, pending)
            number, pending, size = number + 1, [], 0
    if pending:
        yield from _unit(part, number, pending)


def _unit(part: Part, number: int, records: list[tuple[str, Record]]) -> Iterator[Unit]:
    path = part.unit(number)
    if not path.exists():
        yield Unit(path, part.source.parse, part.cleaning, records, part.source.checkpoint())


def read_unit(unit: Unit) -> PipelineStats:
    """Parses, cleans and filters the records. Writes the kept documents, and the scores of all documents."""
    started = time.process_time()
    stats = PipelineStats()
    documents = list(_parsed(unit, stats))
    chain = _chain(unit.cleaning.filters.model_dump_json())
    result = chain.apply([document.filtered for document in documents])
    rows: dict[str, list[Any]] = {name: [] for name in COLUMNS.names}
    hashes = []
    for index, document in enumerate(documents):
        where, text = document.where, document.text
        language = result.languages[index]
        size = utf8_size(text)
        digest = content_hash(text)
        failed = int(result.first_failed[index])
        if failed >= 0:
            score = float(result.scores[index, failed])
            stats.add_filtered(chain.names[failed], size, Sample(digest.hex(), where, score, text))
            hashes.append(digest)
            continue
        stats.languages.setdefault(language, Amount()).add(size)
        if unit.cleaning.pii and not document.marks:  # a conversation is scrubbed before it is rendered
            text, found = scrub(text, unit.cleaning.pii)
            if found:
                add_counts(stats.pii, found)
                digest = content_hash(text)
        hashes.append(digest)
        stats.kept.add(utf8_size(text))
        add_row(rows, text, digest, where, document.metadata, unit.cleaning, language, document.marks, document.prompt)
    for filtered in stats.filtered.values():
        for sample in filtered.samples:  # the whole text is scrubbed, because an excerpt may end inside of an address
            sample.excerpt = excerpt(writable(sample.excerpt, unit.cleaning.pii))
    stats.metadata_bytes = metadata_bytes(rows)
    if chain.names:
        _write_scores(unit.path, documents, hashes, chain.names, result)
    stats.cpu_seconds = time.process_time() - started
    report = {"stats": stats.as_json(), "records": len(unit.records), "checkpoint": unit.checkpoint}
    write_rows(unit.path, rows, report)
    return stats


def _parsed(unit: Unit, stats: PipelineStats) -> Iterator[Parsed]:
    """The document of each record with text. Other records are counted."""
    for part, record in unit.records:
        where = record_location(part, record.number)
        try:
            text, metadata = parse_record(unit.parse, record)
            if unit.cleaning.renderer is not None:
                yield from _conversation(where, text, metadata, unit.cleaning, unit.cleaning.renderer, stats)
                continue
        except BadRecord as error:
            stats.bad += 1
            if len(stats.bad_shown) < BAD_RECORDS_SHOWN:
                stats.bad_shown.append(f"{where}: {shortened(writable(str(error), unit.cleaning.pii))}")
            continue
        stats.read.add(utf8_size(text))
        text = normalize(html_text(text) if unit.cleaning.html else text)
        if text and not text.isspace():
            yield Parsed(where, text, metadata, text)
        else:
            stats.add_filtered("empty", 0, Sample("", where, None, ""))


def _conversation(
    where: str, text: str, metadata: Metadata, cleaning: Cleaning, renderer: Renderer, stats: PipelineStats
) -> Iterator[Parsed]:
    """The document of a conversation, whose contents are normalised and scrubbed before they are rendered.

    text: JSON of the conversation. Raises BadRecord if the template refuses it, ConfigError if it cannot be masked.
    """

    def clean(content: str) -> str:
        content, found = scrub(normalize(content), cleaning.pii) if cleaning.pii else (normalize(content), {})
        add_counts(stats.pii, found)
        return content

    conversation = from_json(text).mapped(clean)
    contents = conversation.contents()
    reason = _unusable(conversation, renderer.train_on)
    if reason:
        size = utf8_size(contents)
        stats.read.add(size)
        stats.add_filtered(reason, size, Sample("", where, None, contents))
        return
    try:
        if isinstance(conversation, Pair):
            rendered = renderer.render_pair(conversation)
        else:
            rendered = renderer.render(conversation)
        hidden = renderer.hidden_fields(conversation, rendered) | {name for name in UNWRITTEN if metadata.get(name)}
        add_counts(stats.hidden, dict.fromkeys(hidden, 1))
    except ConfigError as error:
        raise ConfigError(f"{error} ({where})") from error
    stats.read.add(utf8_size(rendered.text))
    yield Parsed(where, rendered.text, metadata, contents, rendered.marks(), rendered.text[: rendered.prompt])


def _unusable(conversation: Conversation | Pair, train_on: str) -> str:
    """The rule that filters a conversation before it is rendered; empty: none."""
    if isinstance(conversation, Pair):
        if conversation.chosen == conversation.rejected:
            return EQUAL_ANSWERS
        both = (conversation.chosen, conversation.rejected)
        return "" if all(one.trained_turns(train_on) for one in both) else NO_TRAINED_TURN
    if all(message["role"] != "assistant" for message in conversation.messages):
        return NO_ASSISTANT_TURN
    return "" if conversation.trained_turns(train_on) else NO_TRAINED_TURN


def add_row(
    rows: dict[str, list[Any]],
    text: str,
    digest: bytes,
    where: str,
    metadata: Metadata,
    cleaning: Cleaning,
    language: str = "",
    marks: str = "",
    prompt: str = "",
) -> None:
    """Appends a document with its content hash to the columns of COLUMNS. prompt: of a conversation."""
    url_hash = host_hash = 0
    if (
        cleaning.url_field
        and isinstance(url := field(metadata, cleaning.url_field), str)
        and (url := canonical_url(writable(url)))
    ):
        url_hash = hash64(url)
        if cleaning.cap_hosts and (domain := registrable_domain(url)):
            host_hash = hash64(domain)
    for name, value in {
        "hash": digest,
        "text": text,
        "domain": cleaning.number,
        "quality": quality_of(field(metadata, cleaning.quality_field)) if cleaning.quality_field else 0.0,
        "priority": cleaning.priority,
        "url_hash": url_hash,
        "host_hash": host_hash,
        "split_hash": split_hash(text, prompt),
        "language": language,
        "where": where,
        "meta": stored_metadata(metadata, cleaning.pii) if metadata else "",
        "marks": marks,
    }.items():
        rows[name].append(value)


def field(metadata: Metadata, name: str) -> Any:
    """A field of the metadata, or with dots in its name one of a mapping in it; None where there is none."""
    if name in metadata:
        return metadata[name]
    outer, _, inner = name.partition(".")
    return field(within, inner) if inner and isinstance(within := metadata.get(outer), Mapping) else None


def metadata_bytes(rows: dict[str, list[Any]]) -> int:
    """The approximate size of the columns of `rows` without the texts."""
    return sum(sum(map(len, rows[name])) for name in ("meta", "where", "marks"))


def write_rows(path: Path, rows: dict[str, list[Any]], report: dict[str, Any]) -> None:
    """Writes a unit: the columns of COLUMNS, in the order of the content hashes."""
    order = sorted(range(len(rows["hash"])), key=lambda row: (rows["hash"][row], rows["where"][row]))
    write_table(path, pa.table(rows, schema=COLUMNS).take(pa.array(order, pa.int64())), report)


def quality_of(value: Any) -> float:
    """A metadata value as a quality; 0 if it is not a number. CSV has numbers as texts."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return 0.0
    if not isinstance(value, int | float) or value != value:  # NaN
        return 0.0
    return max(min(value, sys.float_info.max), -sys.float_info.max) + 0.0


def stored_metadata(metadata: Metadata, pii: tuple[str, ...]) -> str:
    """The metadata fields that are neither too long nor too deep, as JSON. Lists and mappings are written as JSON too.

    Personal data are replaced in every string, also in those of lists and mappings and in names.
    """
    kept = {}
    for name, value in metadata.items():
        if isinstance(value, str):
            value = writable(value, pii) if len(value) <= META_CHARACTERS else value
        elif not isinstance(value, int | float | bool | None):
            try:
                value = json.dumps(_nested_metadata(value, pii, META_DEPTH))
            except _TooDeep:
                continue
        if not isinstance(value, str) or len(value) <= META_CHARACTERS:
            kept[writable(name, pii)] = value
    return json.dumps(kept)


class _TooDeep(Exception):
    """A metadata field has more than META_DEPTH lists and mappings in each other."""


def _nested_metadata(value: Any, pii: tuple[str, ...], depth: int) -> Any:
    """A value as one of JSON, with `writable` strings. Raises _TooDeep beyond `depth` lists and mappings."""
    if depth < 0:
        raise _TooDeep
    if isinstance(value, int | float | bool | None):
        return value
    if isinstance(value, Mapping):
        return {writable(str(name), pii): _nested_metadata(item, pii, depth - 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nested_metadata(item, pii, depth - 1) for item in value]
    return writable(str(value), pii)


def writable(text: str, pii: tuple[str, ...] = ()) -> str:
    """The text as it may be written to a report: without personal data of these kinds and without lone surrogates."""
    if not text.isascii():
        text = LONE_SURROGATE.sub("\ufffd", text)
    return scrub(text, pii)[0] if pii else text


def content_hash(text: str) -> bytes:
    """16 bytes of BLAKE2b of the text, with every run of white space as one space and none at the ends."""
    return blake2b(_text.squeezed(text), digest_size=16).digest()


def hash64(text: str) -> int:
    """A 64-bit hash of the text that is not 0."""
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "big") or 1


def split_hash(text: str, prompt: str = "") -> int:
    """A 64-bit hash of the text. Documents below a threshold are held out.

    prompt: of a conversation. Its hash is the upper half, so that all answers to a prompt are in the same split.
    """
    own = int.from_bytes(blake2b(text.encode("utf-8"), key=HELD_OUT_KEY, digest_size=8).digest(), "big")
    return split_hash(prompt) >> 32 << 32 | own & 0xFFFFFFFF if prompt else own


@cache
def _chain(section: str) -> FilterChain:
    return FilterChain(Filters.model_validate_json(section))


def _write_scores(
    path: Path, documents: list[Any], hashes: list[bytes], names: list[str], result: FilterResult
) -> None:
    """Writes the scores of all documents, kept or filtered, so that bounds can be chosen without reading the text
    again.
    """
    failed = [names[index] if index >= 0 else None for index in result.first_failed]
    columns = {
        "hash": pa.array(hashes, pa.binary(16)),
        "where": pa.array([document.where for document in documents], pa.string()),
        "language": pa.array(result.languages, pa.string()),
        "filtered_by": pa.array(failed, pa.string()),
        **{name: pa.array(result.scores[:, column], pa.float32()) for column, name in enumerate(names)},
    }
    folder = path.parent.parent / "scores"
    folder.mkdir(exist_ok=True)
    with atomic_file(folder / f"{path.stem}.parquet") as temporary:
        pyarrow.parquet.write_table(pa.table(columns), temporary, compression="zstd")
