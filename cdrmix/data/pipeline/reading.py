"""The first stage: records of the sources to clean texts, each with a hash of its content.

A source's part is cut into units of about `unit_bytes`. Each unit is parsed, cleaned and judged by one task, which
leaves one Arrow file sorted by content hash; from there on the order of the corpus no longer matters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from cdrmix import _text
from cdrmix.config.schema_data import Filters
from cdrmix.data.cleaning.filters import FilterChain
from cdrmix.data.cleaning.normalize import html_text, normalize
from cdrmix.data.cleaning.pii import scrub
from cdrmix.data.cleaning.urls import canonical_url, registrable_domain
from cdrmix.data.pipeline.columns import appearing, read_report, write_table
from cdrmix.data.pipeline.stats import Amount, PipelineStats, Sample, excerpt
from cdrmix.data.sources.base import BAD_RECORDS_SHOWN, BadRecord, Meta, Record, Source, parse_record, place, utf8_size

UNIT_RECORDS = 50_000
META_CHARACTERS = 4096  # of one field of metadata: longer ones, such as the page that a text is from, are left out
HELD_OUT_KEY = b"cdrmix held-out split 1"  # fixed: a text is on the same side in every corpus

COLUMNS = pa.schema(
    {
        "hash": pa.binary(16),  # of the text, white space apart
        "text": pa.large_string(),
        "domain": pa.uint16(),
        "quality": pa.float64(),
        "priority": pa.int32(),
        "address": pa.uint64(),  # hash of the canonical URL; 0: none
        "host": pa.uint64(),  # hash of its registrable domain
        "side": pa.uint64(),  # decides whether the document is held out
        "language": pa.large_string(),
        "where": pa.large_string(),
        "meta": pa.large_string(),  # JSON
    }
)


@dataclass(frozen=True)
class Cleaning:
    """What is done to the documents of one domain."""

    number: int  # of the domain
    priority: int
    html: bool
    url_field: str | None
    cap_hosts: bool
    quality_field: str | None
    filters: Filters
    pii: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """Some parts of a domain's source, read one after the other; `name` sorts and tells them from all others."""

    name: str
    parts: tuple[str, ...]
    source: Source
    cleaning: Cleaning
    folder: Path
    unit_bytes: int

    def unit(self, number: int) -> Path:
        """Where unit `number` of the part is left."""
        return self.folder / f"{self.name}-{number:06d}.arrow"


@dataclass(frozen=True)
class Unit:
    """Records of a part, to be read into `path`."""

    path: Path
    parse: Callable[[Any], tuple[str, Meta]]
    cleaning: Cleaning
    records: list[tuple[str, Record]]  # with the part of each
    checkpoint: Any  # of the source, behind the last record


def grouped(source: Source, unit_bytes: int) -> Iterator[tuple[str, ...]]:
    """A source's parts in order, small ones together: thousands of short files are a few units, not as many."""
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
    """How many records of a domain may still be read; None: any number."""

    def __init__(self, left: int | None) -> None:
        self.left = left

    def take(self, count: int) -> None:
        if self.left is not None:
            self.left -= count


def units(part: Part, quota: Quota | None = None) -> Iterator[Unit]:
    """The units of a part that are not there yet."""
    quota = quota or Quota(None)
    number, checkpoint = 0, None
    # A source that can start in the middle does so, behind the units that are there.
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
    """Parse, clean and judge the records; write what is kept, and the scores of all beside it."""
    started = time.process_time()
    tally = PipelineStats()
    documents = list(_parsed(unit, tally))
    chain = _chain(unit.cleaning.filters.model_dump_json())
    texts = [text for _, text, _ in documents]
    judgement = chain.judge(texts)
    rows: dict[str, list[Any]] = {name: [] for name in COLUMNS.names}
    hashes = []
    for index, (where, text, meta) in enumerate(documents):
        language = judgement.languages[index]
        size = utf8_size(text)
        digest = content_hash(text)
        failed = int(judgement.first_failed[index])
        if failed >= 0:
            score = float(judgement.scores[index, failed])
            shown = scrub(excerpt(text), unit.cleaning.pii)[0]
            tally.drop(chain.names[failed], size, Sample(digest.hex(), where, score, shown))
            hashes.append(digest)
            continue
        tally.languages.setdefault(language, Amount()).add(size)
        if unit.cleaning.pii:
            text, found = scrub(text, unit.cleaning.pii)
            if found:
                tally.found(found)
                digest = content_hash(text)
        hashes.append(digest)
        tally.kept.add(utf8_size(text))
        add_row(rows, text, digest, where, meta, unit.cleaning, language)
    tally.metadata_bytes = metadata_bytes(rows)
    if chain.names:
        _write_scores(unit.path, documents, hashes, chain.names, judgement)
    tally.cpu_seconds = time.process_time() - started
    report = {"tally": tally.as_json(), "records": len(unit.records), "checkpoint": unit.checkpoint}
    write_rows(unit.path, rows, report)
    return tally


