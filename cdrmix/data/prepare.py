"""Preparation: from the raw text of a source to shards on disk, once for every content key.

The text is streamed two or three times: as far as needed to know that both splits will hold documents, up to
tokenizer.train_bytes to train the tokenizer, and once to encode. The shards appear under their final name by
a rename, complete; a preparation that is killed leaves a folder that the next one removes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.config.schema import Config
from cdrmix.data import shards
from cdrmix.data.dedup import FingerprintFile, count_contaminated, simhash
from cdrmix.data.shards import ShardSet, SplitWriter, open_shards, write_index
from cdrmix.data.sources import BadRecords, Document, Source, make_source
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.durable import disk_guard, sync_folder
from cdrmix.errors import ConfigError, CorpusError, ShardError, VocabularyError

HASH_KEY = b"cdrmix held-out split 1"  # fixed: a text is on the same side in every corpus
HASH_RANGE = 2**64
BATCH_CHARACTERS = 2**22  # encoded at once
SECONDS_BETWEEN_LINES = 10.0
SECONDS_UNTIL_LEFT_BEHIND = 24 * 60 * 60.0

Say = Callable[[str], None]


def prepare(config: Config, *, say: Say = print) -> ShardSet:
    """The shards of the configured text, made now or found under their content key; both come verified.

    Raises CorpusError, VocabularyError, ConfigError (a tokenizer file that is not there), ShardError (damaged
    shards), DiskFullError.
    """
    source = make_source(next(iter(config.data.all_domains().values())).source)
    tokenizer = load_tokenizer(config)
    key = content_key(config, source, tokenizer)
    cache = Path(config.data.cache).expanduser()
    folder = cache / key[:20]
    if not folder.exists():
        with disk_errors(cache):
            cache.mkdir(parents=True, exist_ok=True)
            with preparation_lock(cache / f".{folder.name}.lock", say):
                if not folder.exists():  # another process may have made it while this one waited
                    build(config, source, tokenizer, key, folder, say)
                    return open_shards(folder)
    prepared = open_shards(folder)
    if prepared.key != key:
        raise ShardError(f"{folder} holds shards of the content key {prepared.key}, not {key}; delete it")
    say(f"Reusing prepared text in {folder}: {summary(prepared.report)}")
    return prepared


def content_key(config: Config, source: Source, tokenizer: TextTokenizer | None) -> str:
    """SHA-256, hexadecimal, of everything that decides what the shards hold, without reading the text."""
    content = {
        "format": shards.FORMAT,
        "data": config.data.model_dump(exclude={"cache"}),
        "vocab_size": config.model.vocab_size,
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "source": source.identity(),
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
    return tokenizer


def build(config: Config, source: Source, tokenizer: TextTokenizer | None, key: str, folder: Path, say: Say) -> None:
    """Make the shards in a temporary folder beside `folder`, then rename it to that."""
    for other in folder.parent.glob(f".{folder.name}.tmp-*"):
        if is_left_behind(other):
            shutil.rmtree(other, ignore_errors=True)
    temporary = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex}-{os.getpid()}-{socket.gethostname()}"
    temporary.mkdir()
    try:
        started = time.monotonic()
        say(f"Preparing {source.describe()}")
        threshold = held_out_threshold(config, source)
        if tokenizer is None:
            tokenizer = train_tokenizer(config, source, threshold, say)
        report = encode(config, source, tokenizer, threshold, key, temporary, say)
        sync_folder(temporary)
        try:
            temporary.rename(folder)
        except OSError as error:
            # Only without a working lock (some network file systems): the other one made the same shards.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync_folder(folder.parent)
        say(f"Prepared {summary(report)}; {time.monotonic() - started:.1f} s")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_left_behind(temporary: Path) -> bool:
    """Whether the process that made a temporary folder, `...tmp-<random>-<process>-<host>`, is gone.

    That this process holds the lock is no proof: on some network file systems locks do not hold. So the process
    must be of this machine and not be there any more, or must have written nothing for a day.
    """
    owner = re.search(r"\.tmp-[0-9a-f]+-(\d+)-(.*)$", temporary.name)
    if owner and owner[2] == socket.gethostname():
        try:
            os.kill(int(owner[1]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # somebody else's process
            pass
    try:
        newest = max(path.stat().st_mtime for path in (temporary, *temporary.iterdir()))
    except FileNotFoundError:  # it was renamed or removed this moment
        return False
    return time.time() - newest > SECONDS_UNTIL_LEFT_BEHIND


def text_hash(text: str) -> int:
    """A number below HASH_RANGE that depends on the text only."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), key=HASH_KEY, digest_size=8).digest(), "big")


