"""Sources with one document per file: the Python standard library, plain text, HTML."""

from __future__ import annotations

import codecs
import io
import platform
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from resiliparse.parse.encoding import map_encoding_to_html5

from cdrmix.config import schema_data
from cdrmix.data.sources import files
from cdrmix.data.sources.base import (
    SOURCES,
    BadRecord,
    FileSource,
    Metadata,
    Record,
    damage_message,
    invalid_utf8,
    over_long_message,
)
from cdrmix.data.sources.files import DAMAGED_STREAM, open_bytes, read_at_most, reading, walk
from cdrmix.errors import CorpusError

HTML_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
DECLARED_ENCODING = re.compile(
    rb"""<(?:meta\b[^<>]*?[\s"';]charset|\?xml\b[^<>]*?\sencoding)\s*=\s*(?:["']\s*)?([\w.:-]+)""", re.IGNORECASE
)
DECLARATION_BYTES = 4096  # of a page, in which its encoding is looked for


@SOURCES("stdlib")
class StandardLibrary(FileSource):
    """The .py files of the standard library of this Python, without its tests and installed packages."""

    kind = "stdlib"
    suffixes = (".py",)
    excluded = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

    def __init__(self, section: schema_data.StdlibSource, max_expansion: int = 1) -> None:
        self.root = Path(sysconfig.get_path("stdlib"))
        self.files = list(walk(self.root, self.suffixes, self.excluded))
        self.parse = parse_python
        if not self.files:
            raise CorpusError(
                f"data.source.kind=stdlib: no .py files under {self.root}; this Python has no library "
                "source. Configure another source, for example data.source={kind: text, paths: [folder]}"
            )

    def identity(self) -> list[Any]:
        sizes = []
        for path in self.files:
            with reading(path):
                sizes.append([path.relative_to(self.root).as_posix(), path.stat().st_size])
        return [platform.python_version(), sizes]

    def describe(self) -> str:
        return f"the standard library of Python {platform.python_version()} ({len(self.files)} files)"

    def parts(self) -> list[str]:
        return [path.relative_to(self.root).as_posix() for path in self.files]

    def size(self, part: str) -> int | None:
        return super().size(str(self.root / part))

    def read(self, path: Path) -> Iterator[Record]:
        with reading(self.root / path):
            raw = (self.root / path).read_bytes()
        yield Record(0, raw, len(raw))


def parse_python(raw: bytes) -> tuple[str, Metadata]:
    """The text of a Python file in the encoding that it declares (PEP 263). Line ends are not changed."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding), {}
    except (SyntaxError, LookupError, UnicodeDecodeError) as error:
        raise BadRecord(f"cannot be decoded: {error}") from error


@SOURCES("text")
class PlainText(FileSource):
    """UTF-8 files, one document each. All files of a folder that are not hidden are read."""

    kind = "text"
    suffixes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, section: schema_data.TextSource | schema_data.HtmlSource, max_expansion: int) -> None:
        self.parse = parse_text
        super().__init__(section.paths, max_expansion)

    def read(self, path: Path) -> Iterator[Record]:
        with reading(path), open_bytes(path, self.max_expansion) as stream:
            try:
                raw = read_at_most(stream, files.MAX_RECORD_BYTES + 1)
            except DAMAGED_STREAM as error:
                yield Record(0, error=damage_message(error))
                return
        yield Record(0, raw, len(raw))


@SOURCES("html")
class Html(PlainText):
    """HTML files, one document each. The files of a folder with a suffix of HTML files are read."""

    kind = "html"
    suffixes = (".html", ".htm", ".xhtml", ".html.gz", ".htm.gz", ".html.zst", ".htm.zst")

    def __init__(self, section: schema_data.HtmlSource, max_expansion: int) -> None:
        super().__init__(section, max_expansion)
        self.parse = parse_html


def parse_text(raw: bytes) -> tuple[str, Metadata]:
    """The text of a UTF-8 file."""
    if len(raw) > files.MAX_RECORD_BYTES:
        raise BadRecord(over_long_message())
    try:
        return raw.decode("utf-8-sig"), {}
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadRecord(f"line {line}: {invalid_utf8(error)}") from error


def parse_html(raw: bytes) -> tuple[str, Metadata]:
    """The text of a page: in UTF-8 where it is that, otherwise in the encoding of its byte order mark or that it
    declares (WHATWG "Encoding": ISO-8859-1 means windows-1252).
    """
    if len(raw) > files.MAX_RECORD_BYTES:
        raise BadRecord(over_long_message())
    declared = DECLARED_ENCODING.search(HTML_COMMENT.sub(b"", raw[:DECLARATION_BYTES]))
    name = declared[1].decode() if declared else ""
    encoding = map_encoding_to_html5(name.lower(), fallback_utf8=False) if name else None
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        name = encoding = "utf-16"
    # Text in ISO-2022-JP is ASCII with escape sequences, so it is UTF-8 too.
    elif encoding is None or not encoding.startswith("iso2022"):
        try:
            return parse_text(raw)
        except BadRecord as error:
            if encoding is None or encoding.startswith("utf"):
                found = f"; it declares {name!r}" if name else ", and it declares no other encoding"
                raise BadRecord(f"{error}{found}") from error
    try:
        return raw.decode(encoding), {}
    except UnicodeDecodeError as error:
        raise BadRecord(f"is not in the encoding that it declares, {name!r}: {error}") from error