def _parsed(unit: Unit, tally: PipelineStats) -> Iterator[tuple[str, str, Meta]]:
    """(where, normalised text, metadata) of every record with text; the others are counted."""
    for part, record in unit.records:
        where = place(part, record.number)
        try:
            text, meta = parse_record(unit.parse, record)
        except BadRecord as error:
            tally.bad += 1
            if len(tally.bad_shown) < BAD_RECORDS_SHOWN:
                tally.bad_shown.append(f"{where}: {error}")
            continue
        tally.read.add(utf8_size(text))
        text = normalize(html_text(text) if unit.cleaning.html else text)
        if text and not text.isspace():
            yield where, text, meta
        else:
            tally.drop("empty", 0, Sample("", where, None, ""))


def add_row(
    rows: dict[str, list[Any]], text: str, digest: bytes, where: str, meta: Meta, cleaning: Cleaning, language: str = ""
) -> None:
    """Append a document, with its content hash, to columns of the names of COLUMNS."""
    address = host = 0
    if cleaning.url_field and isinstance(url := field(meta, cleaning.url_field), str) and (url := canonical_url(url)):
        address = hash64(url)
        if cleaning.cap_hosts and (domain := registrable_domain(url)):
            host = hash64(domain)
    for name, value in {
        "hash": digest,
        "text": text,
        "domain": cleaning.number,
        "quality": quality_of(field(meta, cleaning.quality_field)) if cleaning.quality_field else 0.0,
        "priority": cleaning.priority,
        "address": address,
        "host": host,
        "side": side(text),
        "language": language,
        "where": where,
        "meta": kept_meta(meta, cleaning.pii) if meta else "",
    }.items():
        rows[name].append(value)


def field(meta: Meta, name: str) -> Any:
    """A field of the metadata, or with dots in its name one of a mapping in it; None where there is none."""
    if name in meta:
        return meta[name]
    outer, _, inner = name.partition(".")
    return field(within, inner) if inner and isinstance(within := meta.get(outer), Mapping) else None


def metadata_bytes(rows: dict[str, list[Any]]) -> int:
    """What the columns of `rows` hold beside the texts, about."""
    return sum(map(len, rows["meta"])) + sum(map(len, rows["where"]))


def write_rows(path: Path, rows: dict[str, list[Any]], report: dict[str, Any]) -> None:
    """A unit: columns of the names of COLUMNS, written in the order of the content hashes."""
    order = sorted(range(len(rows["hash"])), key=lambda row: (rows["hash"][row], rows["where"][row]))
    write_table(path, pa.table(rows, schema=COLUMNS).take(pa.array(order, pa.int64())), report)


def quality_of(value: Any) -> float:
    """A number of the metadata as a quality; 0 for what is none."""
    if not isinstance(value, int | float) or value != value:  # NaN
        return 0.0
    return max(min(value, sys.float_info.max), -sys.float_info.max) + 0.0


def kept_meta(meta: Meta, pii: tuple[str, ...]) -> str:
    """The fields of metadata that are not too long, as JSON, personal data replaced as in the text."""
    kept = {}
    for name, value in meta.items():
        if isinstance(value, str):
            value = scrub(value, pii)[0] if pii and len(value) <= META_CHARACTERS else value
        elif not isinstance(value, int | float | bool | None):
            value = json.dumps(value, default=str)
        if not isinstance(value, str) or len(value) <= META_CHARACTERS:
            kept[name] = value
    return json.dumps(kept)


def content_hash(text: str) -> bytes:
    """16 bytes of BLAKE2b of the text with every run of white space as one space, none at its ends."""
    return blake2b(_text.squeezed(text), digest_size=16).digest()


def hash64(text: str) -> int:
    """A number of 64 bits, not 0, that depends on the text only."""
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "big") or 1


def side(text: str) -> int:
    """A number of 64 bits that depends on the text only; below a threshold the document is held out."""
    return int.from_bytes(blake2b(text.encode("utf-8"), key=HELD_OUT_KEY, digest_size=8).digest(), "big")


@cache
def _chain(section: str) -> FilterChain:
    return FilterChain(Filters.model_validate_json(section))


def _write_scores(path: Path, documents: list[Any], hashes: list[bytes], names: list[str], judgement: Any) -> None:
    """The scores of all documents, kept or not, so that bounds can be chosen without reading the text again."""
    failed = [names[index] if index >= 0 else None for index in judgement.first_failed]
    columns = {
        "hash": pa.array(hashes, pa.binary(16)),
        "where": pa.array([where for where, _, _ in documents], pa.string()),
        "language": pa.array(judgement.languages, pa.string()),
        "dropped_by": pa.array(failed, pa.string()),
        **{name: pa.array(judgement.scores[:, place], pa.float32()) for place, name in enumerate(names)},
    }
    folder = path.parent.parent / "scores"
    folder.mkdir(exist_ok=True)
    with appearing(folder / f"{path.stem}.parquet") as temporary:
        pyarrow.parquet.write_table(pa.table(columns), temporary, compression="zstd")
