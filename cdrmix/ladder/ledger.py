"""The ledger of a ladder: one JSON object a line, each with the SHA-256 of the line before.

A line has its number, the hash of the line before, its kind, the rung, `facts` and `record`. Facts are a function of
the configuration, the text and the machine: a ladder that was killed and continued has the same facts. The record has
what differs from run to run: the time, durations, the name of the run folder, and the SHA-256 of the files that hold
them. The chain covers both.

A line that is changed or missing inside breaks the chain. The file `ledger.head` holds the number of lines and the hash
of the last one, so that lines that are missing at the end are noticed too. A kill may leave it one line behind. So one
line that was added with a correct hash is not noticed by the chain; ledger_lines.py refuses it unless it is the line
that the runner could have written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cdrmix.durable import disk_guard, lock_file, sha256_file, write_atomically
from cdrmix.errors import ConfigError, LedgerError
from cdrmix.json_text import parse_json
from cdrmix.ladder.ledger_lines import missing_part, out_of_order
from cdrmix.run_folder import finite
from cdrmix.units import utc_now

LEDGER, HEAD, LOCK = "ledger.jsonl", "ledger.head", "lock"
FIRST = "0" * 64  # the hash before the first line
Kind = Literal["ladder", "infrastructure", "forecast", "trained", "judged", "promoted"]
KEYS = ("number", "before", "kind", "rung", "facts", "record")
REMEDY = "Restore the file from a copy, or climb again in a new folder (ladder.root)."


@dataclass(frozen=True)
class Entry:
    """A line of the ledger. rung: "" for the ladder as a whole. record: time (UTC), files, and others by kind."""

    number: int
    kind: Kind
    rung: str
    facts: dict[str, Any]
    record: dict[str, Any]


class Ledger:
    """The entries in the folder of a ladder. `Ledger(root)` reads them, and verifies the chain and their order.

    Raises LedgerError with the number of the first line that is wrong.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path, self.head = root / LEDGER, root / HEAD
        self._lines = self._read()
        self.entries = [self._entry(number, line) for number, line in enumerate(self._lines, 1)]
        self._behind = self._check_head()
        if wrong := out_of_order(self.entries):
            number, problem = wrong
            raise LedgerError(f"{self.path}:{number} was added or changed: {problem}. {REMEDY}")

    def append(self, kind: Kind, rung: str, facts: Mapping[str, Any], record: Mapping[str, Any]) -> Entry:
        """Adds a line durably. Raises DiskFullError. A kill leaves either the ledger before it or the one after it."""
        now = utc_now()
        values = (len(self._lines) + 1, self._last(), kind, rung, finite(facts), {"time": now, **finite(record)})
        assert missing_part(kind, *values[-2:]) is None, values
        line = json.dumps(dict(zip(KEYS, values, strict=True)), allow_nan=False, ensure_ascii=False)
        lines = [*self._lines, line]
        with disk_guard(f"the ledger in {self.root}", "Free some space there, and run the command again."):
            if self._behind:  # a kill came between the last two writes; the head may be one line behind, not two
                self._write_head(self._lines)
            write_atomically(self.path, "".join(each + "\n" for each in lines))
            self._write_head(lines)
        self._lines, self._behind = lines, False
        self.entries.append(self._entry(len(lines), line))
        return self.entries[-1]

    def of(self, kind: Kind, rung: str = "") -> list[Entry]:
        """The entries of a kind and a rung, in their order."""
        return [entry for entry in self.entries if (entry.kind, entry.rung) == (kind, rung)]

    def _last(self) -> str:
        return _sha256(self._lines[-1]) if self._lines else FIRST

    def _read(self) -> list[str]:
        try:
            text = self.path.read_bytes().decode("utf-8")
        except FileNotFoundError:
            return []
        except (UnicodeDecodeError, IsADirectoryError) as error:
            raise LedgerError(f"{self.path} was changed: it is not a file of UTF-8 text. {REMEDY}") from error
        lines = text.split("\n")
        if lines.pop():
            raise LedgerError(f"{self.path}:{len(lines) + 1} was changed: the line does not end. {REMEDY}")
        return lines

    def _entry(self, number: int, line: str) -> Entry:
        """The line as an entry. Raises LedgerError if it is not the line that follows the one before."""
        where = f"{self.path}:{number}"
        try:
            values = parse_json(line)
        except ValueError as error:
            raise LedgerError(f"{where} was changed: it is not valid JSON. {REMEDY}") from error
        known = isinstance(values, dict) and tuple(values) == KEYS and isinstance(values["rung"], str)
        if not known or values["kind"] not in get_args(Kind):
            raise LedgerError(f"{where} was changed: it is not a line of a ledger. {REMEDY}")
        if values["number"] != number:
            raise LedgerError(
                f"{where}: the ledger was changed: here is line {values['number']}, and line {number} is missing or in "
                f"another place. {REMEDY}"
            )
        before = _sha256(self._lines[number - 2]) if number > 1 else FIRST
        if values["before"] != before:
            changed = f"line {number - 1} was changed" if number > 1 else "line 1 was changed"
            raise LedgerError(
                f"{self.path}: {changed}: its SHA-256 is {before[:12]}, line {number} says "
                f"{str(values['before'])[:12]}. {REMEDY}"
            )
        if missing := missing_part(values["kind"], values["facts"], values["record"]):
            raise LedgerError(
                f"{where} was added or changed: {missing} of a line of the kind {values['kind']} is missing or "
                f"malformed. {REMEDY}"
            )
        return Entry(number, values["kind"], values["rung"], values["facts"], values["record"])

    def _check_head(self) -> bool:
        """Compares the last line with `ledger.head`. Returns whether a kill left the ledger one line ahead of it."""
        try:
            text = self.head.read_bytes().decode("utf-8")
        except FileNotFoundError as error:
            if len(self._lines) > 1:  # a kill may come between the first line and its head
                raise LedgerError(
                    f"{self.head} is missing, and {self.path.name} has {len(self._lines)} lines. {REMEDY}"
                ) from error
            text = f"0 {FIRST}\n"
        except (UnicodeDecodeError, IsADirectoryError) as error:
            raise LedgerError(f"{self.head} was changed: it is not a file of UTF-8 text. {REMEDY}") from error
        count, _, digest = text.strip().partition(" ")
        if not (count.isascii() and count.isdecimal()):
            raise LedgerError(f"{self.head} was changed: found {text[:80]!r}. {REMEDY}")
        lines = len(self._lines)
        if int(count) > lines:
            raise LedgerError(f"{self.path} was cut: it has {lines} lines, and {self.head.name} says {count}. {REMEDY}")
        if lines > int(count) + 1:
            raise LedgerError(
                f"{self.head} was changed: it says {count} lines, and {self.path.name} has {lines}. {REMEDY}"
            )
        last = _sha256(self._lines[int(count) - 1]) if int(count) else FIRST
        if digest != last:
            raise LedgerError(
                f"{self.path}:{count} was changed: its SHA-256 is {last[:12]}, {self.head.name} says {digest[:12]}. "
                f"{REMEDY}"
            )
        return lines > int(count)

    def _write_head(self, lines: list[str]) -> None:
        write_atomically(self.head, f"{len(lines)} {_sha256(lines[-1])}\n")


