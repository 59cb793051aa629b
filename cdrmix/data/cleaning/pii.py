"""Personal data and secrets in text, replaced by placeholders such as <EMAIL>.

csrc/personal.hpp finds candidates by their form. This module validates each of them: the domain of an e-mail address
must exist, an IP address must be public, a card number must pass the Luhn check, an IBAN must have valid check digits,
a key must look random. Doubtful candidates are kept, because numbers in code, versions and section numbers are far more
frequent in text than personal data of the same form.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from cdrmix import _text
from cdrmix.data.cleaning.urls import is_known_domain

PLACEHOLDERS = {
    "email": "<EMAIL>",
    "phone": "<PHONE>",
    "ip": "<IP>",
    "credit_card": "<CREDIT_CARD>",
    "iban": "<IBAN>",
    "secret": "<SECRET>",
}

PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----(?:[^-]|-(?!----))*"
    r"-----END (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----"
)
# The text before a version or a section number: `version 1.2.3.4`, `Chrome/1.2.3.4`, `package-1.2.3.4`.
BEFORE_VERSION = re.compile(
    rb"(?:\b(?:v|ver|vers|versions?|releases?|rev|revision|build|firmware|drivers?|sections?|sec|sect|chapters?|clauses?"
    rb"|rfc|figure|fig|table|step|oid|paragraph|appendix|annex)[\"']?[.:=]?[\s(\"'`]*|\xc2\xa7\s*|[=<>~!]=\s*|[~^]\s*|\w/|[\w.#-])\Z",
    re.IGNORECASE,
)
NETWORK = re.compile(
    rb"\b(?:ipv?4?|addr|addresse?s?|hosts?|servers?|nameservers?|dns|ping|resolvers?|gateways?|prox(?:y|ies)|clients?|tcp"
    rb"|udp|https?|ssh|listen\w*|connect\w*|routers?|netmask|subnets?)\b",
    re.IGNORECASE,
)
# Visa, Mastercard, American Express, Diners Club, Discover, JCB, UnionPay: first digits and usual lengths.
CARD = re.compile(
    rb"4\d{15}|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}"
    rb"|3(?:0[0-5]|[68]\d)\d{11}|6(?:011|4[4-9]\d|5\d\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|62\d{14}(?:\d{3})?"
)
# Lengths of the national accounts' numbers, from the IBAN registry (SWIFT, release 97).
IBAN_LENGTHS = {
    country: length
    for length, countries in {
        15: "NO", 16: "BE", 18: "DK FI FK FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK", 21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL", 24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM", 28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
        29: "BR EG PS QA UA", 30: "JO KW MU YE", 31: "MT SC", 32: "LC", 33: "RU",
    }.items()
    for country in countries.split()
}  # fmt: skip
# Keys with a prefix that their issuers document.
KEY = re.compile(
    rb"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AIza[\w-]{35}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{36,}"
    rb"|glpat-[\w-]{20,}|xox[abeoprs]-[\w-]{16,}|sk-[\w-]{20,}|(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}"
    rb"|SG\.[\w-]{16,}\.[\w-]{16,}|ya29\.[\w-]{20,}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|hf_[A-Za-z0-9]{30,}"
    rb"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"
)
BEFORE_SECRET = re.compile(
    rb"(?:api[_-]?key|secret|token|passw(?:or)?d|passphrase|credential|access[_-]?key|auth[_-]?key|private[_-]?key"
    rb"|client[_-]?key)\w*[\"'`\]]{0,2}[ \t]*(?::|=|:=|=>)[ \t]*[\"'`]?\Z",
    re.IGNORECASE,
)
ASSIGNED = re.compile(rb"[\w+/-]{20,}={0,2}")


class Candidate(NamedTuple):
    """Bytes data[begin:end] of a text in UTF-8."""

    data: bytes
    begin: int
    end: int

    @property
    def value(self) -> bytes:
        return self.data[self.begin : self.end]

    def before(self, size: int) -> bytes:
        """At most `size` bytes before the candidate."""
        return self.data[max(0, self.begin - size) : self.begin]


def scrub(text: str, kinds: Collection[str]) -> tuple[str, dict[str, int]]:
    """The text with placeholders for personal data of the given kinds, and the number of replacements of each kind.

    kinds: keys of PLACEHOLDERS. Raises ValueError for other values. The function is idempotent.
    """
    _check_kinds(kinds)
    counts: Counter[str] = Counter()
    if "secret" in kinds and "PRIVATE KEY" in text:
        text, number = PRIVATE_KEY.subn(PLACEHOLDERS["secret"], text)
        counts["secret"] += number
    while True:
        text, replaced = _replaced(text, kinds)
        if not replaced:
            return text, {kind: number for kind, number in counts.items() if number}
        counts += replaced  # repeat: a replaced candidate may have hidden one next to it


def find(text: str, kinds: Collection[str]) -> list[tuple[str, str]]:
    """(kind, value) of the personal data that `scrub` replaces first, in order, private keys first.

    Raises ValueError for other kinds than keys of PLACEHOLDERS.
    """
    _check_kinds(kinds)
    found = [("secret", match[0]) for match in PRIVATE_KEY.finditer(text)] if "secret" in kinds else []
    data = text.encode()
    return found + [(kind, data[begin:end].decode()) for kind, begin, end in _found(text, data, kinds)]


def _check_kinds(kinds: Collection[str]) -> None:
    if unknown := set(kinds) - PLACEHOLDERS.keys():
        raise ValueError(f"unknown kinds of personal data {sorted(unknown)}; known: {', '.join(PLACEHOLDERS)}")


def _found(text: str, data: bytes, kinds: Collection[str]) -> Iterator[tuple[str, int, int]]:
    """(kind, begin, end) in data, the text in UTF-8, of what is valid, in order and without overlaps."""
    done = 0
    candidates = [entry for entry in _text.personal(text) if KIND_OF.get(entry[0], entry[0]) in kinds]
    for shape, begin, end in sorted(candidates, key=lambda entry: (entry[1], -entry[2])):
        if begin < done:
            continue
        size = VALIDATORS[shape](Candidate(data, begin, end))
        if size:
            done = begin + size
            yield KIND_OF.get(shape, shape), begin, done


def _replaced(text: str, kinds: Collection[str]) -> tuple[str, Counter[str]]:
    counts: Counter[str] = Counter()
    data = text.encode()
    pieces, done = [], 0
    for kind, begin, end in _found(text, data, kinds):
        pieces += [data[done:begin], PLACEHOLDERS[kind].encode()]
        done = end
        counts[kind] += 1
    if not counts:
        return text, counts
    return b"".join([*pieces, data[done:]]).decode(), counts


def _email(candidate: Candidate) -> int:
    local, _, domain = candidate.value.partition(b"@")
    # git@host:path names a repository, not a person.
    return len(candidate.value) if local != b"git" and is_known_domain(domain.decode().lower()) else 0


def _phone(candidate: Candidate) -> int:
    return len(candidate.value)


def _ip(candidate: Candidate) -> int:
    try:
        address = ipaddress.ip_address(candidate.value.decode())
    except ValueError:
        return 0
    if not address.is_global or address.is_multicast:
        return 0
    if address.version == 4:
        before = candidate.before(32)
        if BEFORE_VERSION.search(before) and not before.endswith(b"//"):
            return 0
        # Four small numbers are a section number or a version, unless the line mentions the network. Only one in 4,000
        # public addresses has no number above 31.
        if re.match(rb"-[A-Za-z]", candidate.data[candidate.end : candidate.end + 2]):  # 12.4.254.14-node.11
            return 0
        small = max(address.packed) < 32 and len(set(address.packed)) > 1
        if small and not NETWORK.search(candidate.before(64).rpartition(b"\n")[2]):
            return 0
    return len(candidate.value)


def _credit_card(candidate: Candidate) -> int:
    digits = candidate.value.replace(b" ", b"").replace(b"-", b"")
    return len(candidate.value) if CARD.fullmatch(digits) and _luhn(digits) else 0


def _luhn(digits: bytes) -> bool:
    """Whether the last digit is Luhn's check digit (ISO/IEC 7812-1, annex B) of ASCII digits."""
    values = [digit - ord("0") for digit in reversed(digits)]
    doubled = (sum(divmod(2 * value, 10)) for value in values[1::2])
    return (sum(values[::2]) + sum(doubled)) % 10 == 0


