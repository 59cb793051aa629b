"""Counts of read, kept and filtered documents. The sum over tasks does not depend on the order of the tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SAMPLES = 3  # of each rule: those with the smallest content hashes, which do not depend on the order of reading
EXCERPT_CHARACTERS = 400
BAD_SHOWN = 5


@dataclass
class Amount:
    """Documents and the UTF-8 bytes of their texts."""

    documents: int = 0
    bytes: int = 0

    def add(self, size: int, documents: int = 1) -> None:
        self.documents += documents
        self.bytes += size


@dataclass
class Sample:
    """A filtered document: content hash (hexadecimal), location of the record, score of the rule, start of the text.

    like: for a duplicate, the start of the text that was kept instead.
    """

    hash: str
    where: str
    score: float | None
    excerpt: str
    like: str | None = None


@dataclass
class Filtered(Amount):
    """The documents that one rule filtered."""

    samples: list[Sample] = field(default_factory=list)

    def add_samples(self, samples: list[Sample]) -> None:
        """Keeps the SAMPLES with the smallest hashes."""
        distinct = {(sample.hash, sample.where): sample for sample in (*self.samples, *samples)}
        self.samples = [distinct[key] for key in sorted(distinct)[:SAMPLES]]


@dataclass
class PipelineStats:
    """Documents that a stage read and kept, and those that each rule filtered."""

    read: Amount = field(default_factory=Amount)
    kept: Amount = field(default_factory=Amount)
    filtered: dict[str, Filtered] = field(default_factory=dict)
    languages: dict[str, Amount] = field(default_factory=dict)
    pii: dict[str, int] = field(default_factory=dict)  # kind -> placeholders written
    hidden: dict[str, int] = field(default_factory=dict)  # field -> conversations whose template does not write it
    metadata_bytes: int = 0  # of the kept documents, without their texts
    bad: int = 0
    bad_shown: list[str] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def add_filtered(self, rule: str, size: int, sample: Sample) -> None:
        """Count a document that `rule` filtered."""
        filtered = self.filtered.setdefault(rule, Filtered())
        filtered.add(size)
        filtered.add_samples([sample])

    def merge(self, other: PipelineStats) -> None:
        """Add another stats to this one."""
        for mine, theirs in ((self.read, other.read), (self.kept, other.kept)):
            mine.add(theirs.bytes, theirs.documents)
        for rule, theirs in other.filtered.items():
            filtered = self.filtered.setdefault(rule, Filtered())
            filtered.add(theirs.bytes, theirs.documents)
            filtered.add_samples(theirs.samples)
        for language, amount in other.languages.items():
            self.languages.setdefault(language, Amount()).add(amount.bytes, amount.documents)
        add_counts(self.pii, other.pii)
        add_counts(self.hidden, other.hidden)
        self.metadata_bytes += other.metadata_bytes
        self.bad += other.bad
        self.bad_shown = [*self.bad_shown, *other.bad_shown][:BAD_SHOWN]
        self.cpu_seconds += other.cpu_seconds

    def as_json(self) -> dict[str, Any]:
        """The stats as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PipelineStats:
        """The stats that `as_json` gave."""
        return cls(
            read=Amount(**data["read"]),
            kept=Amount(**data["kept"]),
            filtered={
                rule: Filtered(
                    filtered["documents"], filtered["bytes"], [Sample(**sample) for sample in filtered["samples"]]
                )
                for rule, filtered in data["filtered"].items()
            },
            languages={language: Amount(**amount) for language, amount in data["languages"].items()},
            pii=data["pii"],
            hidden=data.get("hidden", {}),  # an interrupted preparation of an earlier version has none
            metadata_bytes=data["metadata_bytes"],
            bad=data["bad"],
            bad_shown=data["bad_shown"],
            cpu_seconds=data["cpu_seconds"],
        )


def add_counts(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds counts by name."""
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


def excerpt(text: str) -> str:
    """The beginning of a text."""
    return text[:EXCERPT_CHARACTERS]
