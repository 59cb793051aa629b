"""The sources of text by name: what `data.source.kind` may say, and the class behind each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cdrmix.config import schema_data
from cdrmix.data.sources.base import Source
from cdrmix.data.sources.streams import HuggingFace, Tasks
from cdrmix.data.sources.tables import CommaSeparated, JsonLines, Parquet
from cdrmix.data.sources.text_files import Html, PlainText, StandardLibrary

SOURCES: dict[str, Callable[[Any, int], Source]] = {
    source.kind: source
    for source in (StandardLibrary, PlainText, Html, JsonLines, CommaSeparated, Parquet, HuggingFace, Tasks)
}


def make_source(section: schema_data.Source, max_expansion: int = 1000) -> Source:
    """The source that a section describes; CorpusError when its files are not there.

    max_expansion: times its size that a compressed file may unfold to before it is taken for an attack.
    """
    return SOURCES[section.kind](section, max_expansion)
