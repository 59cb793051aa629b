"""Writes csrc/unicode_tables.hpp from the running Python's str methods: `python3.11 csrc/make_unicode_tables.py`.

The tables are committed, so that a preparation's result does not depend on the Python that runs it. Only a Python with
the Unicode version below can write them (3.11 has it).
"""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

UNICODE_VERSION = "14.0.0"
CODE_POINTS = 0x110000
PROPERTIES = ("WORD", "ALPHABETIC", "SPACE", "NUMERIC", "CASED", "CASE_IGNORABLE", "UPPER", "PUNCTUATION")
CAPITAL_SIGMA = "\u03a3"
FINAL_SIGMA = "\u03c2"


def properties(character: str) -> int:
    """The bits of PROPERTIES of a character; see unicode.hpp for their meaning.

    Whether a character is cased or case-ignorable shows in Python only in how a capital sigma after it is lowered.
    """
    alone = (character + CAPITAL_SIGMA).lower()[-1] == FINAL_SIGMA
    after_letter = ("A" + character + CAPITAL_SIGMA).lower()[-1] == FINAL_SIGMA
    found = (
        character.isalnum() or character == "_",
        character.isalpha(),
        character.isspace(),
        character.isnumeric(),
        alone,
        after_letter and not alone,
        character.isupper(),
        unicodedata.category(character).startswith("P"),
    )
    return sum(present << bit for bit, present in enumerate(found))


def difference_to_lower(character: str) -> int:
    """The difference of the lower case's code point; for U+0130, whose lower case is two, that of the first."""
    return ord(character.lower()[0]) - ord(character)


def records() -> tuple[list[tuple[int, int]], list[int]]:
    """The distinct (properties, difference), the empty one first, and for every code point the index of its record."""
    distinct = {(0, 0): 0}
    indices = [
        distinct.setdefault((properties(character), difference_to_lower(character)), len(distinct))
        for character in map(chr, range(CODE_POINTS))
    ]
    return list(distinct), indices


def two_levels(indices: list[int], bits: int) -> tuple[list[int], list[int]]:
    """`indices` split into blocks of 2^bits: the number of each block, and the distinct blocks, concatenated."""
    size = 1 << bits
    distinct: dict[tuple[int, ...], int] = {}
    first = [
        distinct.setdefault(tuple(indices[start : start + size]), len(distinct))
        for start in range(0, len(indices), size)
    ]
    return first, [index for block in distinct for index in block]


def array(kind: str, name: str, values: list[str]) -> str:
    """A C++ array, in lines of at most 120 characters."""
    lines, line = [], "   "
    for value in values:
        if len(line) + len(value) + 2 > 120:
            lines.append(line)
            line = "   "
        line += f" {value},"
    body = "\n".join([*lines, line])
    return f"constexpr {kind} {name}[{len(values)}] = {{\n{body}\n}};\n"


def main() -> None:
    if unicodedata.unidata_version != UNICODE_VERSION:
        sys.exit(f"This Python has Unicode {unicodedata.unidata_version}; the tables are of {UNICODE_VERSION}")
    distinct, indices = records()
    assert len(distinct) <= 256, "an index must fit a byte"
    bits = min(range(4, 10), key=lambda bits: sum(len(part) for part in two_levels(indices, bits)))
    blocks, members = two_levels(indices, bits)
    assert max(blocks) < 2**16, "a block's number must fit two bytes"
    text = f"""\
// Tables of unicode.hpp for Unicode {UNICODE_VERSION}, written by make_unicode_tables.py.
#pragma once

#include <cstdint>

namespace cdrmix::unicode::tables {{

constexpr unsigned BLOCK_BITS = {bits};

struct Record {{
    std::uint8_t properties;
    std::int32_t to_lower;  // added to the code point
}};

{array("Record", "RECORDS", [f"{{{bits_set}, {difference}}}" for bits_set, difference in distinct])}
// Of code point c, RECORD_OF[BLOCK_OF[c >> BLOCK_BITS] << BLOCK_BITS | (c & ((1 << BLOCK_BITS) - 1))] is the record.
{array("std::uint16_t", "BLOCK_OF", [str(block) for block in blocks])}
{array("std::uint8_t", "RECORD_OF", [str(member) for member in members])}
}}  // namespace cdrmix::unicode::tables
"""
    (Path(__file__).parent / "unicode_tables.hpp").write_text(text)


if __name__ == "__main__":
    main()
