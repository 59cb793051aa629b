"""Personal data and secrets: what is replaced, and what only looks like it and stays."""

from __future__ import annotations

import ipaddress
import random
import string
import unicodedata

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from publicsuffixlist import PublicSuffixList

from cdrmix import _text
from cdrmix.data.cleaning import pii
from cdrmix.data.cleaning.pii import IBAN_LENGTHS, PLACEHOLDERS, find, scrub

KINDS = list(PLACEHOLDERS)
RANDOM_KEY = "q8Zk2LxP0vR7tYb3WnD5mHc9JfGs1AeU4iOoX6Tz"  # 40 characters


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("Write to jane.doe+news@mail.example.co.uk.", "Write to <EMAIL>."),
        ("<joe_1@example.com>,ann@example.org", "<<EMAIL>>,<EMAIL>"),
        ("mailto:joe@example.com?subject=x", "mailto:<EMAIL>?subject=x"),
        ("Ö.ann@example.com", "<EMAIL>"),
        ("an müller@example.de, x@müller.de, info@vermögensberatung.de", "an <EMAIL>, <EMAIL>, <EMAIL>"),
        ("почта@пример.рф; संपर्क@डाटामेल.भारत", "<EMAIL>; <EMAIL>"),
        ("o'brien@example.com, D'Angelo@example.com 'joe@example.com'", "<EMAIL>, <EMAIL> '<EMAIL>'"),
        ("f('o'brien@example.com', u'joe@example.com', b'ann@example.com)", "f('<EMAIL>', u'<EMAIL>', b'<EMAIL>)"),
        ("请联系joe@example.com谢谢。메일은ann@example.com으로", "请联系<EMAIL>谢谢。메일은<EMAIL>으로"),
        ("邮箱:用户@例子.中国 或123456@example.com", "邮箱:<EMAIL> 或<EMAIL>"),
        ("joe@example.com.谢谢 a@b.com谢谢@foo", "<EMAIL>.谢谢 <EMAIL>谢谢@foo"),
        ("ö" * 40 + "joe@example.com", "ö" * 40 + "<EMAIL>"),
        ("call +1 (415) 555-2671 or", "call <PHONE> or"),
        ("+49 (0)30 1234567, +33 1 23 45 67 89", "<PHONE>, <PHONE>"),
        ("+4915112345678", "<PHONE>"),
        ("(415) 555-2671 / 415-555-2671 / 415.555.2671 / 1-415-555-2671", " / ".join(["<PHONE>"] * 4)),
        ("Tel.: 030 1234567\nFax 0221-987 654", "Tel.: <PHONE>\nFax <PHONE>"),
        ("from 93.184.216.34:8080,", "from <IP>:8080,"),
        ("http://93.184.216.34/x and 93.184.216.34.", "http://<IP>/x and <IP>."),
        ("the server 8.8.8.8 and the DNS at 1.1.1.1", "the server <IP> and the DNS at <IP>"),
        ("[2606:4700:4700::1111]:53, 2a00:1450:4001:81b:0:0:0:200e", "[<IP>]:53, <IP>"),
        ("4111 1111 1111 1234 no, 4111-1111-1111-1111 yes", "4111 1111 1111 1234 no, <CREDIT_CARD> yes"),
        ("Visa 4012888888881881, Amex 3782 822463 10005", "Visa <CREDIT_CARD>, Amex <CREDIT_CARD>"),
        ("5555-5555-5555-4444", "<CREDIT_CARD>"),
        ("6011 0009 9013 9424", "<CREDIT_CARD>"),
        ("IBAN DE89 3704 0044 0532 0130 00 BIC", "IBAN <IBAN> BIC"),
        ("GB82WEST12345698765432, NL91ABNA0417164300", "<IBAN>, <IBAN>"),
        ("DE89 3704 0044 0532 0130 01", "DE89 3704 0044 0532 0130 01"),
        ("AKIAIOSFODNN7EXAMPLE ", "<SECRET> "),
        (f"token: ghp_{RANDOM_KEY[:36]}", "token: <SECRET>"),
        (f"GITHUB_TOKEN=github_pat_{RANDOM_KEY}", "GITHUB_TOKEN=<SECRET>"),
        (f'api_key = "{RANDOM_KEY}"', 'api_key = "<SECRET>"'),
        (f"'clientSecret': '{RANDOM_KEY}'", "'clientSecret': '<SECRET>'"),
        (f"PASSWORD={RANDOM_KEY[:24]}", "PASSWORD=<SECRET>"),
        (f"Bearer eyJ{RANDOM_KEY}.eyJ{RANDOM_KEY}.{RANDOM_KEY}", "Bearer <SECRET>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----\n", "<SECRET>\n"),
    ],
)
def test_what_is_replaced(text: str, scrubbed: str) -> None:
    assert scrub(text, KINDS)[0] == scrubbed


