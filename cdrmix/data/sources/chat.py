"""Sources of conversations: JSON lines and Parquet files whose records are lists of turns.

The text of a document is its conversation as JSON. The preparation renders it with the chat template of the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix.config import schema_data
from cdrmix.data.sources.base import SOURCES, FileSource, Metadata, Record
from cdrmix.data.sources.conversations import conversation_of, pair_of
from cdrmix.data.sources.tables import JsonLines, Parquet, decoded, json_lines, parquet_rows


class ConversationFiles(FileSource):
    """Files with one record per line or row, of any fields."""

    suffixes = (*JsonLines.suffixes, *Parquet.suffixes)

    def read(self, path: Path) -> Iterator[Record]:
        if path.suffix in Parquet.suffixes:
            return parquet_rows(path)
        return json_lines(path, self.max_expansion)


@SOURCES("chat")
class Chat(ConversationFiles):
    """Files with one conversation per line or row."""

    kind = "chat"

    def __init__(self, section: schema_data.ChatSource, max_expansion: int) -> None:
        self.parse = partial(parse_conversation, section=section)
        super().__init__(section.paths, max_expansion)


@SOURCES("preferences")
class Preferences(ConversationFiles):
    """Files with one pair of answers per line or row."""

    kind = "preferences"

    def __init__(self, section: schema_data.PreferencesSource, max_expansion: int) -> None:
        self.parse = partial(parse_pair, section=section)
        super().__init__(section.paths, max_expansion)


def parse_conversation(raw: bytes | dict[str, Any], section: schema_data.ChatSource) -> tuple[str, Metadata]:
    """The conversation of a record as JSON, and its other fields. raw: a line of JSON, or the cells of a row."""
    conversation, metadata = conversation_of(decoded(raw) if isinstance(raw, bytes) else raw, section)
    return conversation.to_json(), metadata


def parse_pair(raw: bytes | dict[str, Any], section: schema_data.PreferencesSource) -> tuple[str, Metadata]:
    """The pair of a record as JSON, and its other fields. raw: a line of JSON, or the cells of a row."""
    pair, metadata = pair_of(decoded(raw) if isinstance(raw, bytes) else raw, section)
    return pair.to_json(), metadata
