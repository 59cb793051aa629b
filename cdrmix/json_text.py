"""JSON of files that may come from elsewhere: whatever a text holds, reading it gives data or a ValueError."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The data of a JSON text. Raises ValueError if it is none, is no UTF-8, or is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