@pytest.mark.parametrize(
    "text",
    [
        # of code
        "@decorator.name", "user@localhost", "lodash@4.17.21", "icon@2x.png", "git@github.com:user/project.git", "a@b",
        "x = 4155552671", "0x4155552671", "1234567890", "1e+12345678", "i+12345678", "x[+1]", "f(1, 2, 3)",
        "00 01 02 03 04 05 06 07 08", "2024-01-15 10:30:00", "20240115103000123", "1-2-3-4-5-6-7", "3.14159265358979",
        "std::vector", "abc::def::beef", "2000-01-01T00:00:00+02:00", "2023:10:11", "de:ad:be:ef:00:01",
        "123-456-7890", "415-555-26711", "1415-555-2671", "415-155-2671", "2.415.555.2671", "415-555-2671-3",
        # versions and sections
        "version 93.184.216.34", "v93.184.216.34", "Chrome/93.0.184.34", "package-93.184.216.34.tar",
        "lib==93.184.216.34", "93.184.216.34.5", "1.93.184.216.34", "93.184.216.34-beta", "3.1.2.1 Overview",
        "see 3.1.2.1 there", "§ 93.184.216.34", "1.2.3.4.5", "256.93.184.216", "\"version\": \"1.0.40.0\"",
        # addresses that are nobody's
        "server 10.0.0.1 192.168.1.1 127.0.0.1 172.16.5.5 169.254.1.1 224.0.0.251 0.0.0.0 255.255.255.255",
        "2001:db8::1", "fe80::1", "::1",
        # numbers without the check digit, or of no issuer
        "4012888888881882", "9999999999999999", "0000 0000 0000 0000", "1234 5678 9012 3456 7890",
        # IBANs of no country or length
        "XX89370400440532013000", "DE8937040044053201300", "DE893704004405320130001",
        # no secrets
        "commit 3f786850e387550fdab836ed7e6dc881de23001b", f"sha256: {RANDOM_KEY}", f"id = '{RANDOM_KEY}'",
        "api_key = os.environ['SERVICE_API_KEY_2']", "password = get_password_from_file",
        "token: aaaaaaaaaaaaaaaaaaaa1", "sk-learn", "hf_hub_download", "AKIA", "ghp_short",
        "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    ],
)  # fmt: skip
def test_what_stays(text: str) -> None:
    for around in ("{}", "  {}\n", "({})", "Line\n{}, and more"):
        placed = around.format(text)
        assert scrub(placed, KINDS) == (placed, {})


def test_counts_and_kinds() -> None:
    text = "a@example.com b@example.com +14155552671 93.184.216.34"
    assert scrub(text, KINDS) == ("<EMAIL> <EMAIL> <PHONE> <IP>", {"email": 2, "phone": 1, "ip": 1})
    assert scrub(text, ["ip"]) == ("a@example.com b@example.com +14155552671 <IP>", {"ip": 1})
    assert scrub(text, []) == (text, {})
    assert scrub("", KINDS) == ("", {})
    with pytest.raises(ValueError, match="'emial'"):
        scrub(text, ["emial"])


def luhn_sum(digits: str) -> int:
    """By Luhn's patent: the digits doubled at every second candidate from the right, their own digits summed."""
    doubled = [str(int(digit) * (1 + candidate % 2)) for candidate, digit in enumerate(reversed(digits))]
    return sum(int(digit) for number in doubled for digit in number)


@given(st.text(string.digits, min_size=14, max_size=14), st.sampled_from(["", " ", "-"]), st.integers(0, 9))
def test_a_card_has_its_check_digit(account: str, separator: str, check: int) -> None:
    digits = f"4{account}{check}"
    text = f"paid by {separator.join(digits[i : i + 4] for i in range(0, 16, 4))}."
    valid = luhn_sum(digits) % 10 == 0
    assert scrub(text, ["credit_card"])[1] == ({"credit_card": 1} if valid else {})


@given(st.sampled_from(sorted(IBAN_LENGTHS)), st.randoms(use_true_random=False), st.booleans(), st.integers(-1, 1))
def test_an_iban_has_its_check_digits_and_length(country: str, rng: random.Random, spaced: bool, longer: int) -> None:
    account = "".join(rng.choices(string.digits + string.ascii_uppercase, k=IBAN_LENGTHS[country] - 4 + longer))
    remainder = int("".join(str(int(c, 36)) for c in f"{account}{country}00")) % 97
    iban = f"{country}{98 - remainder:02}{account}"
    text = f"to {' '.join(iban[i : i + 4] for i in range(0, len(iban), 4)) if spaced else iban}, please"
    assert scrub(text, ["iban"]) == ((text, {}) if longer else ("to <IBAN>, please", {"iban": 1}))


@given(st.ip_addresses())
def test_addresses_are_replaced_when_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    text = f"a host at {address}, perhaps"
    unicast = address.version == 4 or ipaddress.ip_network("2000::/3").supernet_of(ipaddress.ip_network(address))
    public = address.is_global and not address.is_multicast and unicast
    assert scrub(text, ["ip"])[1] == ({"ip": 1} if public else {})


SUFFIXES = PublicSuffixList()
names = st.text(string.ascii_letters + string.digits, min_size=1, max_size=12)


@given(
    st.lists(names, min_size=1, max_size=3),
    st.lists(names, min_size=1, max_size=3),
    st.sampled_from(["com", "org", "de"]),
)
def test_mail_addresses(local: list[str], domain: list[str], top: str) -> None:
    host = f"{'.'.join(domain)}.{top}"
    assume(SUFFIXES.privatesuffix(host.lower()) is not None)  # as in za.com, under which others have their domains
    address = f"{'.'.join(local)}@{host}"
    expected = address if local == ["git"] else "<EMAIL>"
    assert scrub(f"({address}).", ["email"])[0] == f"({expected})."


@given(
    st.text(st.characters(categories=["Lu", "Ll", "Lo"]), min_size=1, max_size=10).map(str.lower),
    st.sampled_from(["müller.de", "пример.рф", "例子.中国", "mail.bücher.example.com"]),
)
def test_addresses_in_any_script_are_replaced_as_a_whole(local: str, domain: str) -> None:
    local = unicodedata.normalize("NFC", local)
    whole = len(local.encode()) <= 64 and local != "git"
    assert (scrub(f"({local}@{domain}).", ["email"])[0] == "(<EMAIL>).") == whole


# What the shapes are made of, so that random joining makes whole and broken ones, side by side.
PIECES = [
    "a@example.com", "@", "+", "4155552671", "+1 415", "(415) ", "555-2671", "415-", "93.184.", "216.34", ".", "-", ":",
    " ", "2606:4700::", "1111", "4012 8888 8888 1881", "DE89 3704 0044 0532 0130 00", "AKIAIOSFODNN7EXAMPLE", "token=",
    RANDOM_KEY, "tel ", "\n", "<EMAIL>", "<", ">", "x", "7", "_", "é", "-----BEGIN PRIVATE KEY-----",
    "-----END PRIVATE KEY-----", "ip ",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text())
def test_scrubbing_twice_changes_nothing(text: str) -> None:
    text = text.encode(errors="replace").decode()
    scrubbed, counts = scrub(text, KINDS)
    assert scrub(scrubbed, KINDS) == (scrubbed, {})
    assert (scrubbed == text) == (not counts)
    # What is not replaced is kept: nothing but the placeholders is new.
    for kind, number in counts.items():
        assert scrubbed.count(PLACEHOLDERS[kind]) >= number


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text())
def test_candidates_lie_within_the_text(text: str) -> None:
    data = text.encode(errors="replace")
    for kind, begin, end in _text.personal(data.decode()):
        assert 0 <= begin < end <= len(data)
        assert data[begin:end].decode().isascii() or kind == "email"
        assert kind in {"email", "phone", "ip", "credit_card", "iban", "token", "assigned"}