def read_documents(config: Config, source: Source, bad: BadRecords) -> Iterator[Document]:
    """The first data.max_documents documents of the source, empty ones included."""
    return islice(source.documents(bad), config.data.max_documents)


def held_out_threshold(config: Config, source: Source) -> int:
    """The documents whose text hash is below this number are held out.

    data.valid_fraction of the range of hashes; in a small corpus that this would put on one side, moved just so
    far that the other side gets a text. Raises CorpusError when there are not two different texts.
    """
    threshold = int(config.data.valid_fraction * HASH_RANGE)
    bad = BadRecords(config.data.max_bad_records, say=_silent)
    lowest, highest, count = HASH_RANGE, -1, 0
    for document in read_documents(config, source, bad):
        if not document.text:
            continue
        value = text_hash(document.text)
        lowest, highest, count = min(lowest, value), max(highest, value), count + 1
        if lowest < threshold <= highest:  # usually known after a few documents
            return threshold
    if lowest >= highest:
        alike = "all alike, " if count > 1 else ""
        first_bad = f" (the first: {bad.shown[0]})" if bad.shown else ""
        raise CorpusError(
            f"{source.describe()}: found {count} documents with text, {alike}and {bad.count} bad records{first_bad}; "
            "at least two different documents are needed, one of them to hold out (data.source, data.max_documents)"
        )
    return lowest + 1 if lowest >= threshold else highest


def train_tokenizer(config: Config, source: Source, threshold: int, say: Say) -> TextTokenizer:
    """Train on the documents that are not held out, up to data.tokenizer.train_bytes of them."""
    section = config.data.tokenizer
    bad = BadRecords(config.data.max_bad_records, say=_silent)
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for document in read_documents(config, source, bad):
            if text_hash(document.text) >= threshold:
                read += len(document.text.encode("utf-8"))
                yield document.text
                if read >= section.train_bytes:
                    return

    tokenizer = TextTokenizer.train(texts(), vocab_size=config.model.vocab_size, end_of_text=section.end_of_text)
    # Longer than asked for only when the bytes and the special token alone are more ids than that.
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(f"model.vocab_size={config.model.vocab_size}: must be at least 257 for byte-level BPE")
    short = "" if tokenizer.vocab_size == config.model.vocab_size else ", all that this text gives"
    say(f"Tokenizer trained on {read / 1e6:.2f} MB: {tokenizer.vocab_size} ids{short}")
    return tokenizer


