"""The sandbox of chat templates: what it computes is what Jinja2 computes, and no template does more than it may."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cdrmix.data.chat import sandbox
from cdrmix.data.chat.rendering import Renderer
from cdrmix.data.chat.template import FAILURES, SOURCE, compiled, render
from cdrmix.data.sources.base import BadRecord
from cdrmix.data.sources.conversations import Conversation
from cdrmix.errors import ConfigError

QUESTION = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A <b>"}]
TOOLS = [{"name": "f", "parameters": {"a": [1, 2.5, None, True]}}]
DATE = "2024-07-26"


def grown(begin: str, next: str, end: str = "") -> str:
    """A template in which a value grows a hundred times."""
    loop = f"{{% for i in range(100) %}}{{% set ns.x = {next} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={begin}) %}}{loop}{end}"


def repeated(expression: str) -> str:
    """A template that computes something of long texts, b and d, again and again."""
    long = "{% set b = 'a' * 100000 %}{% set d = 'a' * 100000 %}"
    return f"{long}{{% for i in range(100000) %}}{{% set c = {expression} %}}{{% endfor %}}"


# The texts that they make first are within the bound of the test, so that what is done with them is stopped.
WITHOUT_END = [
    "{{ 'a' * 10**9 }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    grown("'a'", "ns.x + ns.x"),
    grown("'a'", "ns.x ~ ns.x"),
    grown("['a']", "[ns.x, ns.x]", "{{ ns.x }}"),
    grown("'a'", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
    grown("'a'", "namespace(a=ns.x, b=ns.x)", "{{ ns.x }}"),
    grown("[1]", "(ns.x + ns.x) | batch(2) | list", "{{ ns.x }}"),
    grown("[1]", "(ns.x + ns.x) | slice(2) | list", "{{ ns.x == ns.x[:] }}"),
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    grown("7", "ns.x * ns.x"),
    "{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a'.zfill(10 ** 9) }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ '\\t'.expandtabs(10 ** 9) }}",
    "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('b' * 100000).join(('a' * 100000) | list) }}",
    "{{ (['a' * 100000] * 10000) | join }}",
    "{{ (['a' * 100000] * 10000) | map('upper') | join }}",
    "{{ (['a' * 100000] * 10000) | map('upper') | list | length }}",
    "{{ ''.join((['a' * 100000] * 10000) | map('string')) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ '{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format('a' * 100000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ ('%s' * 10000) % (('a' * 100000,) * 10000) }}",
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "{{ (1).to_bytes(10 ** 9) }}",
    "{{ [[[[1]]]] | tojson(indent=10 ** 9) }}",
    "{{ 'a\\nb' | indent(10 ** 9) }}",
    "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "{{ [1] | slice(10 ** 9) | list }}",
    repeated("b[1:]"),
    repeated("b.upper()"),
    repeated("b | upper"),
    repeated("'b' in b"),
    repeated("b == d"),
    repeated("b is eq d"),
    "{% set b = 'a' * 100000 %}{% for i in range(100000) %}{{ b }}{% endfor %}",
    "{% set b = 'a' * 100000 %}{{ b.rfind('b' + 'a' * 50000) }}",
    "{% set b = 'a' * 100000 %}{{ b.strip('b' * 50000 + 'a') }}",
    "{% set b = '\\u4e00' * 100000 %}{{ b.split() }}{{ b | list | length }}",
    "{{ range(100000) | map('string') | join(',' * 100000) }}",
    "{{ ([[1]] * 100000) | sum(start=[]) }}",
    "{% for i in range(100000) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}",
    "{{ raise_exception('a' * 10 ** 6) }}",
    "{% set b = 'a' * 100000 %}{% set d = 'a' * 100000 %}{% for i in range(9999) %}{{ '' < b <= d }}{% endfor %}",
    "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}",
    "{{ '%s' % ('a' * 900000) }}",
    "{{ 10 ** (10 ** 10) }}",
]


@pytest.mark.parametrize("source", WITHOUT_END)
def test_a_template_without_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WORK", 1 << 20)
    with pytest.raises(
        ConfigError, match=r"^template: the chat template was stopped, because .*; use another"
    ) as caught:
        render(source, Conversation(QUESTION, TOOLS), {}, DATE, prompt=False)
    assert caught.value.exit_code == 2


def test_the_key_is_named() -> None:
    made = Renderer("data.source", "{{ 'a' * 10 ** 10 }}", (), (), DATE, "all")
    with pytest.raises(ConfigError, match=r"^data\.source\.template: the chat template was stopped"):
        made.probe()


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{{ " + "9" * 5000 + " }}",
        "{{ " + " + ".join(["1"] * 5000) + " }}",
        "x" * (SOURCE + 1),
    ],
    ids=range(6),
)
def test_a_template_that_cannot_be_compiled_is_a_sentence(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^template: .*chat template") as caught:
        compiled(source, DATE)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f(n) %}{{ f(n - 1) }}{% endmacro %}{{ f(300) }}",
        "{{ raise_exception('a' * 10 ** 6) }}",
        "{{ range(10 ** 12) }}",
        "{{ x | unknown_filter }}",
        "{% call 'a'.ljust(10 ** 10) %}{% endcall %}",
        "{{ ''.__class__ }}{{ messages.append(1) }}",
    ],
)
def test_a_refusal_is_short(source: str) -> None:
    with pytest.raises(BadRecord, match="refuses the conversation: ") as caught:
        render(source, Conversation(QUESTION, TOOLS), {}, DATE, prompt=False)
    assert len(str(caught.value)) < 500


def test_the_bound_grows_with_the_conversation() -> None:
    turns = [{"role": "user", "content": "word " * 200_000}] * 12
    source = "{% for m in messages %}{{ m.content | trim | replace('w', 'v') }}{{ m | tojson(indent=4) }}{% endfor %}"
    assert len(render(source, Conversation(turns), {}, DATE, prompt=False)) > 2 * 12 * 999_000


SAME = [
    "{{ 1 + 2 * 3 ** 2 // 4 - 5 / 2 % 3 }} {{ -7 // 2 }} {{ 'a' * 3 }} {{ [1] * 2 + [2] }} {{ (1, 2) + (3,) }}",
    "{{ 'a' ~ 1 ~ none ~ [1, 'b'] ~ x ~ ('<' | e) ~ '<' }} {{ x }} {{ none }} {{ true }} {{ 2.50 }} {{ {'a': (1,)} }}",
    (
        "{{ 1 < 2 <= 2 != 3 }} {{ 'a' in 'abc' }} {{ 3 not in [1, [2]] }} {{ 'role' in messages[0] }} {{"
        " x == y }} {{ 1 == 1.0 }}"
    ),
    (
        "{% for m in messages[::-1] if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{"
        " loop.last }}{{ m.role }}{% else %}-{% endfor %}"
    ),
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{{ loop.depth }}{% endfor %}",
    (
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% for x in 'abc' %}{{ x }}{%"
        " if x == 'b' %}{% break %}{% endif %}{% endfor %}"
    ),
    (
        "{% macro f(a, b=2) %}<{{ a }}{{ b }}{{ caller() if caller }}>{% endmacro %}{{ f(1) }}{{ f(1,"
        " b=3) }}{% call f(4) %}body{% endcall %}"
    ),
    (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index0 %}{%"
        " endfor %}{{ ns.n }}{% set a, b = 1, 2 %}{{ a, b }}"
    ),
    (
        "{% set t %}x{{ 1 }}{% endset %}{{ t }}{% filter upper %}abc{{ t }}{% endfilter %}{% with z ="
        " [1] %}{{ z }}{% endwith %}"
    ),
    (
        "{{ 'a,b'.split(',') | join('-') }} {{ ' x '.strip() | upper }} {{ 'abc'[1:] }} {{"
        " 'a-b'.replace('-', '+') }} {{ ','.join(['a', 'b']) }}"
    ),
    (
        "{{ '%s-%03d' % ('a', 7) }} {{ '{}-{x:>5}'.format('a', x=1) }} {{ '%s' | format(1) }} {{ 'a\nb' |"
        " indent(2) }} {{ 'ab' | center(6) }}"
    ),
    (
        "{{ messages | length }} {{ messages | map(attribute='role') | list }} {{ messages |"
        " selectattr('role', 'eq', 'user') | list }}"
    ),
    (
        "{{ [3, 1, 2] | sort | first }} {{ [1, 2, 3] | sum }} {{ [1, 2, 3] | batch(2, 0) | list }} {{"
        " range(5) | slice(2) | list }} {{ {'b': 1, 'a': 2} | dictsort }}"
    ),
    (
        "{{ 'x' is string }} {{ y is defined }} {{ none is none }} {{ 4 is divisibleby(2) }} {{ messages"
        " is sequence }} {{ 1 is eq 1 }} {{ 2 is in [1, 2] }}"
    ),
    (
        "{{ dict(a=1).get('a') }} {{ dict(a=1, **{'b': 2}) | items | list }} {{ cycler(1, 2).next() }}"
        " {{ joiner('|')() }} {{ 'é<' | urlencode }} {{ 1.27 | round(1) }}"
    ),
    (
        "{{ 'abc' if x is undefined else 'd' }} {{ x | default('e') }} {{ messages[0]['role'] }} {{"
        " messages[-1].content | truncate(3) }} {{ 'a' and 'b' or 'c' }} {{ not 1 }}"
    ),
    (
        "  {%- if tools %}\n{{ tools }}\n  {% endif %}\n x {# comment #} {% raw %}{{ }}{% endraw %} {%"
        " block b %}in{% endblock %} {{ self.b() }}"
    ),
]


@pytest.mark.parametrize("source", SAME)
def test_what_is_computed_is_what_jinja2_computes(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    counting = sandbox.Sandbox([loopcontrols])
    given: dict[str, Any] = {"messages": QUESTION, "tools": TOOLS}
    with sandbox.bounded(given):
        found = counting.counting(source).render(given)
    assert found == plain.from_string(source).render(given)


def test_every_filter_and_method_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with large arguments of all kinds either end at once or are stopped; the largest result has a bound."""
    monkeypatch.setattr(sandbox, "WORK", 1 << 18)
    draw = random.Random(0)
    arguments = ["'a' * 30000", "10 ** 9", "['ab'] * 3000", "'%s{}' * 5000", "{97: 'b' * 20000}", "''", "[[1]] * 3000"]
    environment = sandbox.Sandbox()
    calls = [f"({{}}) | {name}({{}})" for name in environment.filters if not name.startswith("cdrmix")]
    methods = {name for kind in (str, int, list, dict) for name in dir(kind) if not name.startswith("_")}
    calls += [f"({{}}).{name}({{}})" for name in sorted(methods)]
    for call in calls:
        value, more = draw.choice(arguments), draw.choice([*arguments, ", ".join(draw.sample(arguments, 2))])
        source = f"{{{{ ({call.format(value, more)}) | string | length }}}}"
        text = environment.counting(source)
        with contextlib.suppress(sandbox.TooMuchWork, *FAILURES), sandbox.bounded(()):
            assert int(text.render()) <= 1 << 19
