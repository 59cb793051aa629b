"""Conflicts between keys of a configuration that are valid by themselves: plain functions, a module a topic."""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.conflicts import (
    data,
    evaluation,
    huggingface,
    model,
    objectives,
    optimizer,
    parallel,
    reasoning,
    training,
)
from cdrmix.config.conflicts.conflict import Conflict
from cdrmix.config.schema_run import Sections

TOPICS = (huggingface, model, training, parallel, optimizer, reasoning, data, objectives, evaluation)


def conflicts(config: Sections) -> Iterator[Conflict]:
    """All conflicts of a configuration whose keys have valid types and ranges."""
    for topic in TOPICS:
        yield from topic.conflicts(config)
