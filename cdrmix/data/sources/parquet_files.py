"""Parquet files: their rows as the values that JSON lines would give, in bounded memory.

A struct has the fields of all rows, null where a row has none. So a null field of a struct, and a null column of a row
of `parquet_rows`, are left out. Fields of a map are a row's own and stay.

Memory. A dictionary can make gigabytes of a few bytes: rows then are numbers of one long value. So the texts of
`parquet_rows` stay numbers until a row is converted, and batches of `text_rows` are the shorter, the longer the values
of the dictionaries are. What a file expands to is bounded as for compressed files.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.data.sources import files
from cdrmix.data.sources.base import Record, check_once, invalid_utf8, missing_column, over_long_message
from cdrmix.data.sources.files import ExpansionError, StoredFile, expansion_limit, reading
from cdrmix.errors import CorpusError

Array = np.ndarray[Any, np.dtype[Any]]

BATCH_BYTES = 2**22  # approximate bytes of a file that are converted to Python objects at a time
DENSE_BYTES = 2**26  # most bytes of the longest values of a batch, apart from one row
CELL_BYTES = 8  # of any cell of a table, so that rows without text count too


def text_rows(path: StoredFile, text_field: str, max_expansion: int) -> Iterator[Record]:
    """The rows of a file. raw: the text as bytes or None, and the other columns of scalars and structs of scalars.

    A row of invalid UTF-8 does not affect other rows: the text is given as bytes, and invalid bytes of other columns
    are replaced. Raises CorpusError without a column of strings of this name.
    """
    import pyarrow

    row = 0
    with reading(path):
        try:
            with parquet_file(path) as table, parquet_file(path, as_numbers=True) as numbers:
                others = _checked_columns(path, table.schema_arrow, text_field)
                names = [text_field, *others]
                bound = _Bound(path, table.metadata, max_expansion)
                for group in range(table.num_row_groups):
                    rows = _dense_rows(table.metadata, group, _longest_number(numbers, group, names))
                    for batch in table.iter_batches(rows, [group], names, use_threads=False):
                        bound.add(batch)
                        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                        texts = columns[text_field].cast(pyarrow.large_binary()).to_pylist()
                        cells = {name: _cells(columns[name]) for name in others}
                        for index, text in enumerate(texts):
                            row += 1
                            metadata = {name: of[index] for name, of in cells.items() if of[index] is not None}
                            size = len(text or b"") + sum(map(len, filter(_is_string, metadata.values())))
                            yield Record(row, (text, metadata), size)
        except (pyarrow.ArrowException, OSError, ExpansionError, UnicodeDecodeError) as error:
            yield Record(row + 1, error=_damage(error))


def _checked_columns(path: StoredFile, columns: Any, text_field: str) -> list[str]:
    """The columns of a file that are metadata. Raises CorpusError without one column of strings `text_field`."""
    if text_field not in columns.names:
        raise missing_column(text_field, str(path), columns.names)
    check_once(text_field, str(path), columns.names)
    found = columns.field(text_field).type
    if not is_text(found):
        raise CorpusError(
            f"data.source.text_field={text_field!r}: column of {path} holds {found}, not strings; "
            f"its columns are: {', '.join(columns.names)}"
        )
    names = [field.name for field in columns if field.name != text_field and is_metadata(field.type)]
    return list(dict.fromkeys(names))


def parquet_rows(path: StoredFile, asked: Collection[str], max_expansion: int) -> Iterator[Record]:
    """The rows of a file as mappings from the names of columns, also nested ones, to JSON values.

    asked: columns that are needed. Others with binary data, such as images, are not read. Raises CorpusError if a name
    of `asked` is that of two columns.
    """
    import pyarrow

    row = 0
    with reading(path):
        try:
            with parquet_file(path) as table, parquet_file(path, as_numbers=True) as numbers:
                for name in asked:
                    check_once(name, str(path), table.schema_arrow.names)
                names = [field.name for field in table.schema_arrow if field.name in asked or _is_json(field.type)]
                bound = _Bound(path, table.metadata, max_expansion)
                for group in range(table.num_row_groups):
                    can_be_numbers = _longest_number(numbers, group, names) is not None
                    rows = batch_rows(table.metadata) if can_be_numbers else _dense_rows(table.metadata, group, None)
                    reader = numbers if can_be_numbers else table
                    for batch in reader.iter_batches(rows, [group], names, use_threads=False):
                        for index, size in enumerate(bound.add(batch).tolist()):
                            row += 1
                            yield _row(batch.slice(index, 1), row, size)
        except (pyarrow.ArrowException, OSError, ExpansionError, UnicodeDecodeError) as error:
            yield Record(row + 1, error=_damage(error))


def _row(batch: Any, number: int, size: int) -> Record:
    """The record of a batch of one row."""
    if size > files.MAX_RECORD_BYTES + CELL_BYTES * batch.num_columns:
        return Record(number, error=over_long_message())
    try:
        cells = {
            field.name: json_value(column[0].as_py(), field.type)
            for field, column in zip(batch.schema, batch.columns, strict=True)
        }
    except UnicodeDecodeError as error:
        return Record(number, error=invalid_utf8(error))
    except ValueError as error:  # a struct with two fields of one name, a date outside of Python's years
        return Record(number, error=f"cannot be read: {error}")
    return Record(number, {name: cell for name, cell in cells.items() if cell is not None}, size)


@contextmanager
def parquet_file(path: StoredFile, *, as_numbers: bool = False) -> Iterator[Any]:
    """A pyarrow.parquet.ParquetFile. as_numbers: its texts are dictionary arrays, which not all encodings allow."""
    import pyarrow.parquet

    # pre_buffer would hold whole row groups; a bounded buffer streams them. Over a network, requests are larger.
    options: dict[str, Any] = {"pre_buffer": False, "buffer_size": 2**20 if isinstance(path, Path) else 2**23}
    with path.open("rb") as stream:
        if as_numbers:
            metadata = pyarrow.parquet.read_metadata(stream)
            columns = map(metadata.schema.column, range(metadata.num_columns))
            texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
            options |= {"read_dictionary": texts, "metadata": metadata}
        with pyarrow.parquet.ParquetFile(stream, **options) as table:
            yield table


class _Bound:
    """Counts what a file expands to. Raises ExpansionError above the limit."""

    def __init__(self, path: StoredFile, metadata: Any, max_expansion: int) -> None:
        self._left, self._max_expansion = expansion_limit(path, max_expansion), max_expansion
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        if sum(group.total_byte_size for group in groups) > self._left:  # before a page is decompressed
            raise ExpansionError(max_expansion)

    def add(self, batch: Any) -> Array:
        """Counts the bytes of the rows of a batch, and returns them: int64 [rows]."""
        # A list of nulls takes no bytes in the file: the sizes of its values, one by one, could fill the memory.
        if CELL_BYTES * sum(map(_values_in, batch.columns)) > self._left:
            raise ExpansionError(self._max_expansion)
        sizes = _row_bytes(batch)
        self._left -= int(sizes.sum())
        if self._left < 0:
            raise ExpansionError(self._max_expansion)
        return sizes


def _longest_number(numbers: Any, group: int, names: list[str]) -> int | None:
    """The length in bytes of the longest values of the dictionaries of a row group, for one row; None without them.

    numbers: the file, with texts as dictionary arrays. Dictionaries are read with the first row. The metadata of
    columns, which has the encodings, is not used: pyarrow ends the process if it is damaged.
    """
    import pyarrow

    try:
        batch = next(numbers.iter_batches(1, [group], names, use_threads=False), None)
    except (pyarrow.ArrowException, OSError):  # an encoding without numbers; a damaged group is read again
        return None
    return sum(map(_longest, batch.columns)) if batch else 0


def _dense_rows(metadata: Any, group: int, longest: int | None) -> int:
    """Rows of a batch whose texts are not numbers: fewer, the longer the values of the dictionaries are.

    longest: of `_longest_number`. None: in some encodings a value begins with the one before, so it can be as long as
    all pages.
    """
    if longest is None:
        longest = metadata.row_group(group).total_byte_size
    return max(1, min(batch_rows(metadata), DENSE_BYTES // max(longest, 1)))


def batch_rows(metadata: Any) -> int:
    """Rows of a batch of about BATCH_BYTES, by the sizes in the metadata of a file."""
    size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return max(1, min(256, BATCH_BYTES * metadata.num_rows // max(size, 1)))


def _damage(error: Exception) -> str:
    """The message for a file that cannot be read on. Raises the error if it is one of the operating system."""
    if isinstance(error, ExpansionError):
        return str(error)
    # pyarrow raises OSError without a number for a damaged page
    if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
        raise error
    return f"is not readable Parquet: {error}"


def _longest(array: Any) -> int:
    """The length in bytes of the longest value of the dictionaries of an array."""
    import pyarrow.compute
    from pyarrow import types

    if types.is_struct(array.type):
        return sum(map(_longest, array.flatten()))
    if not types.is_dictionary(array.type) or not _is_binary(array.type.value_type):
        return 0
    return pyarrow.compute.max(pyarrow.compute.binary_length(array.dictionary)).as_py() or 0


def _row_bytes(batch: Any) -> Array:
    """int64 [rows]: the bytes of the values of each row, at least CELL_BYTES for each cell."""
    sizes = np.zeros(len(batch), np.int64)
    for column in batch.columns:
        sizes += np.maximum(_bytes_of(column), CELL_BYTES)
    return sizes


def _values_in(array: Any) -> int:
    """How many values the lists of an array have, at all depths."""
    import pyarrow
    from pyarrow import types

    kind = array.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _values_in(array.storage)
    if types.is_struct(kind):
        return sum(map(_values_in, array.flatten()))
    if types.is_map(kind):
        return len(array.keys) + _values_in(array.keys) + _values_in(array.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return len(array.values) + _values_in(array.values)
    return 0


def _bytes_of(array: Any) -> Array:
    """int64: the bytes of each value of an array, of nested values and of the values of its dictionaries too. A value
    in a list has at least CELL_BYTES, for it is an object of its own, be it null or empty."""
    import pyarrow.compute
    from pyarrow import types

    kind = array.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _bytes_of(array.storage)
    if types.is_dictionary(kind):
        lengths = np.append(_bytes_of(array.dictionary), 0)
        return np.asarray(lengths[array.indices.cast("int64").fill_null(len(lengths) - 1).to_numpy()])
    if _is_binary(kind):
        if types.is_string_view(kind) or types.is_binary_view(kind):  # of which pyarrow does not give the lengths
            array = array.cast(pyarrow.large_binary())
        return np.asarray(
            pyarrow.compute.binary_length(array).cast("int64").fill_null(0).to_numpy(zero_copy_only=False)
        )
    if types.is_struct(kind):
        return np.asarray(sum(map(_bytes_of, array.flatten()), np.zeros(len(array), np.int64)))
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        values = [array.keys, array.items] if types.is_map(kind) else [array.values]
        sizes = np.maximum(sum(map(_bytes_of, values), np.zeros(len(values[0]), np.int64)), CELL_BYTES)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        return np.asarray(np.diff(ends[array.offsets.to_numpy()]))
    if types.is_fixed_size_list(kind):
        length = kind.list_size * len(array)
        values = array.values.slice(array.offset * kind.list_size, length)
        sizes = np.maximum(_bytes_of(values), CELL_BYTES)
        return np.asarray(sizes.reshape(len(array), kind.list_size).sum(axis=1))
    return np.full(len(array), CELL_BYTES, np.int64)


def json_value(value: Any, kind: Any) -> Any:
    """A Python value of an Arrow type as a JSON value.

    Binary data give None, dates and times their ISO 8601 text, and values of types without a form in JSON theirs.
    """
    from pyarrow import types

    if value is None or isinstance(value, bytes):
        return None
    if isinstance(value, dict):
        fields = {kind.field(number).name: kind.field(number).type for number in range(kind.num_fields)}
        return {name: json_value(value[name], of) for name, of in fields.items() if value[name] is not None}
    if types.is_map(kind):
        return {str(name): json_value(item, kind.item_type) for name, item in value}
    if isinstance(value, list):
        return [json_value(item, kind.value_type) for item in value]
    if isinstance(value, datetime.date | datetime.time):  # also datetime.datetime
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return float(value)
    return value if isinstance(value, str | int | float) else str(value)


def is_text(found: Any) -> bool:
    """Whether an Arrow type is a string type."""
    from pyarrow import types

    value = found.value_type if types.is_dictionary(found) else found
    return bool(types.is_string(value) or types.is_large_string(value) or types.is_string_view(value))


def is_metadata(found: Any) -> bool:
    """Whether values of an Arrow type can be metadata: strings, numbers, booleans, and structs of them."""
    from pyarrow import types

    if types.is_struct(found):
        return all(is_metadata(found.field(number).type) for number in range(found.num_fields))
    return is_text(found) or types.is_integer(found) or types.is_floating(found) or types.is_boolean(found)


def _is_binary(found: Any) -> bool:
    """Whether values of an Arrow type are strings or bytes."""
    from pyarrow import types

    return is_text(found) or types.is_binary(found) or types.is_large_binary(found) or types.is_binary_view(found)


def _is_json(found: Any) -> bool:
    """Whether values of an Arrow type, at any depth, have a form in JSON."""
    from pyarrow import types

    if types.is_dictionary(found):
        found = found.value_type
    if types.is_nested(found):
        return all(_is_json(found.field(number).type) for number in range(found.num_fields))
    return is_text(found) or not (_is_binary(found) or types.is_fixed_size_binary(found))


def _cells(column: Any) -> list[Any]:
    """A column as JSON values. Invalid UTF-8 is replaced by replacement characters."""
    import pyarrow

    if is_text(column.type):
        values = column.cast(pyarrow.large_binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", errors="replace") for value in values]
    if pyarrow.types.is_struct(column.type):
        names = column.type.names
        rows = zip(*map(_cells, column.flatten()), strict=True)
        given = column.is_valid().to_pylist()
        return [
            {name: cell for name, cell in zip(names, row, strict=True) if cell is not None} if valid else None
            for row, valid in zip(rows, given, strict=True)
        ]
    return list(column.to_pylist())


def _is_string(value: Any) -> bool:
    return isinstance(value, str)