@pytest.mark.parametrize(
    ("unit", "replaced"),
    [
        (f"npm_{RANDOM_KEY[:36]}", "<SECRET>"), ("93.184.216.34/", "<IP>/"), ("+4155552671", "<PHONE>"),
        ("a@example.com ", "<EMAIL> "),
    ],
)  # fmt: skip
def test_candidates_that_hide_the_next_one_are_found_in_one_pass(
    unit: str, replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass for each of them would be quadratic: the second pass finds nothing more."""
    begun: list[int] = []

    class Counted:
        @staticmethod
        def personal(text: str, begin: int, *most: int) -> list[tuple[str, int, int]]:
            begun.append(begin)
            return _text.personal(text, begin, *most)

    monkeypatch.setattr(pii, "_text", Counted)
    assert scrub(f"x {unit * 50}", KINDS)[0] == f"x {replaced * 50}"
    assert begun.count(0) == 2
    assert len(begun) == 52


def test_find_gives_the_values_that_scrub_replaces() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----"
    text = f"Ö ann@example.org, IBAN DE89 3704 0044 0532 0130 00, 4111-1111-1111-1111 not 4111 1111 1111 1234 {key}"
    found = [("email", "ann@example.org"), ("iban", "DE89 3704 0044 0532 0130 00")]
    found.append(("credit_card", "4111-1111-1111-1111"))
    assert find(text, KINDS) == [("secret", key), *found]
    assert find(text, ["iban"]) == [found[1]]
    replaced = text
    for kind, value in find(text, KINDS):
        replaced = replaced.replace(value, PLACEHOLDERS[kind])
    assert replaced == scrub(text, KINDS)[0]
    with pytest.raises(ValueError, match="unknown kinds"):
        find(text, ["name"])