def _iban(candidate: Candidate) -> int:
    """The length of the IBAN at the start of the candidate (ISO 13616: remainder 1 modulo 97), or 0."""
    value = candidate.value
    length = IBAN_LENGTHS.get(value[:2].decode(), 0)
    size = letters = 0
    while size < len(value) and letters < length:
        letters += value[size] != ord(" ")
        size += 1
    compact = value[:size].replace(b" ", b"").decode()
    after = candidate.data[candidate.begin + size : candidate.begin + size + 1]
    if not length or letters < length or (after.isascii() and after.isalnum()) or after == b"_":
        return 0
    return size if int("".join(str(int(character, 36)) for character in compact[4:] + compact[:4])) % 97 == 1 else 0


def _token(candidate: Candidate) -> int:
    match = KEY.match(candidate.value)
    return match.end() if match and _is_random(match[0]) else 0


def _assigned(candidate: Candidate) -> int:
    match = ASSIGNED.match(candidate.value)
    return match.end() if match and BEFORE_SECRET.search(candidate.before(48)) and _is_random(match[0]) else 0


def _is_random(value: bytes) -> bool:
    """Whether the value has letters, digits and at least 3 bits of entropy per character. xxxx1234 has less.

    On average, 20 random hexadecimal digits have 3.3 bits, 32 have 3.6, and base64 has 4 or more.
    """
    if not any(byte in b"0123456789" for byte in value) or not any(chr(byte).isalpha() for byte in value):
        return False
    counts = Counter(value).values()
    return -sum(count / len(value) * math.log2(count / len(value)) for count in counts) >= 3


KIND_OF = {"token": "secret", "assigned": "secret"}  # two forms of one kind
# Each returns the number of bytes to replace; 0: the candidate is not valid.
VALIDATORS: dict[str, Callable[[Candidate], int]] = {
    "email": _email,
    "phone": _phone,
    "ip": _ip,
    "credit_card": _credit_card,
    "iban": _iban,
    "token": _token,
    "assigned": _assigned,
}
