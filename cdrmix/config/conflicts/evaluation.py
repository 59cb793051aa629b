"""Conflicts in the section `evaluation`: names of suites, steps and sampling."""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.conflicts.conflict import Conflict, unknown_name
from cdrmix.config.schema_run import Sections


def conflicts(config: Sections) -> Iterator[Conflict]:
    section, period = config.evaluation, config.train.checkpoint_every
    for place, name in enumerate(section.suites):
        if unknown := unknown_name("evaluation.suites", "suite", name, (place,)):
            yield unknown
            break
        if name in section.suites[:place]:
            yield Conflict("evaluation.suites", "each suite once", (place,))
            break
    if section.every is not None and section.every % period:
        yield Conflict("evaluation.every", f"null, or a multiple of train.checkpoint_every={period}")
    if section.samples > 1 and section.temperature == 0:
        why = "at 0 all samples of a problem are the same"
        yield Conflict("evaluation.temperature", f"above 0 with evaluation.samples={section.samples}: {why}")
