"""Self-contained HTML pages: the style of all reports, light and dark, and their common elements."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f5f6f9;--ink:#1f2430;--soft:#5b6472;--line:#dfe3ea;--accent:#d9480f;
--bar:#9db8ea}
@media (prefers-color-scheme:dark){:root{--paper:#14171d;--card:#1d222b;--ink:#dfe3ea;--soft:#98a2b3;--line:#2f3642;
--accent:#ff9457;--bar:#3d5d96}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:1.5rem 1rem 4rem;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.6rem;line-height:1.2;margin:.2rem 0}
h2{font-size:1.15rem;margin:2.4rem 0 .7rem}
p{margin:.4rem 0;max-width:46rem}
.soft{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.7rem;margin:1.2rem 0}
.tile{background:var(--card);border-radius:.6rem;padding:.7rem .9rem}
.tile b{display:block;font-size:1.45rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tile.first b{color:var(--accent)}
.tile span{color:var(--soft);font-size:.85rem}
.bars{display:grid;grid-template-columns:max-content 1fr;gap:.35rem .8rem;align-items:center}
.bars i{display:block;height:1.15rem;border-radius:.25rem;background:var(--bar);min-width:2px}
.bars .own{background:var(--accent)}
.bars div{display:flex;align-items:center;gap:.6rem;font-variant-numeric:tabular-nums}
img{width:100%;height:auto;border-radius:.6rem;border:1px solid var(--line)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums;min-width:min(100%,28rem)}
th,td{text-align:right;padding:.3rem .8rem;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}
th{font-weight:600;color:var(--soft)}
td.text{text-align:left;white-space:normal;overflow-wrap:anywhere}
.bad{color:var(--accent);font-weight:600}
pre{background:var(--card);border-radius:.6rem;padding:.9rem 1rem;overflow-x:auto;font-size:.85rem;line-height:1.45;
white-space:pre-wrap;overflow-wrap:anywhere}
pre em{font-style:normal;color:var(--soft)}
summary{cursor:pointer;margin:.6rem 0}
"""

# The page loads nothing and runs no script, even if untrusted text were not escaped.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def html_page(title: str, sections: Iterable[str], *, style: str = "") -> str:
    """A whole HTML page.

    title: plain text. sections: HTML; empty ones are omitted. style: CSS in addition to STYLE.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escaped(title)}</title>"
        f"<style>{STYLE}{style}</style></head>\n<body>"
        + "\n".join(section for section in sections if section)
        + "</body></html>\n"
    )


def tiles(facts: Sequence[tuple[str, str]], *, stress_first: bool) -> str:
    """A row of tiles. facts: (value, label) of each, plain text."""
    cells = "".join(
        f'<div class="tile{" first" if number == 0 and stress_first else ""}"><b>{escaped(value)}</b>'
        f"<span>{escaped(label)}</span></div>"
        for number, (value, label) in enumerate(facts)
    )
    return f'<div class="tiles">{cells}</div>'


def picture(light_dark: Sequence[bytes], alt: str) -> str:
    """HTML with an embedded PNG in a light and a dark version. alt: alternative text."""
    light, dark = light_dark

    def uri(png: bytes) -> str:
        return "data:image/png;base64," + base64.b64encode(png).decode("ascii")

    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{uri(dark)}">'
        f'<img alt="{escaped(alt)}" src="{uri(light)}">'
        "</picture>"
    )


def escaped(value: object) -> str:
    """The value as escaped HTML text, also for attributes."""
    return html.escape(str(value), quote=True)
