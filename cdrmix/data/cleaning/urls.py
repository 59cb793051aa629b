"""URLs: the canonical form of a page's URL, and its registrable domain.

It follows RFC 3986 section 6 (syntax-based normalisation) and the practice of crawlers: see `canonical_url`.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from typing import NamedTuple

import idna
from publicsuffixlist import PublicSuffixList

RULES_VERSION = 2  # increased when a URL may get another canonical form, so that cached shards are prepared again

TRACKING = re.compile(
    r"utm_.*|mtm_.*|pk_.*|hsa_.*|gclid|gclsrc|dclid|gbraid|wbraid|fbclid|msclkid|yclid|twclid|ttclid|igshid|igsh|mc_cid"
    r"|mc_eid|mkt_tok|_hsenc|_hsmi|_ga|_gl|oly_anon_id|oly_enc_id|vero_id|wickedid|rb_clickid|s_cid|cmpid|ncid|ref_src"
    r"|phpsessid|jsessionid|sessionid|session_id|aspsessionid.*|cfid|cftoken|zenid|oscsid",
    re.IGNORECASE,
)
PATH_SESSION = re.compile(r";(?:jsessionid|phpsessid|sessionid)=[^/;]*", re.IGNORECASE)
INDEX_PAGE = re.compile(
    r"(?:index\.(?:html?|shtml|xhtml|php\d?|aspx?|jsp|cgi|cfm)|default\.(?:html?|aspx?))", re.IGNORECASE
)
STRIPPED = "".join(map(chr, range(33)))
HTTP_URL = re.compile(r"https?://([^/\\?#]*)([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.IGNORECASE | re.DOTALL)
HOST_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:]*)(?::([0-9]{0,5}))?")
HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
MOST_OF_HOST = 1000  # characters; a name has at most 253 in ASCII, but signs that IDNA drops may stand in it
DOTTED_QUAD = re.compile(r"[0-9]+(?:\.[0-9]+){3}")
ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})|([^A-Za-z0-9._~!$&'()*+,;=:@/?-])")
UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class Parts(NamedTuple):
    """The canonical parts of a URL: `host` in ASCII, `port` with its colon or empty, `path` from its slash, `query`.

    route: the fragment if it names a page, from its ! or slash; else empty.
    """

    host: str
    port: str
    path: str
    query: str
    route: str


@functools.cache
def suffixes() -> PublicSuffixList:
    """The public suffix list of the library, with private suffixes (github.io)."""
    return PublicSuffixList()


@functools.lru_cache(maxsize=65536)
def is_known_domain(host: str) -> bool:
    """Whether the host, in ASCII, is a name below a public suffix that exists: example.com is, image.png is not."""
    return suffixes().privatesuffix(host, accept_unknown=False) is not None


def canonical_url(url: str) -> str | None:
    """The canonical form of all URLs of one page, or None if `url` is not an http(s) URL.

    Scheme https (http is the same page). Host in lower case and IDNA ASCII, without `www.` and without a final dot. No
    user or default port. No fragment but one that names a page, `#!topic` or `#/topic`, as in applications that load
    their pages by script. Dot segments resolved. Percent-encoding in upper case, only where needed. No index page,
    session id or trailing slash. Query sorted, without tracking parameters. The function is idempotent.
    """
    parts = split(url)
    if parts is None:
        return None
    query = f"?{parts.query}" if parts.query else ""
    route = f"#{parts.route}" if parts.route else ""
    return f"https://{parts.host}{parts.port}{parts.path}{query}{route}"


def registrable_domain(url: str) -> str | None:
    """The registrable domain of a URL (example.co.uk), or None if `url` is not an http(s) URL.

    For an IP address, a name without dots or a public suffix, the host itself.
    """
    parts = split(url)
    return None if parts is None else domain_of_host(parts.host)


@functools.lru_cache(maxsize=65536)
def domain_of_host(host: str) -> str:
    """The registrable domain of a canonical host."""
    if host.startswith("[") or DOTTED_QUAD.fullmatch(host):
        return host
    return suffixes().privatesuffix(host) or host


@functools.lru_cache(maxsize=16)  # callers need both the canonical URL and the domain of one URL
def split(url: str) -> Parts | None:
    """The canonical parts of an http(s) URL, or None."""
    # As in browsers (WHATWG URL 4.4): tabs, newlines and surrounding controls and spaces are removed; backslash is
    # slash.
    url = url.strip(STRIPPED).replace("\t", "").replace("\n", "").replace("\r", "")
    match = HTTP_URL.match(url)
    if match is None:
        return None
    authority, path, query, fragment = match.groups()
    host_and_port = HOST_AND_PORT.fullmatch(authority.rpartition("@")[2])
    if host_and_port is None:
        return None
    host = canonical_host(host_and_port[1])
    port = int(host_and_port[2] or 0)
    if host is None or port > 65535:
        return None
    try:
        path, query = canonical_path(path.replace("\\", "/")), canonical_query(query or "")
        route = canonical_route(fragment or "")
    except UnicodeEncodeError:  # a lone surrogate
        return None
    # Port 443 of http and port 80 of https are removed too, because the canonical form has one scheme.
    return Parts(host, "" if port in (0, 80, 443) else f":{port}", path, query, route)


@functools.lru_cache(maxsize=65536)
def canonical_host(host: str) -> str | None:
    """The host in ASCII without `www.`; an IPv6 address in brackets in its shortest form; None if it is not valid."""
    if host.startswith("["):
        try:
            return f"[{ipaddress.IPv6Address(host[1:-1].partition('%')[0]).compressed}]"
        except ValueError:
            return None
    if len(host) > MOST_OF_HOST:  # IDNA takes quadratic time
        return None
    host = host.rstrip(".").lower()
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True).decode("ascii").rstrip(".")
        except (idna.IDNAError, UnicodeError):
            return None
    if not HOST.fullmatch(host) or len(host) > 253:
        return None
    # The rest must be below a public suffix: in www.com and www.co.uk, www is the registered name.
    while host.startswith("www.") and suffixes().privatesuffix(host[4:]) is not None:
        host = host[4:]
    return host


def canonical_path(path: str) -> str:
    """The path with normal escapes and resolved dot segments (RFC 3986 5.2.4), without session, index page, final
    slash.
    """
    segments: list[str] = []
    for segment in PATH_SESSION.sub("", escaped(path)).split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment != ".":
            segments.append(segment)
    while segments and (not segments[-1] or INDEX_PAGE.fullmatch(segments[-1])):
        segments.pop()
    return "/" + "/".join(segments).lstrip("/")


def canonical_query(query: str) -> str:
    """The parameters in the order of their escaped form, without tracking parameters."""
    pairs = (escaped(pair) for pair in query.split("&"))
    return "&".join(sorted(pair for pair in pairs if pair and not TRACKING.fullmatch(pair.partition("=")[0])))


def canonical_route(fragment: str) -> str:
    """The fragment if it names a page other than the first one, else empty. Its query is treated as that of a URL."""
    if not fragment.startswith(("!", "/")):
        return ""
    route, _, query = fragment.partition("?")
    route, query = escaped(route).rstrip("/"), canonical_query(query)
    return "" if route in ("", "!") and not query else f"{route or '/'}?{query}" if query else route


def escaped(text: str) -> str:
    """Percent-encoding, in upper case, of exactly the characters that need it. UnicodeEncodeError for surrogates."""

    def replace(match: re.Match[str]) -> str:
        if match[1] is None:
            return "".join(f"%{byte:02X}" for byte in match[2].encode())
        character = chr(int(match[1], 16))
        return character if character in UNRESERVED else f"%{match[1].upper()}"

    return ESCAPE.sub(replace, text)