def _sha256(line: str) -> str:
    return hashlib.sha256(line.encode("utf-8")).hexdigest()


def recorded_files(root: Path, files: Iterable[Path]) -> dict[str, str]:
    """The record of files: path relative to the folder of the ladder, to SHA-256."""
    return {path.relative_to(root).as_posix(): sha256_file(path) for path in files}


def check_files(root: Path, entry: Entry) -> None:
    """Raises LedgerError with the name of the first file of an entry that is missing or has another SHA-256."""
    for name, expected in entry.record.get("files", {}).items():
        path, where = root / name, f"line {entry.number} of {root / LEDGER}"
        if not path.is_file():
            raise LedgerError(f"{path} is missing, but {where} records it. {REMEDY}")
        found = sha256_file(path)
        if found != expected:
            raise LedgerError(
                f"{path} was changed: its SHA-256 is {found[:12]}, {where} says {expected[:12]}. {REMEDY}"
            )


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Locks a ladder against other processes. The lock ends with the process.

    Raises ConfigError if another process has it, or if the folder cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / LOCK).open("a")
    except OSError as error:
        raise ConfigError(
            f"ladder.root: cannot use {root}: {error.strerror}; set a folder that you can write"
        ) from error
    with file:
        lock_file(file, lambda: f"{root}: another process is working on this ladder")
        yield
