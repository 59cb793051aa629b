"""Counts of what the preparation kept and filtered, and why: added up over tasks in any order to the same result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SAMPLES = 3  # of each rule: those with the smallest content hashes, so that they do not depend on the order of reading
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
    """A filtered document: its content hash (hexadecimal), where it was read, the rule's score, the text's beginning.

    like: the beginning of the text that was kept instead, for duplicates.
    """

    hash: str
    where: str
    score: float | None
    excerpt: str
    like: str | None = None


@dataclass
class Filtered(Amount):
    """What one rule filtered."""

    samples: list[Sample] = field(default_factory=list)

    def show(self, samples: list[Sample]) -> None:
        """Keep the SAMPLES with the smallest hashes of those here and those given."""
        distinct = {(sample.hash, sample.where): sample for sample in (*self.samples, *samples)}
        self.samples = [distinct[key] for key in sorted(distinct)[:SAMPLES]]


@dataclass
class PipelineStats:
    """What went into a stage, what came out, and what each rule filtered, by rule."""

    read: Amount = field(default_factory=Amount)
    kept: Amount = field(default_factory=Amount)
    filtered: dict[str, Filtered] = field(default_factory=dict)
    languages: dict[str, Amount] = field(default_factory=dict)
    pii: dict[str, int] = field(default_factory=dict)  # kind -> placeholders written
    metadata_bytes: int = 0  # of the kept documents, beside their texts
    bad: int = 0
    bad_shown: list[str] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def add_filtered(self, rule: str, size: int, sample: Sample) -> None:
        """Count a document that `rule` filtered."""
        filtered = self.filtered.setdefault(rule, Filtered())
        filtered.add(size)
        filtered.show([sample])

    def found(self, pii: Mapping[str, int]) -> None:
        """Add counts of personal data by kind."""
        for kind, count in pii.items():
            self.pii[kind] = self.pii.get(kind, 0) + count

    def merge(self, other: PipelineStats) -> None:
        """Add another stats to this one."""
        for mine, theirs in ((self.read, other.read), (self.kept, other.kept)):
            mine.add(theirs.bytes, theirs.documents)
        for rule, theirs in other.filtered.items():
            filtered = self.filtered.setdefault(rule, Filtered())
            filtered.add(theirs.bytes, theirs.documents)
            filtered.show(theirs.samples)
        for language, amount in other.languages.items():
            self.languages.setdefault(language, Amount()).add(amount.bytes, amount.documents)
        self.found(other.pii)
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
            metadata_bytes=data["metadata_bytes"],
            bad=data["bad"],
            bad_shown=data["bad_shown"],
            cpu_seconds=data["cpu_seconds"],
        )


def excerpt(text: str) -> str:
    """The beginning of a text."""
    return text[:EXCERPT_CHARACTERS]
