"""Visibility: which parts of a conversation its chat template does not write.

Every part (the content of a turn, its reasoning, its calls, another field with text, a tool) gets a word of its own at
its end. The parts whose word is in the text that the template makes of this are written. Whether the others change the
text at all is then tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cdrmix.data.sources.base import BadRecord
from cdrmix.data.sources.conversations import Conversation, json_object

LABELS = {"role", "id", "name", "type", "tool_call_id"}  # fields of a turn that are not its contents
CALLS = ("tool_calls", "function_call")
Change = Callable[[Any, str, bool], Any]  # of a value, with a word; the third: whether keys are texts too
WORD = re.compile("xq[a-j]{1,12}qx", re.IGNORECASE)  # a template may change the case


@dataclass(frozen=True)
class Part:
    """A part of a conversation. turn: index of its message; None: of the tools. name: of the field.

    path: keys and indices from the message, or from the list of tools. keys: whether keys of mappings are texts too.
    """

    turn: int | None
    name: str
    path: tuple[str | int, ...]
    keys: bool = False


def hidden_parts(conversation: Conversation, text: str, render: Callable[[Conversation], str]) -> list[Part]:
    """The parts that `render` does not write. text: what it makes of the conversation.

    A content that is written in part, as by templates that leave out the reasoning in it, is a part with the name
    "content (in part)".
    """
    parts = [*_parts(conversation)]

    def rendered(some: Sequence[Part], change: Change = _ended) -> str | None:
        """None: the template refuses it, so it reads these parts."""
        try:
            return render(_with_words(conversation, parts, some, change))
        except BadRecord:
            return None

    def without_effect(some: list[Part], change: Change = _ended) -> list[Part]:
        if len(some) > 1 and rendered(some, change) == text:
            return some
        return [part for part in some if rendered([part], change) == text]

    marked = rendered(parts)
    found = set() if marked is None else {word.lower() for word in WORD.findall(marked)}
    hidden = without_effect([part for number, part in enumerate(parts) if _word(number) not in found])
    # a template may write the beginning alone
    cut = {part for part in hidden if part.name == "content"}
    cut -= {*without_effect([*cut], _replaced)}
    of_content = {part.turn: part for part in parts if part.name == "content"}
    cut |= {of_content[turn] for turn in _not_whole(conversation, text) if of_content[turn] not in hidden}
    return [part for part in hidden if part not in cut] + [replace(part, name="content (in part)") for part in cut]


def shows_nothing(turn: int, conversation: Conversation, hidden: Collection[Part]) -> bool:
    """Whether a turn has parts, and all are hidden."""
    parts = {part for part in _parts(conversation) if part.turn == turn}
    return bool(parts) and parts <= set(hidden)


def _parts(conversation: Conversation) -> Iterator[Part]:
    for turn, message in enumerate(conversation.messages):
        for name, value in message.items():
            if name in CALLS:
                calls = value if isinstance(value, list) else [value]
                for number, call in enumerate(calls):
                    path: tuple[str | int, ...] = (name, number) if isinstance(value, list) else (name,)
                    yield from (Part(turn, name, *place) for place in _of_function(call, path, "arguments"))
            elif name not in LABELS and _has_text(value):
                yield Part(turn, name, (name,))
    for number, tool in enumerate(conversation.tools or []):
        yield from (Part(None, "tools", *place) for place in _of_function(tool, (number,), "name"))


def _of_function(value: Any, path: tuple[str | int, ...], *names: str) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    """The places of the name and of the other wanted fields of a call or tool; its own place if it has no name."""
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict) or not _has_text(function.get("name")):
        if _has_text(value):
            yield path, False
        return
    inner = (*path, "function") if function is not value else path
    for name in dict.fromkeys(("name", *names)):
        if _has_text(function.get(name), keys=True):
            yield (*inner, name), name == "arguments"


def _has_text(value: Any, *, keys: bool = False) -> bool:
    if isinstance(value, str):
        return bool(value.strip()) and not (keys and value.strip() == "{}")
    if isinstance(value, dict):
        return bool(keys and value) or any(_has_text(item) for item in value.values())
    return isinstance(value, list) and any(map(_has_text, value))


def _word(number: int) -> str:
    """A word in letters, the same in upper and lower case."""
    letters = str(number).translate(str.maketrans("0123456789", "abcdefghij"))
    return f"xq{letters}qx"


def _with_words(
    conversation: Conversation, parts: Sequence[Part], some: Sequence[Part], change: Change
) -> Conversation:
    messages, tools = [*conversation.messages], [*(conversation.tools or [])]
    wanted = set(some)
    for number, part in enumerate(parts):
        if part in wanted:
            changed = partial(_with_word, change, _word(number), part.keys)
            if part.turn is None:
                tools = _changed(tools, part.path, changed)
            else:
                messages[part.turn] = _changed(messages[part.turn], part.path, changed)
    return Conversation(messages, tools or None)


def _with_word(change: Change, word: str, keys: bool, value: Any) -> Any:
    return change(value, word, keys)


def _changed(value: Any, path: Sequence[str | int], change: Callable[[Any], Any]) -> Any:
    """A copy with the item at a path changed."""
    if not path:
        return change(value)
    copy = value.copy()
    copy[path[0]] = _changed(value[path[0]], path[1:], change)
    return copy


def _ended(value: Any, word: str, keys: bool) -> Any:
    """The value with the word at the end of every text, and of every key if `keys`. A text may be JSON."""
    if isinstance(value, str):
        if keys and (parsed := json_object(value)) is not None:
            return json.dumps(_ended(parsed, word, keys), ensure_ascii=False)
        return value + word if value.strip() else value
    if isinstance(value, list):
        return [_ended(item, word, keys) for item in value]
    if isinstance(value, dict):
        return {key + word if keys else key: _ended(item, word, keys) for key, item in value.items()}
    return value


def _replaced(value: Any, word: str, keys: bool) -> str:
    return word


def _not_whole(conversation: Conversation, text: str) -> Iterator[int]:
    """The turns whose contents are not in the text, neither as they are nor as JSON."""
    text = text.lower()
    for turn, message in enumerate(conversation.messages):
        content = message["content"].strip().lower()
        forms = (content, *(json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (True, False)))
        if not any(form in text for form in forms):
            yield turn
