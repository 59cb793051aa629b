"""The report of a preparation, as JSON and HTML: documents read, kept and filtered by each rule, with samples.

report.json is one object. An amount is {"documents", "bytes"}. Bytes are of UTF-8 text. Shares are between 0 and 1.
    format           1; increased when a field gets another meaning
    records          number of records of the sources, bad records included
    read             amount: the records with a text, before cleaning
    cleaned_bytes    bytes removed by normalisation, by the extraction from HTML and by placeholders
    kept             amount: the documents in the shards
    rules            a list in the order in which the rules are applied, with rules that filtered nothing; of each
        name, description, documents, bytes (null: not known), share (of `records`), byte_share (of read bytes)
        bounds       of a filter rule, by domain: the bound of the score; null: infinite
        left         amount that passed this rule and all earlier rules
        samples      up to three: hash (of the content), where (location of the record), score or null, text (its
                     start), kept_instead (start of the kept near-duplicate) or null
    near_duplicates  counts of the near-duplicate stage; 0 and {} without that stage
        candidate_pairs, likely_pairs, verified_pairs
        cluster_sizes  number of documents, as text -> number of clusters of this size
    languages        code -> amount and share of the bytes, of the documents that passed the filters
    domains          name -> documents, tokens, rows, share of its tokens, in both splits
    pii              kind -> number of placeholders
    hidden           field -> number of conversations of which the chat template does not write this field
    bad_records      count, and shown: the first messages
    encoder          the package that tokenised, its version, and why it is not fastokens
    stages           a list in order: name, seconds, cpu_seconds of all processes, bytes (of text),
                     megabytes_per_second or null
    shards           the report of the shards' index
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.config.schema_data import Dedup
from cdrmix.data.cleaning.filters import FilterChain
from cdrmix.data.cleaning.rules import RULES
from cdrmix.data.pipeline.encoding import LONGER_THAN_ROW
from cdrmix.data.pipeline.filter_page import filter_page
from cdrmix.data.pipeline.reading import EQUAL_ANSWERS, NO_ASSISTANT_TURN, NO_TRAINED_TURN
from cdrmix.data.pipeline.stats import Amount, PipelineStats, Sample
from cdrmix.data.shards import Stratum, open_shards
from cdrmix.data.sources.base import BAD_RECORDS_SHOWN
from cdrmix.durable import write_atomically

FORMAT = 1
BAD_RECORDS = (
    "Records that could not be read: malformed, without the text field, not UTF-8, or too large. They are counted only "
    "here. data.max_bad_records limits their number."
)
EMPTY = "The text is empty or white space after normalisation."
UNKNOWN = "No rule of this name is configured."


def write(
    folder: Path,
    config: Config,
    stats: PipelineStats,
    near_duplicates: dict[str, Any],
    report: dict[str, Any],
    timings: dict[str, dict[str, float]],
    encoder: str,
) -> None:
    """Writes report.json and report.html to `folder`, a folder inside a folder of finished shards.

    near_duplicates: the results of the near-duplicate stage. report: of the index. timings: seconds and bytes of each
    stage. encoder: the description of the tokenizer's encoder.
    """
    prepared = open_shards(folder.parent, verify=False)
    strata = [*prepared.train.strata, *prepared.valid.strata]
    content = gather(config, stats, near_duplicates, report, timings, encoder, strata)
    write_atomically(folder / "report.json", json.dumps(content, indent=1, allow_nan=False))
    write_atomically(folder / "report.html", filter_page(content, config.to_yaml()))


def gather(
    config: Config,
    stats: PipelineStats,
    near_duplicates: dict[str, Any],
    report: dict[str, Any],
    timings: dict[str, dict[str, float]],
    encoder: str,
    strata: Sequence[Stratum],
) -> dict[str, Any]:
    """The contents of report.json; strata: of both splits."""
    read = stats.read
    rules = [*_rules(config)]
    names = {rule["name"] for rule in rules}
    reading_rules = {
        "empty",
        NO_ASSISTANT_TURN,
        NO_TRAINED_TURN,
        EQUAL_ANSWERS,
        *(rule["name"] for rule in rules if rule["bounds"]),
    }
    # Rules that are not configured are listed at the end, so that the sum is complete.
    rules += [_rule(name, UNKNOWN) for name in sorted(stats.filtered.keys() - names)]
    taken = sum(amount.bytes for name, amount in stats.filtered.items() if name in reading_rules)
    cleaned = read.bytes - taken - stats.kept.bytes
    records = read.documents + stats.bad
    left = Amount(records, read.bytes - cleaned)
    for rule in rules:
        filtered = stats.filtered.get(rule["name"])
        documents, size = (filtered.documents, filtered.bytes) if filtered else (0, 0)
        if rule["name"] == "bad_records":
            documents = stats.bad
        left = Amount(left.documents - documents, left.bytes - size)
        rule |= {
            "documents": documents,
            "bytes": None if rule["name"] == "bad_records" else size,
            "share": _share(documents, records),
            "byte_share": None if rule["name"] == "bad_records" else _share(size, read.bytes),
            "left": vars(left),
            "samples": [_sample(sample) for sample in filtered.samples] if filtered else [],
        }
    of_languages = sum(amount.bytes for amount in stats.languages.values())
    by_bytes = sorted(stats.languages.items(), key=lambda item: (-item[1].bytes, item[0]))
    return {
        "format": FORMAT,
        "records": records,
        "read": vars(read),
        "cleaned_bytes": cleaned,
        "kept": {"documents": report["documents"], "bytes": report["text_bytes"]},
        "rules": rules,
        "near_duplicates": {
            **{name: near_duplicates.get(name, 0) for name in ("candidate_pairs", "likely_pairs", "verified_pairs")},
            "cluster_sizes": near_duplicates.get("cluster_sizes", {}),
        },
        "languages": {name: {**vars(amount), "share": _share(amount.bytes, of_languages)} for name, amount in by_bytes},
        "domains": _domains(strata),
        "pii": dict(sorted(stats.pii.items())),
        "hidden": dict(sorted(stats.hidden.items())),
        "bad_records": {"count": stats.bad, "shown": stats.bad_shown[:BAD_RECORDS_SHOWN]},
        "encoder": encoder,
        "stages": [
            {
                "name": name,
                "seconds": timing["seconds"],
                "cpu_seconds": timing["cpu_seconds"],
                "bytes": timing["bytes"],
                "megabytes_per_second": timing["bytes"] / 1e6 / timing["seconds"]
                if timing["bytes"] and timing["seconds"]
                else None,
            }
            for name, timing in timings.items()
        ],
        "shards": report,
    }


def _rules(config: Config) -> Iterator[dict[str, Any]]:
    """Name, description and bounds of every configured rule, in the order of the pipeline.

    If domains have their own filters, the rules of the first domain come first, then those that only later domains
    have.
    """
    yield _rule("bad_records", BAD_RECORDS)
    yield _rule("empty", EMPTY)
    if config.data.has_conversations():
        yield _rule(NO_ASSISTANT_TURN, "The conversation has no turn of the assistant.")
        yield _rule(NO_TRAINED_TURN, "The turns to train on have the weight 0 (see docs/finetuning.md).")
    if config.data.has_pairs():
        yield _rule(EQUAL_ANSWERS, "The chosen and the rejected answer are the same.")
    bounds: dict[str, dict[str, float | None]] = {}
    for domain_name, domain in config.data.all_domains().items():
        section = config.data.filters_of(domain)
        configured = {"language": section.language_score, **section.bounds}
        for name in FilterChain(section).names:
            bounds.setdefault(name, {})[domain_name] = _finite(configured.get(name, RULES[name].bound))
    for name, of_domains in bounds.items():
        yield _rule(name, RULES[name].description, of_domains)
    for name, description in _duplicates(config.data.dedup).items():
        yield _rule(name, description)
    if config.data.has_conversations():
        yield _rule(
            LONGER_THAN_ROW, "The conversation has more tokens than a row (data.row_length). It would have to be cut."
        )


def _duplicates(dedup: Dedup) -> dict[str, str]:
    """Descriptions of the deduplication rules, in their order."""
    kept = "The document of the highest quality is kept, then of the highest priority, then of the smallest hash."
    rules = {}
    if dedup.exact:
        rules["exact_duplicate"] = (
            f"The text equals that of another document, except for white space (data.dedup.exact). {kept}"
        )
    if dedup.url:
        rules["duplicate_url"] = f"The canonical URL equals that of another document (data.dedup.url). {kept}"
    if dedup.documents_per_host is not None:
        most = f"{dedup.documents_per_host:,}"
        rules["documents_per_host"] = (
            f"The registrable domain has more than {most} documents (data.dedup.documents_per_host). Those of the "
            "highest quality are kept, then of the highest priority, then of the smallest hash."
        )
    if dedup.near_duplicates:
        rules["near_duplicate"] = (
            f"The exact Jaccard similarity with another document, over runs of {dedup.ngram} words, is at least "
            f"{dedup.threshold:g} (data.dedup.threshold), directly or through a chain of documents. {kept}"
        )
    return rules


def _rule(name: str, description: str, bounds: dict[str, float | None] | None = None) -> dict[str, Any]:
    return {"name": name, "description": description, "bounds": bounds or {}}


def _sample(sample: Sample) -> dict[str, Any]:
    return {
        "hash": sample.hash,
        "where": sample.where,
        "score": None if sample.score is None else _finite(sample.score),
        "text": sample.excerpt,
        "kept_instead": sample.like,
    }


def _domains(strata: Sequence[Stratum]) -> dict[str, dict[str, float]]:
    domains: dict[str, dict[str, float]] = {}
    for stratum in strata:
        counts = domains.setdefault(stratum.domain, {"documents": 0, "tokens": 0, "rows": 0})
        for name in counts:
            counts[name] += getattr(stratum, name)
    tokens = sum(counts["tokens"] for counts in domains.values())
    return {name: {**counts, "share": _share(counts["tokens"], tokens)} for name, counts in domains.items()}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
