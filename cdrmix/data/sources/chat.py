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
from cdrmix.data.sources.conversations import ALPACA, LISTS, conversation_of, pair_of
from cdrmix.data.sources.parquet_files import parquet_rows
from cdrmix.data.sources.tables import JsonLines, Parquet, decoded, json_lines

COMMON = ("system", "tools")  # fields of records of all formats


class ConversationFiles(FileSource):
    """Files with one record per line or row, of any fields. asked: the fields that a conversation is made of."""

    suffixes = (*JsonLines.suffixes, *Parquet.suffixes)
    asked: tuple[str, ...]

    def read(self, path: Path) -> Iterator[Record]:
        if path.suffix.lower() in Parquet.suffixes:
            return parquet_rows(path, self.asked, self.max_expansion)
        return json_lines(path, self.max_expansion)


@SOURCES("chat")
class Chat(ConversationFiles):
    """Files with one conversation per line or row."""

    kind = "chat"

    def __init__(self, section: schema_data.ChatSource, max_expansion: int) -> None:
        self.parse = partial(parse_conversation, section=section)
        self.asked = (section.field, *COMMON) if section.field else (*LISTS, *ALPACA, *COMMON)
        super().__init__(section.paths, max_expansion)


@SOURCES("preferences")
class Preferences(ConversationFiles):
    """Files with one pair of answers per line or row."""

    kind = "preferences"

    def __init__(self, section: schema_data.PreferencesSource, max_expansion: int) -> None:
        self.parse = partial(parse_pair, section=section)
        self.asked = (section.prompt_field, section.chosen_field, section.rejected_field, *COMMON)
        super().__init__(section.paths, max_expansion)


def parse_conversation(raw: bytes | dict[str, Any], section: schema_data.ChatSource) -> tuple[str, Metadata]:
    """The conversation of a record as JSON, and its other fields. raw: a line of JSON, or the cells of a row."""
    conversation, metadata = conversation_of(decoded(raw) if isinstance(raw, bytes) else raw, section)
    return conversation.to_json(), metadata


def parse_pair(raw: bytes | dict[str, Any], section: schema_data.PreferencesSource) -> tuple[str, Metadata]:
    """The pair of a record as JSON, and its other fields. raw: a line of JSON, or the cells of a row."""
    pair, metadata = pair_of(decoded(raw) if isinstance(raw, bytes) else raw, section)
    return pair.to_json(), metadata
