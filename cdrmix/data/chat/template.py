"""Chat templates: Jinja2 in a sandbox, with the settings and functions that transformers gives a template.

A template is data of others. The sandbox lets it read the messages and nothing else, and bounds its work.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_items
from jinja2.parser import Parser

from cdrmix.data.chat.sandbox import Sandbox, TooMuchWork, bounded
from cdrmix.data.sources.base import BadRecord
from cdrmix.data.sources.conversations import UNTRAINED, Conversation, json_object
from cdrmix.errors import ConfigError
from cdrmix.json_text import parse_json

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
BUILT_IN = {"chatml": CHATML}
SPECIAL_TOKENS = {"chatml": ("<|im_start|>", "<|im_end|>")}

# Around the output of a {% generation %} block. Normalised text has no control characters.
GENERATION_BEGIN, GENERATION_END = "\x02", "\x03"
MESSAGE = 300  # characters of the message of a template that are shown
SOURCE = 1 << 20  # characters that a template has at most; the longest of public models have 0.02 of it
# What code of a template can raise on messages that it was not written for.
FAILURES = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Generation(Extension):
    """The block {% generation %} of transformers: what it prints is what the assistant wrote."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The block with its body, as a call of `_marked`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{GENERATION_BEGIN}{caller()}{GENERATION_END}"


def render(source: str, conversation: Conversation, variables: Mapping[str, str], date: str, *, prompt: bool) -> str:
    """The text of a conversation, with GENERATION_BEGIN and GENERATION_END around each {% generation %} block.

    source: of the template. variables: bos_token, eos_token and others. date: YEAR-MONTH-DAY, for `strftime_now`.
    prompt: whether the text ends with the beginning of an assistant turn (`add_generation_prompt`).
    Raises BadRecord if the template refuses the conversation, ConfigError if its work has no end.
    """
    template = compiled(source, date)
    messages = [_message(message) for message in conversation.messages]
    tools = None if conversation.tools is None else [_with_json(tool, "parameters") for tool in conversation.tools]
    try:
        with bounded((messages, tools)):
            return template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **variables
            )
    except TooMuchWork:
        raise ConfigError(
            "template: the chat template was stopped, because its loops or texts have no end, or are far longer than "
            "the conversation needs; use another template, from people whom you trust"
        ) from None
    except FAILURES as error:
        raise BadRecord(f"the chat template refuses the conversation: {str(error)[:MESSAGE]}") from error


class JsonText(str):
    """A text that is a JSON object, such as the arguments of a call in the OpenAI format.

    To a template it is a text. Only `tojson`, which would encode it twice, and `items` take it as the object.
    """

    __slots__ = ()

    def items(self) -> Any:
        """As of the object, for templates that write one argument after another."""
        return parse_json(self).items()


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a template gets of a message."""
    given = {key: value for key, value in message.items() if key != UNTRAINED}
    if isinstance(given.get("tool_calls"), list):
        given["tool_calls"] = [_with_json(call, "arguments") for call in given["tool_calls"]]
    if "function_call" in given:
        given["function_call"] = _with_json(given["function_call"], "arguments")
    return given


def _with_json(value: Any, name: str) -> Any:
    """A call or tool whose field with this name is a JsonText if it is the text of a JSON object."""
    if not isinstance(value, dict):
        return value
    changed = {"function": _with_json(value["function"], name)} if isinstance(value.get("function"), dict) else {}
    if isinstance(text := value.get(name), str) and json_object(text) is not None:
        changed[name] = JsonText(text)
    return {**value, **changed}


@lru_cache(maxsize=16)
def compiled(source: str, date: str) -> jinja2.Template:
    """The template. date: YEAR-MONTH-DAY. Raises ConfigError if `source` is not one."""
    if len(source) > SOURCE:
        raise ConfigError(f"template: the chat template has {len(source):,} characters; allowed are {SOURCE:,}")
    environment = Sandbox([Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.filters["items"] = _items
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = datetime.datetime.fromisoformat(date).strftime
    try:
        return environment.counting(source)
    except jinja2.TemplateSyntaxError as error:
        where = f"template: line {error.lineno} of the chat template"
        raise ConfigError(f"{where} is not Jinja2: {str(error.message)[:MESSAGE]}") from error
    except (jinja2.TemplateError, MemoryError, RecursionError, SyntaxError, ValueError) as error:
        raise ConfigError(f"template: the chat template cannot be compiled: {str(error)[:MESSAGE]}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja2's own filter writes. A JsonText is written as its object."""
    return json.dumps(
        _parsed(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _items(value: Any) -> Any:
    """The filter `items` of Jinja2, also of a JsonText."""
    return value.items() if isinstance(value, JsonText) else do_items(value)


def _parsed(value: Any) -> Any:
    """The value with the object of every JsonText in it."""
    if isinstance(value, JsonText):
        return json_object(value)
    if isinstance(value, list | tuple):
        return [*map(_parsed, value)]
    return {key: _parsed(item) for key, item in value.items()} if isinstance(value, dict) else value


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def load_template(name: str | None, tokenizer: Path | None) -> tuple[str, dict[str, str]]:
    """The source of a template, and the special tokens that a template can name: bos_token, eos_token and others.

    name: `template` of the source. tokenizer: data.tokenizer.path, a tokenizer.json or its folder; None: it is trained.
    Raises ConfigError if there is no such template.
    """
    folder = None if tokenizer is None else tokenizer if tokenizer.is_dir() else tokenizer.parent
    described = {} if folder is None else _tokenizer_config(folder / "tokenizer_config.json")
    variables = {}
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = described.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            variables[key] = value
    if name in BUILT_IN:
        return BUILT_IN[name], variables
    if name is not None:
        return _read(Path(name).expanduser()), variables
    if folder is None:
        raise ConfigError(
            "template: null, and a tokenizer that is trained on the text has no chat template; set template: chatml, "
            "or a .jinja file"
        )
    if (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja"), variables
    found = described.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise ConfigError(
            f"template: null, and {folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); set template: chatml, or a .jinja file"
        )
    return found, variables


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        built_in = ", ".join(BUILT_IN)
        raise ConfigError(f"template: cannot read {path}: {error}; name a .jinja file, or {built_in}") from error


def _tokenizer_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        described = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"template: {path} cannot be read: {error}; save the tokenizer again") from error
    if not isinstance(described, dict):
        raise ConfigError(f"template: {path} holds no JSON object; save the tokenizer again")
    return described
