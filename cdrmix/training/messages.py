"""The messages that the processes of a run leave one another in their store: text that runs no code when it is read.

A message is JSON in which every value has a tag, so that its type is the same after the way: ["path", "runs/a"] is a
Path, ["tuple", [...]] a tuple. A tensor is its bytes in NumPy's .npy format without pickled objects. An error is the
name of a class of cdrmix.errors and its message.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdrmix import errors
from cdrmix.errors import CdrmixError
from cdrmix.json_text import parse_json

PLAIN = (type(None), bool, int, float, str)
# What data raise that `encode` did not make; the last ones for the size of an array.
NO_MESSAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, EOFError, OverflowError, MemoryError)
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def encode(item: object) -> str:
    """The message of an item: None, bool, int, float, str, Path, CdrmixError, torch.dtype, a tensor of a type that
    NumPy has, or a list, tuple or dict of such. A named tuple arrives as a tuple. Raises TypeError for another type."""
    return json.dumps(_tagged(item))


def decode(message: str | bytes) -> Any:
    """The item of a message. Raises ValueError if it is none that `encode` makes."""
    try:
        return _item(parse_json(message))
    except NO_MESSAGE as error:
        raise ValueError(f"it is no message of this package: {error}") from error


def read(message: bytes, who: str, what: str) -> Any:
    """The item of a message. who, what: whose message it is, and about what. Raises CdrmixError if it is damaged."""
    try:
        return decode(message)
    except ValueError as error:
        raise CdrmixError(f"{who} said of {what} what cannot be read: {error}") from error


def _tagged(item: object) -> Any:
    if isinstance(item, PLAIN):
        return ["plain", item]
    if isinstance(item, list | tuple):
        return ["list" if isinstance(item, list) else "tuple", [_tagged(each) for each in item]]
    if isinstance(item, dict):
        return ["dict", [[_tagged(key), _tagged(value)] for key, value in item.items()]]
    if isinstance(item, Path):
        return ["path", str(item)]
    if isinstance(item, CdrmixError):
        return ["error", [type(item).__name__, str(item)]]
    if isinstance(item, torch.dtype):
        return ["dtype", str(item)]
    if isinstance(item, torch.Tensor):
        buffer = io.BytesIO()
        np.save(buffer, item.detach().cpu().numpy(), allow_pickle=False)
        return ["tensor", base64.b64encode(buffer.getvalue()).decode("ascii")]
    raise TypeError(f"processes cannot tell each other a {type(item).__name__}")


def _item(tagged: Any) -> Any:
    tag, value = tagged
    match tag:
        case "plain" if isinstance(value, PLAIN):
            return value
        case "list":
            return [_item(each) for each in value]
        case "tuple":
            return tuple(_item(each) for each in value)
        case "dict":
            return {_item(key): _item(each) for key, each in value}
        case "path":
            return Path(value)
        case "error":
            name, message = value
            kind = getattr(errors, name)
            if not (isinstance(kind, type) and issubclass(kind, CdrmixError)):
                raise ValueError(f"{name!r} is no error of this package")
            return kind(message)
        case "dtype":
            return DTYPES[value]
        case "tensor":
            return torch.from_numpy(np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False))
    raise ValueError(f"{tag!r} is no kind of item")
