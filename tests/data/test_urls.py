"""Canonical addresses: one spelling for all of a page's, a second application changes nothing, garbage is refused."""

from __future__ import annotations

import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.data.cleaning.urls import canonical_url, is_known_domain, registrable_domain


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        (
            "HTTP://User:pw@WWW.Example.CO.UK:80/a/./b/../index.html?utm_source=x&b=2&a=1#frag",
            "example.co.uk/a?a=1&b=2",
        ),
        ("https://example.com", "example.com/"),
        ("https://forum.example.org/app/#!topic/7", "forum.example.org/app#!topic/7"),
        ("https://forum.example.org/app#/Topic/ä/?utm_source=x&b=2&a=1", "forum.example.org/app#/Topic/%C3%A4?a=1&b=2"),
        ("https://forum.example.org/app/#!/", "forum.example.org/app"),
        ("https://forum.example.org/app/#/?utm_source=x", "forum.example.org/app"),
        ("https://forum.example.org/#/?id=3", "forum.example.org/#/?id=3"),
        ("https://forum.example.org/app#section-2", "forum.example.org/app"),
        ("https://forum.example.org/a?x=1#!b#c", "forum.example.org/a?x=1#!b%23c"),
        ("  https://example.com./ ", "example.com/"),
        ("http://example.com:443/a/", "example.com/a"),
        ("http://example.com:8080/a//b/", "example.com:8080/a//b"),
        ("http://bücher.example/ä?q=ü", "xn--bcher-kva.example/%C3%A4?q=%C3%BC"),
        ("http://a.example/%7euser/%e4%2f?x=%2b", "a.example/~user/%E4%2F?x=%2B"),
        ("http://a.example/%2e%2E/%2e/b", "a.example/b"),
        ("http://a.example/../../b", "a.example/b"),
        ("http://a.example/index.php/index.html", "a.example/"),
        ("http://a.example/reindex.html", "a.example/reindex.html"),
        ("http://a.example/p;jsessionid=A1/q?PHPSESSID=2&id=3&gclid=4&fbclid=5&&", "a.example/p/q?id=3"),
        ("http://a.example/?b=1&a=2&a=1", "a.example/?a=1&a=2&b=1"),
        ("http://a.example/100%", "a.example/100%25"),
        ("http://a.example\\b\\..\\c", "a.example/c"),
        ("http://a.exam\nple/b", "a.example/b"),
        ("http://my_blog.example/", "my_blog.example/"),
        ("https://www.com/", "www.com/"),
        ("https://www.co.uk/", "www.co.uk/"),
        ("http://www.www.example.com", "example.com/"),
        ("http://[2001:DB8:0::1]:80/", "[2001:db8::1]/"),
        ("http://192.0.2.7/x", "192.0.2.7/x"),
    ],
)
def test_spellings(url: str, canonical: str) -> None:
    assert canonical_url(url) == f"https://{canonical}"


@pytest.mark.parametrize(
    "url",
    ["", "example.com", "ftp://example.com", "mailto:a@example.com", "http://", "http:///path", "http://..",
     "http://a b/", "http://[::1", "http://[x]/", "http://a:99999/", "http://a:b/", "http://-a.example/", "http://a.example/\ud800",
     "javascript:alert(1)", "http://" + "a" * 64 + ".example/", "http://" + "a." * 200 + "example/"],
)  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    assert canonical_url(url) is None
    assert registrable_domain(url) is None


@pytest.mark.parametrize(
    ("url", "domain"),
    [
        ("http://news.bbc.co.uk/1", "bbc.co.uk"),
        ("https://www.example.com:8080/", "example.com"),
        ("https://someone.github.io/x", "someone.github.io"),
        ("https://github.io/", "github.io"),
        ("http://a.b.bücher.de/", "xn--bcher-kva.de"),
        ("http://192.0.2.7/", "192.0.2.7"),
        ("http://[::1]/", "[::1]"),
        ("http://localhost/", "localhost"),
    ],
)
def test_registrable_domains(url: str, domain: str) -> None:
    assert registrable_domain(url) == domain


def test_known_domains() -> None:
    assert [
        host for host in ("example.com", "bbc.co.uk", "image.png", "com", "a.b.invalid") if is_known_domain(host)
    ] == [
        "example.com",
        "bbc.co.uk",
    ]


# Addresses made of what the rules look for, whole and cut up.
parts = st.sampled_from(
    ["/", "//", ".", "..", "/./", "/../", "%2e", "%2E%2e", "%", "%4", "%41", "%C3%A4", "ä", " ", "\\", "?", "&", "=",
     "#", "#!", "#/", "!", ";", ";jsessionid=1", ";jsess", "index.html", "default.aspx", "utm_source=a",
     "gclid=", "a=1", "b", "+", ":",
     "@", "www.", "[", "]", "ß", "\u2028", "%00", "~", "'", '"', "<"]
)  # fmt: skip
hosts = st.sampled_from(
    ["example.com", "WWW.example.org", "www.co.uk", "a", "[::1]", "bücher.de", "u:p@x.org:80", "1.2.3.4"]
)
addresses = st.builds("{}{}{}".format, st.sampled_from(["http://", "HTTPS://"]), hosts, st.lists(parts).map("".join))


@given(addresses | st.text() | st.text().map("http://{}".format))
def test_a_canonical_address_is_its_own(url: str) -> None:
    canonical = canonical_url(url)
    if canonical is not None:
        assert canonical_url(canonical) == canonical
        assert canonical.isascii()
        split = urllib.parse.urlsplit(canonical)
        assert split.scheme == "https"
        assert split.fragment[:1] in ("", "!", "/")
        assert not {".", ".."} & set(split.path.split("/"))
        assert registrable_domain(url) == registrable_domain(canonical)


@given(addresses)
def test_spellings_that_browsers_take_for_one(url: str) -> None:
    canonical = canonical_url(url)
    scheme, rest = url.split("://", 1)
    assert canonical_url(f" {scheme.swapcase()}://{rest}\n") == canonical
    if canonical is not None and "#" not in url:
        assert canonical_url(f"{url}#part") == canonical
        assert canonical_url(f"{url}{'&' if '?' in url else '?'}utm_medium=mail") == canonical
