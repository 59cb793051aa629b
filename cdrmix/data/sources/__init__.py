"""The sources of text by name. Importing this package registers the built-in ones."""

from __future__ import annotations

from cdrmix.config import schema_data
from cdrmix.data.sources import chat, generated, streams, tables, text_files  # each registers its sources
from cdrmix.data.sources.base import SOURCES, Source
from cdrmix.errors import ConfigError

__all__ = ["SOURCES", "chat", "generated", "make_source", "streams", "tables", "text_files"]


def make_source(section: schema_data.Source, max_expansion: int = 1000) -> Source:
    """The source that a section describes.

    max_expansion: the largest ratio of decompressed to compressed bytes; a file above it is taken for an attack.

    Raises CorpusError if a path has no files, ConfigError if no plugin has registered the name of a `kind: plugin`.
    """
    if section.kind != "plugin":
        return SOURCES[section.kind](section, max_expansion)
    try:
        source = SOURCES[section.name]
    except ValueError as error:
        raise ConfigError(f"data.source.name: {error}") from error
    return source(section, max_expansion)
