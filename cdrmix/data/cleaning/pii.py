"""Personal data and secrets in text, replaced by placeholders such as <EMAIL>.

csrc/personal.hpp finds candidates by their form; keys must also look random. This module validates each of them: the
domain of an e-mail address must exist, an IP address must be public, a card number must pass the Luhn check, an IBAN
must have valid check digits, a value must be assigned to the name of a secret. Doubtful candidates are kept, because
numbers in code, versions and section numbers are far more frequent in text than personal data of the same form.
"""

from __future__ import annotations

import heapq
import ipaddress
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from cdrmix import _text
from cdrmix.data.cleaning.urls import canonical_host, is_known_domain

PLACEHOLDERS = {
    "email": "<EMAIL>",
    "phone": "<PHONE>",
    "ip": "<IP>",
    "credit_card": "<CREDIT_CARD>",
    "iban": "<IBAN>",
    "secret": "<SECRET>",
}

PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----(?:[^-]++|-(?!----))*+"
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
BEFORE_SECRET = re.compile(
    rb"(?:api[_-]?key|secret|token|passw(?:or)?d|passphrase|credential|access[_-]?key|auth[_-]?key|private[_-]?key"
    rb"|client[_-]?key)\w*[\"'`\]]{0,2}[ \t]*(?::|=|:=|=>)[ \t]*[\"'`]?\Z",
    re.IGNORECASE,
)
ASCII_LABEL = re.compile(r"[A-Za-z0-9-]*[A-Za-z](?=[^\x00-\x7f])")  # of a last label, before letters of another script
CONTEXT = 64  # bytes before a candidate that validators look at
# Bytes behind a replacement that may hide a candidate: the words there are searched once more without what is before.
# More than those of an e-mail address before its @.
HIDDEN = 66


class Candidate(NamedTuple):
    """Bytes data[begin:end] of a text in UTF-8. left: at most CONTEXT bytes before it."""

    data: bytes
    begin: int
    end: int
    left: bytes

    @property
    def value(self) -> bytes:
        return self.data[self.begin : self.end]


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
        # Repeat: a replaced candidate may have hidden one before it. Those behind it have been found.
        counts += replaced


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
    """(kind, begin, end) in data, the text in UTF-8, of what is valid, in order and without overlaps.

    A candidate is valid by what is before it in the text, or by what is before it once that has been replaced. The
    second kind is searched behind each replacement, so that a chain of candidates that hide one another is found in one
    pass. It is left out where it overlaps one of the first kind.
    """
    done, replaced = 0, b""  # `replaced`: the end of the text up to `done`, with placeholders

    def candidates(begin: int, *most: int) -> list[tuple[int, int, int, str]]:
        """(begin, -end, number, shape): of those that begin at a place the longest is first."""
        found = enumerate(_text.personal(text, begin, *most))
        return sorted((begin, -end, n, shape) for n, (shape, begin, end) in found if KIND_OF.get(shape, shape) in kinds)

    def size_of(begin: int, negative_end: int, _: int, shape: str) -> int:
        if begin < done:
            return 0
        candidate = Candidate(data, begin, -negative_end, data[max(0, begin - CONTEXT) : begin])
        size = VALIDATORS[shape](candidate)
        if not size and done > 0 and begin - CONTEXT < done:
            size = VALIDATORS[shape](candidate._replace(left=(replaced + data[done:begin])[-CONTEXT:]))
        return size

    seen, hidden = deque(candidates(0)), list[tuple[int, int, int, str]]()
    spans = {(begin, end, shape) for begin, end, _, shape in seen}
    while seen or hidden:
        is_hidden = not seen or (hidden and hidden[0] < seen[0])
        candidate = heapq.heappop(hidden) if is_hidden else seen.popleft()
        begin, size = candidate[0], size_of(*candidate)
        if is_hidden and size:
            while seen and seen[0][0] < begin + size and not size_of(*seen[0]):
                seen.popleft()
            if seen and seen[0][0] < begin + size:
                continue
        if size:
            kind = KIND_OF.get(candidate[3], candidate[3])
            yield kind, begin, begin + size
            replaced = (replaced + data[max(done, begin - CONTEXT) : begin] + PLACEHOLDERS[kind].encode())[-CONTEXT:]
            done = begin + size
            for one in candidates(done, HIDDEN):
                if (one[0], one[1], one[3]) not in spans:
                    heapq.heappush(hidden, one)


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
    local, _, domain = candidate.value.decode().partition("@")
    if local == "git":  # git@host:path names a repository, not a person
        return 0
    for name in _domains(domain):
        host = name.lower()
        known = is_known_domain(host) if host.isascii() else is_known_domain(canonical_host(host) or "")
        if known:
            return len(f"{local}@{name}".encode())
    return 0


def _domains(domain: str) -> Iterator[str]:
    """The domain; and without what follows it in the sentence, in the letters of another script."""
    yield domain
    before, _, last = domain.rpartition(".")
    if not last.isascii():
        match = ASCII_LABEL.match(last)
        yield f"{before}.{match[0]}" if match else before


def _whole(candidate: Candidate) -> int:
    return candidate.end - candidate.begin


def _ip(candidate: Candidate) -> int:
    try:
        address = ipaddress.ip_address(candidate.value.decode())
    except ValueError:
        return 0
    if not address.is_global or address.is_multicast:
        return 0
    if address.version == 4:
        before = candidate.left[-32:]
        if BEFORE_VERSION.search(before) and not before.endswith(b"//"):
            return 0
        # Four small numbers are a section number or a version, unless the line mentions the network. Only one in 4,000
        # public addresses has no number above 31.
        if re.match(rb"-[A-Za-z]", candidate.data[candidate.end : candidate.end + 2]):  # 12.4.254.14-node.11
            return 0
        small = max(address.packed) < 32 and len(set(address.packed)) > 1
        if small and not NETWORK.search(candidate.left.rpartition(b"\n")[2]):
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


def _assigned(candidate: Candidate) -> int:
    return candidate.end - candidate.begin if BEFORE_SECRET.search(candidate.left[-48:]) else 0


KIND_OF = {"token": "secret", "assigned": "secret"}  # two forms of one kind
# Each returns the number of bytes to replace; 0: the candidate is not valid.
VALIDATORS: dict[str, Callable[[Candidate], int]] = {
    "email": _email,
    "phone": _whole,
    "ip": _ip,
    "credit_card": _credit_card,
    "iban": _iban,
    "token": _whole,
    "assigned": _assigned,
}
