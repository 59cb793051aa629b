"""Fields with which a record or a turn says whether it is trained on: read to one answer or refused, never ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cdrmix.data.sources.base import BadRecord

# 1 or true: the loss is on it. The names of the OpenAI and Mistral formats, axolotl, XTuner, ms-swift and others.
TRAINED = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale")
UNTRAINED = ("masked", "untrained")  # 1 or true: no loss; the first of torchtune
# Of a record, other numbers are often called a loss or a training.
OF_RECORDS = ("weight", "train", "trainable", "loss_mask", "loss_weight", *UNTRAINED)
WORDS = {
    *("weight", "weights", "train", "trained", "training", "trainable", "loss", "learn", "learnable"),
    *("mask", "masks", "masked", "masking", "ignore", "ignored", "skip", "skipped", "supervise", "supervised"),
}


def taken_from_turn(turn: dict[str, Any], number: int) -> bool | None:
    """Takes these fields out of a turn. Returns whether the turn is trained on; None: the turn does not say.

    Raises BadRecord for a value that is neither yes nor no, for fields that contradict each other, and for a field
    whose name speaks of training but is not known.
    """
    answers = {}
    for name in [*turn]:
        if name in TRAINED or name in UNTRAINED:
            answers[name] = _answer(name, turn.pop(name), f"turn {number}")
        elif WORDS & {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)}:
            raise BadRecord(
                f"turn {number} has the field {name!r}, whose meaning for the loss is not known; known are "
                f"{', '.join((*TRAINED, *UNTRAINED))} with 0 or 1. Use one of them, or give the field another name"
            )
    return _agreed(answers, f"turn {number}")


def of_record(record: Mapping[str, Any], roles: Mapping[str, str]) -> bool | None:
    """Whether a record says that it is trained on; None: it does not say. roles: names of roles, to ours.

    The field `mask` (NeMo) names the role without a loss. Raises BadRecord as `taken_from_turn`, and for a mask of
    the assistant.
    """
    answers = {name: _answer(name, record[name], "the record") for name in OF_RECORDS if record.get(name) is not None}
    mask = record.get("mask")
    if mask is not None and (not isinstance(mask, str) or roles.get(mask.lower(), "assistant") == "assistant"):
        raise BadRecord(f"its field 'mask' is {mask!r}; allowed is a role without a loss, such as 'User'")
    return _agreed(answers, "the record")


def _agreed(answers: Mapping[str, bool], where: str) -> bool | None:
    """The answer of the fields, by name; None without fields."""
    if len({*answers.values()}) > 1:
        raise BadRecord(f"the fields {', '.join(answers)} of {where} contradict each other about the loss")
    return next(iter(answers.values()), None)


def _answer(name: str, value: Any, where: str) -> bool:
    if not isinstance(value, int | float) or value not in (0, 1):
        raise BadRecord(
            f"{where} has {name} {value!r}; allowed are 1 or true, and 0 or false. A loss of another weight is not "
            "possible: set it to 0 or 1, or give the field another name if it has another meaning"
        )
    return bool(value) != (name in UNTRAINED)