def encode(
    config: Config, source: Source, tokenizer: TextTokenizer, threshold: int, key: str, folder: Path, say: Say
) -> dict[str, Any]:
    """Write both splits, the tokenizer and the index into `folder`; the report."""
    bad = BadRecords(config.data.max_bad_records, say)
    end_of_text = np.uint32(tokenizer.end_of_text_id)
    empty = 0
    last_line = time.monotonic()
    with ExitStack() as stack:
        train, valid = (
            stack.enter_context(
                SplitWriter(
                    folder,
                    name,
                    vocab_size=config.model.vocab_size,
                    shard_tokens=config.data.shard_tokens,
                    row_length=config.data.row_length,
                )
            )
            for name in shards.SPLITS
        )
        train_fingerprints, valid_fingerprints = (
            # nameless files: gone when they are closed, also by a kill
            FingerprintFile(stack.enter_context(tempfile.TemporaryFile(dir=folder)))
            for _ in shards.SPLITS
        )
        for batch in batches(read_documents(config, source, bad)):
            texts = [document.text for document in batch if document.text]
            empty += len(batch) - len(texts)
            held_out = np.array([text_hash(text) < threshold for text in texts], np.bool_)
            fingerprints = simhash(texts)
            train_fingerprints.add(fingerprints[~held_out])
            valid_fingerprints.add(fingerprints[held_out])
            for text, ids, is_held_out in zip(texts, tokenizer.encode_batch(texts), held_out, strict=True):
                split = valid if is_held_out else train
                split.add(np.append(ids, end_of_text), len(text.encode("utf-8")))
            if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                documents, text_bytes = train.documents + valid.documents, train.text_bytes + valid.text_bytes
                say(f"  encoded {documents:,} documents, {text_bytes / 1e6:,.1f} MB")
        if not train.documents or not valid.documents:
            raise CorpusError(f"{source.describe()} changed while it was being read; start again when it is at rest")
        splits = {split.name: split.close() for split in (train, valid)}
        near_duplicates = count_contaminated(valid_fingerprints, train_fingerprints)

    tokenizer_entry = shards.write_file(folder / "tokenizer.json", tokenizer.json_bytes)
    report = make_report(config, splits, tokenizer, bad, empty, near_duplicates)
    write_index(
        folder,
        {
            "format": shards.FORMAT,
            "key": key,
            "vocab_size": config.model.vocab_size,
            "dtype": train.dtype,
            "shard_tokens": config.data.shard_tokens,
            "row_length": config.data.row_length,
            "end_of_text": tokenizer.end_of_text,
            "end_of_text_id": tokenizer.end_of_text_id,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "splits": splits,
            "files": {**train.files, **valid.files, "tokenizer.json": tokenizer_entry},
            "report": report,
        },
    )
    return report


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about BATCH_CHARACTERS."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= 10_000:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def make_report(
    config: Config,
    splits: dict[str, dict[str, Any]],
    tokenizer: TextTokenizer,
    bad: BadRecords,
    empty: int,
    near_duplicates: int,
) -> dict[str, Any]:
    """What the preparation found: counts over both splits, and under each split's name its own.

    near_duplicates: held-out documents whose SimHash is within three bits of a training document's. Equal texts
    are always on one side; these are the nearly equal ones, which flatter the held-out figures.
    """
    both = {
        name: sum(split[name] for split in splits.values()) for name in ("documents", "tokens", "text_bytes", "rows")
    }
    positions = both["rows"] * config.data.row_length
    return {
        **both,
        **{name: {key: value for key, value in split.items() if key != "shards"} for name, split in splits.items()},
        "row_length": config.data.row_length,
        "bytes_per_token": both["text_bytes"] / both["tokens"],
        "held_out_share": splits["valid"]["documents"] / both["documents"],
        "held_out_near_duplicates": near_duplicates,
        "padding_share": 1 - (both["tokens"] - len(splits)) / positions,
        "tokenizer_ids": tokenizer.vocab_size,
        "empty_documents": empty,
        "bad_records": bad.count,
        "bad_records_shown": bad.shown,
    }


def summary(report: dict[str, Any]) -> str:
    """The report in a line."""
    return (
        f"{report['documents']:,} documents, {report['text_bytes'] / 1e6:,.2f} MB, {report['tokens']:,} tokens "
        f"({report['bytes_per_token']:.2f} bytes each), {report['rows']:,} rows of {report['row_length']} "
        f"({report['padding_share']:.1%} filling); {report['held_out_share']:.1%} of documents held out "
        f"({report['held_out_near_duplicates']} of them nearly equal to a training document); "
        f"{report['bad_records']} bad records"
    )


@contextmanager
def preparation_lock(path: Path, say: Say) -> Iterator[None]:
    """Let one process at a time prepare one key; the lock of a process that dies is free at once."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is preparing this text; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def disk_errors(cache: Path) -> Iterator[None]:
    """Turns a full disk into DiskFullError, and a cache folder that cannot be written into ConfigError."""
    try:
        with disk_guard(
            f"shards below {cache}", "Free some space there, or set data.cache to a folder on another disk."
        ):
            yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ConfigError(f"data.cache: cannot write below {cache}: {error.strerror}") from error
        raise


def _silent(_: str) -> None:
    """Says nothing: bad records are told of when the text is encoded."""
