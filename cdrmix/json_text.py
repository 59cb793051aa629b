"""JSON of files that may come from elsewhere: whatever a text holds, reading it gives data or a ValueError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parse_json(text: str | bytes, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The data of a JSON text. Raises ValueError if it is none, is no UTF-8, or is nested too deep to be read.

    make_object: makes an object of its fields; None: a dictionary, with the last of two fields of one name.
    """
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
