"""The output of `cdrmix data inspect`: statistics of a folder of shards, and decoded rows, document by document.

Every line of text has a prefix, so that no text can imitate a line of the tool. Control characters are escaped (see
escaping.py). The prefix has the loss weight if it is not 1, and then
    |   a new line of the text
    :   continuation of the line above, after a change of the weight or a special token
    >   a special token
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from cdrmix.data.escaping import escape_unprintable
from cdrmix.data.shards import Piece, ShardSet, Split, Stratum, open_shards
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError, ShardError
from cdrmix.registry import nearest

PREFIX_WIDTH = 6  # characters of a weight
BOUNDARY, ROW, SOFT, SPECIAL, PLAIN = "\x1b[1;36m", "\x1b[1;7m", "\x1b[2m", "\x1b[35m", "\x1b[0m"


class LineFormatter:
    """Formats lines. coloured: with escape sequences, for a terminal."""

    def __init__(self, *, coloured: bool) -> None:
        self.coloured = coloured

    def line(self, style: str, text: str) -> str:
        """A line of the tool. Text of the shards in it is escaped."""
        text = escape_unprintable(text).replace("\n", "<U+000A>").replace("\t", "<U+0009>")
        return f"{style}{text}{PLAIN}" if self.coloured and style else text

    def text(self, mark: str, sign: str, text: str, style: str = "") -> str:
        """A line of the text with its prefix."""
        prefix = f"{mark:>{PREFIX_WIDTH}} {sign} "
        if not self.coloured:
            return prefix + escape_unprintable(text)
        shown = escape_unprintable(text, lambda name: f"{PLAIN}{SPECIAL}<{name}>{PLAIN}{style}")
        return f"{SOFT}{prefix}{PLAIN}{style}{shown}{PLAIN if style else ''}"


def inspect(
    folder: Path, *, split: str, row: int | None, rows: int, domain: str | None, coloured: bool
) -> Iterator[str]:
    """Yields lines: statistics of the shards in `folder`, then `rows` rows of a split from `row` on (fewer at its end).

    row: None: the first row. domain: only rows of this domain; None: all. The sizes of all files are verified, but not
    their hashes, because that would read the whole corpus.

    Raises ShardError (no shards, damaged shards), ConfigError (no such row, no such domain).
    """
    shards = _open(folder)
    tokenizer = shards.tokenizer
    chosen = {"train": shards.train, "valid": shards.valid}[split]
    numbers = _numbers(chosen, row, domain)
    formatter = LineFormatter(coloured=coloured)
    yield from _header(shards, formatter)
    for number in islice(numbers, rows):
        yield ""
        try:
            yield from _row(chosen, tokenizer, number, formatter)
        except (IndexError, ValueError) as error:
            raise ShardError(
                f"{folder} is corrupt at row {number} of {split}: {error}. Delete the folder; it is then prepared "
                "again."
            ) from error


def _open(folder: Path) -> ShardSet:
    inside = sorted(path.parent for path in folder.glob("*/index.json"))
    if inside and not (folder / "index.json").exists():
        raise ShardError(f"{folder} has no shards itself, but {', '.join(map(str, inside))}; name one of these")
    return open_shards(folder, verify=False)


def _numbers(split: Split, row: int | None, domain: str | None) -> Iterator[int]:
    """The numbers of the selected rows."""
    strata = [stratum for stratum in split.strata if stratum.rows and domain in (None, stratum.domain)]
    if not strata:
        known = list(dict.fromkeys(stratum.domain for stratum in split.strata if stratum.rows))
        close = nearest(domain or "", known)
        hint = f" Did you mean {close!r}?" if close else ""
        raise ConfigError(
            f"--domain: {split.name} has no rows of {domain!r}; its domains: {', '.join(map(repr, known))}.{hint}"
        )
    first = strata[0].first_row if row is None else row
    if not any(stratum.first_row <= first < stratum.first_row + stratum.rows for stratum in strata):
        spans = ", ".join(_span(stratum) for stratum in _joined(strata))
        of = f" of domain {domain!r}" if domain else ""
        raise ConfigError(f"--row: {split.name} has no row {first}{of}; allowed: {spans}")
    return (
        number
        for stratum in strata
        for number in range(max(first, stratum.first_row), stratum.first_row + stratum.rows)
    )


def _joined(strata: Sequence[Stratum]) -> list[Stratum]:
    """Adjacent strata joined to one."""
    joined: list[Stratum] = []
    for stratum in strata:
        if joined and joined[-1].first_row + joined[-1].rows == stratum.first_row:
            joined[-1] = joined[-1]._replace(rows=joined[-1].rows + stratum.rows)
        else:
            joined.append(stratum)
    return joined


def _span(stratum: Stratum) -> str:
    return f"{stratum.first_row} to {stratum.first_row + stratum.rows - 1}"


def _header(shards: ShardSet, formatter: LineFormatter) -> Iterator[str]:
    report = shards.report
    yield formatter.line(ROW, f"Shards in {shards.path}")
    tokenizer = f"{report['tokenizer_ids']:,} ids of {shards.vocab_size:,}, end of text {shards.end_of_text!r}"
    if shards.tokenizer.begin_of_text is not None:
        tokenizer += f", begin of text {shards.tokenizer.begin_of_text!r}"
    for name, value in (
        ("fingerprint", shards.fingerprint),
        ("content key", shards.key),
        ("tokenizer", f"{tokenizer}, fingerprint {shards.tokenizer_fingerprint}"),
        ("text", f"{report['text_bytes']:,} bytes, {report['bytes_per_token']:.2f} a token"),
        ("rows", f"{shards.train.row_length:,} positions, {report['padding_share']:.1%} filling"),
    ):
        yield formatter.line("", f"{name:<12} {value}")
    head = ("split", "domain", "length class", "rows", "documents", "tokens", "numbers of the rows")
    lines: list[tuple[str, ...]] = [head]
    for split in (shards.train, shards.valid):
        lines += [
            (
                split.name,
                stratum.domain,
                str(stratum.length_class),
                *(f"{count:,}" for count in (stratum.rows, stratum.documents, stratum.tokens)),
                _span(stratum),
            )
            for stratum in split.strata
            if stratum.rows
        ]
    lines = [tuple(escape_unprintable(cell) for cell in line) for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for number, line in enumerate(lines):
        cells = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        yield formatter.line(SOFT if number == 0 else "", "  ".join(cells))


def _row(split: Split, tokenizer: TextTokenizer, row: int, formatter: LineFormatter) -> Iterator[str]:
    starts, lengths = (array.tolist() for array in split.segments(row))
    if any(
        not (start >= 0 and 0 < length <= split.row_length and start + length < split.tokens)
        for start, length in zip(starts, lengths, strict=True)
    ):
        raise ValueError("a segment lies outside the tokens")
    stratum = next(stratum for stratum in split.strata if stratum.first_row <= row < stratum.first_row + stratum.rows)
    yield formatter.line(
        ROW,
        f"Row {row} of {split.name}: domain {stratum.domain}, length class {stratum.length_class}, "
        f"{len(starts)} {'segment' if len(starts) == 1 else 'segments'}, "
        f"{sum(lengths):,} of {split.row_length:,} positions",
    )
    for piece in split.pieces(row):
        yield formatter.line(BOUNDARY, _begin(piece))
        yield from _targets(split, tokenizer, piece.start, piece.tokens, formatter)
        yield formatter.line(BOUNDARY, _end(piece))


def _begin(piece: Piece) -> str:
    where = "begins" if piece.offset == 0 else f"goes on from token {piece.offset:,}"
    tokens = f"{piece.tokens:,} of {piece.document_tokens:,} tokens"
    return f"=== document {piece.document} {where} ({piece.domain}, {tokens}) ==="


def _end(piece: Piece) -> str:
    stop = piece.offset + piece.tokens
    where = "ends" if stop == piece.document_tokens else f"is cut before token {stop:,}; the rest is in another row"
    return f"=== document {piece.document} {where} ==="


def _targets(
    split: Split, tokenizer: TextTokenizer, start: int, length: int, formatter: LineFormatter
) -> Iterator[str]:
    """The targets after the token `start`, line by line, cut at changes of the loss weight and at special tokens."""
    sizes = split.token_byte_lengths()
    ids = split.read(start + 1, start + 1 + length).tolist()
    weights = np.ones(length, np.float32)
    if split.weighted:
        split.copy_weights(np.array([start]), np.array([length]), np.array([0]), weights)
    position, goes_on = 0, False
    kinds = zip(weights.tolist(), (token >= len(sizes) or not sizes[token] for token in ids), strict=True)
    for (weight, special), run in groupby(kinds):
        count = sum(1 for _ in run)
        tokens = ids[position : position + count]
        position += count
        mark = "" if weight == 1 else f"{weight:.4g}"
        if special:
            for token in tokens:
                name = tokenizer.decode_with_special_tokens([token]) or f"id {token}, which the tokenizer does not know"
                yield formatter.text(mark, ">", name.replace("\n", "<U+000A>"), SPECIAL)
            goes_on = True
            continue
        text = tokenizer.decode_with_special_tokens(tokens)
        for line in text.removesuffix("\n").split("\n"):
            yield formatter.text(mark, ":" if goes_on else "|", line)
            goes_on = False
        goes_on = not text.endswith("\n")
