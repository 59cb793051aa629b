"""The text among which generated tasks hide their facts: one part for training, another for the evaluation."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import NamedTuple

from cdrmix.config import schema_data
from cdrmix.config.schema_reasoning import EpisodesOfDocuments
from cdrmix.data.sources import make_source
from cdrmix.data.sources.base import BadRecords
from cdrmix.data.tasks import Filler
from cdrmix.errors import CorpusError

LOGGER = logging.getLogger(__name__)
CHARACTERS = 20_000_000  # that are kept in memory
HELD_OUT = 10  # the last 1/10 of the sentences is for the evaluation
MAX_BAD_RECORDS = 100


class Fillers(NamedTuple):
    """The sentences for training, and those for the evaluation."""

    train: Filler
    held_out: Filler


def fillers_of(section: schema_data.Source | None) -> Fillers | None:
    """The text of a source, read once in a process; None without a source.

    Raises CorpusError if the source cannot be read or has fewer than two sentences.
    """
    return None if section is None else _read(EpisodesOfDocuments(filler=section).model_dump_json())


@lru_cache(maxsize=2)
def _read(json: str) -> Fillers:
    """json: a section with the filler; an object of the configuration is no key of a cache."""
    section = EpisodesOfDocuments.model_validate_json(json).filler
    assert section is not None
    source = make_source(section)
    texts = (document.text for document in source.documents(BadRecords(MAX_BAD_RECORDS, LOGGER.warning)))
    try:
        sentences = Filler(texts, CHARACTERS).sentences
    except ValueError:
        sentences = []
    if len(sentences) < 2:
        raise CorpusError(f"the filler, {source.describe()}, has {len(sentences)} sentences; give more text")
    first_held_out = len(sentences) - max(1, len(sentences) // HELD_OUT)
    return Fillers(Filler(sentences[:first_held_out]), Filler(sentences[first_held_out:]))
