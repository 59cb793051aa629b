"""Reading of a table of losses, as CSV or JSON lines: the rungs of a ladder, and the rung to forecast."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.errors import ConfigError
from cdrmix.json_text import parse_json
from cdrmix.ladder.forecast import Forecast, Rung, forecast
from cdrmix.registry import nearest

COLUMNS = ("name", "compute", "loss", "seed", "parameters", "tokens")
MAX_BYTES = 10_000_000


class Row(NamedTuple):
    """One line of the table. where: file and line, for messages."""

    where: str
    name: str
    compute: float
    loss: float | None
    parameters: float | None
    tokens: float | None


def forecast_of_table(path: Path, target: str | None = None) -> Forecast:
    """The forecast of one rung of a table of losses.

    Args:
        path: a file .csv with a header or .jsonl with an object a line. Columns: compute (operations of the training),
            loss (nats per token; empty or null for a rung that is not trained yet), and optionally name, seed,
            parameters, tokens. Lines with one name are the seeds of one rung.
        target: the name of the rung to forecast; None: that with the most operations.

    Raises:
        ConfigError: with file and line for what cannot be read.
    """
    rows = [_row(where, cells) for where, cells in _lines(path)]
    if not rows:
        raise ConfigError(f"{path}: no rows; allowed: a line for each rung, with compute and loss")
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    for same in by_name.values():
        for row in same[1:]:
            if row.compute != same[0].compute:
                raise ConfigError(
                    f"{row.where}: compute: found {row.compute:g}; allowed: {same[0].compute:g}, as in "
                    f"{same[0].where}, because both are {row.name}"
                )
    if target is None:
        target = max(by_name, key=lambda name: by_name[name][0].compute)
    elif target not in by_name:
        close = nearest(target, by_name)
        hint = f"; did you mean {close}?" if close else ""
        raise ConfigError(f"{path} has no rung {target}; it has {', '.join(by_name)}{hint}")
    rungs = {name: rung for name, same in by_name.items() if (rung := _rung(name, same)) is not None}
    measured = rungs[target].loss if target in rungs else None
    others = [rung for name, rung in rungs.items() if name != target]
    return forecast(others, target, by_name[target][0].compute, measured)


def _rung(name: str, rows: list[Row]) -> Rung | None:
    losses = tuple(row.loss for row in rows if row.loss is not None)
    return Rung(name, rows[0].compute, losses, rows[0].parameters, rows[0].tokens) if losses else None


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, cells) of each line that is not blank."""
    if path.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"{path}: the name of a table of losses ends in .csv or .jsonl")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: too large for a table of losses; at most {MAX_BYTES} bytes")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    if path.suffix == ".csv":
        reader = csv.DictReader(text.splitlines(), strict=True)
        try:
            for cells in reader:
                where = f"{path}:{reader.line_num}"
                if None in cells or None in cells.values():
                    raise ConfigError(f"{where}: not as many cells as the header, {', '.join(reader.fieldnames or ())}")
                yield where, {key.strip(): value.strip() or None for key, value in cells.items()}
        except csv.Error as error:
            raise ConfigError(f"{path}:{reader.line_num}: not valid CSV: {error}") from error
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            cells = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not valid JSON") from error
        if not isinstance(cells, dict):
            raise ConfigError(f"{path}:{number}: not a JSON object")
        yield f"{path}:{number}", cells


def _row(where: str, cells: dict[str, Any]) -> Row:
    for key in cells:
        if key not in COLUMNS:
            close = nearest(key, COLUMNS)
            hint = f"; did you mean {close}?" if close else ""
            raise ConfigError(f"{where}: unknown column {key!r}; allowed: {', '.join(COLUMNS)}{hint}")
    compute = _number(where, cells, "compute")
    if compute is None:
        raise ConfigError(f"{where}: compute: missing; allowed: a number above 0, the operations of the training")
    name = cells.get("name")
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"{where}: name: found {name!r}; allowed: a string that is not empty")
    loss, parameters, tokens = (_number(where, cells, key) for key in ("loss", "parameters", "tokens"))
    return Row(where, name or f"{compute:.3g}", compute, loss, parameters, tokens)


def _number(where: str, cells: dict[str, Any], key: str) -> float | None:
    """The number of a cell, or None for an empty cell."""
    cell = cells.get(key)
    if cell is None:
        return None
    try:
        value = math.nan if isinstance(cell, bool | list | dict) else float(cell)
    except (ValueError, OverflowError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{where}: {key}: found {cell!r}; allowed: a finite number above 0")
    return value
