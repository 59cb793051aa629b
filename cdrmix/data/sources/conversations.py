"""Conversations: from a record in one of the common formats to a list of messages with role and content.

    messages       {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
    conversations  {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}  (ShareGPT)
    alpaca         {"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [[...], ...]}

    preferences    {"prompt": ..., "chosen": ..., "rejected": ...}, each a text or messages

Other fields of a message, such as tool_calls, are kept for the template. Fields that say what is trained on become
the field UNTRAINED of the turns without a loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cdrmix.config import schema_data as schema
from cdrmix.data.sources import training_fields
from cdrmix.data.sources.base import BadRecord, Metadata

Message = dict[str, Any]
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "bard", "bing"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "ipython"), "tool"),
}
UNTRAINED = "untrained"  # field of a turn of the assistant, true: no loss is on it. No template gets it
LISTS = ("messages", "conversations")  # names of the field with the turns, in the order in which they are looked for


@dataclass(frozen=True)
class Conversation:
    """Messages with at least role and content, and the tools that the assistant may call (JSON schemas), or None."""

    messages: list[Message]
    tools: list[Any] | None = None

    def mapped(self, change: Callable[[str], str]) -> Conversation:
        """The conversation with every string of the contents and of the tools changed, but not the roles."""
        messages = [
            {key: value if key == "role" else _mapped(value, change) for key, value in message.items()}
            for message in self.messages
        ]
        return Conversation(messages, _mapped(self.tools, change))

    def trained_turns(self, which: str) -> list[int]:
        """The indices of the turns that are trained on. which: `data.source.train_on`; with all, the assistant's."""
        turns = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [turn for turn in turns[-1 if which == "last" else 0 :] if not self.messages[turn].get(UNTRAINED)]

    def contents(self) -> str:
        """The contents of all turns, separated by empty lines: the text without the template."""
        return "\n\n".join(message["content"] for message in self.messages if message["content"])

    def to_json(self) -> str:
        """The conversation as one line of JSON."""
        return json.dumps(vars(self), ensure_ascii=False)


@dataclass(frozen=True)
class Pair:
    """Two conversations that differ in the last turn, the assistant's: the better and the worse answer to a prompt."""

    chosen: Conversation
    rejected: Conversation

    def mapped(self, change: Callable[[str], str]) -> Pair:
        """The pair with every string of both contents changed."""
        return Pair(self.chosen.mapped(change), self.rejected.mapped(change))

    def contents(self) -> str:
        """The contents of the chosen conversation and the rejected answer."""
        return f"{self.chosen.contents()}\n\n{self.rejected.messages[-1]['content']}"

    def to_json(self) -> str:
        """The pair as one line of JSON."""
        return json.dumps({name: vars(conversation) for name, conversation in vars(self).items()}, ensure_ascii=False)


def from_json(text: str) -> Conversation | Pair:
    """The conversation or pair of `to_json`."""
    fields = json.loads(text)
    if "chosen" in fields:
        return Pair(Conversation(**fields["chosen"]), Conversation(**fields["rejected"]))
    return Conversation(**fields)


def pair_of(record: Any, section: schema.PreferencesSource) -> tuple[Pair, Metadata]:
    """The pair of a record, and its other fields. Raises BadRecord with the reason if it has none."""
    rest = dict(checked_record(record))
    for name in (section.chosen_field, section.rejected_field):
        if name not in rest:
            raise BadRecord(f"has no field {name!r}; its fields are: {', '.join(rest) or '(none)'}")
    chosen, rejected = (_turns(rest.pop(name), "assistant") for name in (section.chosen_field, section.rejected_field))
    prompt = _turns(rest.pop(section.prompt_field, None) or [], "user")
    system, tools = rest.pop("system", None), _tools(rest.pop("tools", None))
    trained = training_fields.of_record(rest, _roles(section))
    answers = [
        Conversation(messages_of([*prompt, *turns], section, system, trained), tools) for turns in (chosen, rejected)
    ]
    for conversation in answers:
        if conversation.messages[-1]["role"] != "assistant":
            raise BadRecord("its chosen or rejected conversation does not end with a turn of the assistant")
    if answers[0].messages[:-1] != answers[1].messages[:-1]:
        raise BadRecord("its chosen and rejected conversations differ before the last turn")
    return Pair(*answers), rest


def _turns(value: Any, role: str) -> list[Any]:
    """The turns of a prompt or an answer: a text, one message or a list of messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value if isinstance(value, list) else [value]


def conversation_of(record: Any, section: schema.ChatSource) -> tuple[Conversation, Metadata]:
    """The conversation of a record, and its other fields. Raises BadRecord with the reason if it has none."""
    record = checked_record(record)
    kind = section.format if section.format != "auto" else _format_of(record, section.field)
    rest = dict(record)
    if kind == "alpaca":
        turns = _alpaca(rest)
    else:
        name = section.field or kind
        if name not in record:
            raise BadRecord(f"has no field {name!r}; its fields are: {', '.join(record) or '(none)'}")
        turns = rest.pop(name)
    system = rest.pop("system", None)
    tools = _tools(rest.pop("tools", None))
    trained = training_fields.of_record(rest, _roles(section))
    return Conversation(messages_of(turns, section, system, trained), tools), rest


def checked_record(record: Any) -> dict[str, Any]:
    """The record, a mapping; raises BadRecord for anything else."""
    if not isinstance(record, dict):
        raise BadRecord(f"is a JSON {type(record).__name__}, not an object")
    return record


def messages_of(turns: Any, section: schema.Turns, system: Any = None, trained: bool | None = None) -> list[Message]:
    """The messages of a list of turns, in either notation, with the system prompt if there is none among them.

    system: of the record; without one, section.system. trained: whether the record says that it is trained on.
    Raises BadRecord for a turn that is not one.
    """
    if not isinstance(turns, list):
        raise BadRecord(f"its turns are {_kind(turns)}, not a list")
    roles = _roles(section)
    messages = [_message(turn, number, roles) for number, turn in enumerate(turns, 1)]
    for number, message in enumerate(messages, 1):
        _settle_training(message, number, section, trained)
    if system is not None and not isinstance(system, str):
        raise BadRecord(f"its system prompt is {_kind(system)}, not a string")
    prompt = system or section.system
    if prompt and messages and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": prompt})
    return messages


def _format_of(record: Mapping[str, Any], name: str | None) -> str:
    for known in LISTS if name is None else (name,):
        if known in record:
            return known
    if "instruction" in record and "output" in record:
        return "alpaca"
    wanted = f"{name!r}" if name else "'messages', 'conversations', or 'instruction' and 'output'"
    raise BadRecord(f"has no field {wanted}; its fields are: {', '.join(record) or '(none)'}")


def _alpaca(record: dict[str, Any]) -> list[Message]:
    """The turns of a record of instruction, input and output; these fields are taken out of it."""
    instruction, extra, output = (record.pop(name, None) for name in ("instruction", "input", "output"))
    for name, value in (("instruction", instruction), ("output", output)):
        if not isinstance(value, str):
            raise BadRecord(f"its field {name!r} is {_kind(value)}, not a string")
    if extra is not None and not isinstance(extra, str):
        raise BadRecord(f"its field 'input' is {_kind(extra)}, not a string")
    turns = []
    for earlier in record.pop("history", None) or []:
        if not isinstance(earlier, list) or len(earlier) != 2:
            raise BadRecord("its field 'history' is not a list of pairs of instruction and output")
        turns += [{"role": "user", "content": earlier[0]}, {"role": "assistant", "content": earlier[1]}]
    user = f"{instruction}\n{extra}" if extra else instruction
    return [*turns, {"role": "user", "content": user}, {"role": "assistant", "content": output}]


def _roles(section: schema.Turns) -> dict[str, str]:
    return {**ROLES, **section.roles}


def _message(turn: Any, number: int, roles: Mapping[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise BadRecord(f"turn {number} is {_kind(turn)}, not an object")
    # Parquet gives every message the fields of all, null where it has none.
    message = {key: value for key, value in turn.items() if value is not None}
    role = message.pop("role", None) or message.pop("from", None)
    if not isinstance(role, str) or role not in roles:
        raise BadRecord(
            f"turn {number} has the role {role!r}; known: {', '.join(roles)}; add it to `roles` of the source"
        )
    content = message.pop("content", None)
    content = message.pop("value", None) if content is None else content
    if message.get("tool_calls"):
        message["tool_calls"] = _objects(message["tool_calls"], f"the field 'tool_calls' of turn {number}")
        content = "" if content is None else content
    if isinstance(content, list):
        content = _joined(content, number)
    if not isinstance(content, str):
        raise BadRecord(f"the content of turn {number} is {_kind(content)}, not a string")
    return {"role": roles[role], "content": content, **message}


def _settle_training(message: Message, number: int, section: schema.Turns, record: bool | None) -> None:
    """Replaces the fields that say whether a turn is trained on by UNTRAINED. record: what the record says.

    Raises BadRecord if they ask for what the configuration does not do.
    """
    turn = training_fields.taken_from_turn(message, number)
    untrained = False in (turn, record)
    everything = isinstance(section, schema.ChatSource) and section.train_on == "all"
    if everything and untrained:
        raise BadRecord(f"turn {number} is to have no loss, and train_on: all puts the loss on every token")
    if message["role"] == "assistant":
        message.update({UNTRAINED: True} if untrained else {})
    elif turn and not everything:
        raise BadRecord(
            f"turn {number} of the role {message['role']} is to be trained on, but the loss is on turns of the "
            "assistant; set the field to 0 there, or leave it out"
        )


def _joined(parts: Iterable[Any], number: int) -> str:
    """The text of a content that is a list of parts of type text."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise BadRecord(f"turn {number} has a part that is not text; only text can be trained on")
        texts.append(text)
    return "".join(texts)


def _tools(tools: Any) -> list[Any] | None:
    return None if tools is None else _objects(tools, "its field 'tools'") or None


def _objects(value: Any, what: str) -> list[Any]:
    """A list of calls or tools. The list and its items may be JSON texts, as in data sets whose schemas differ."""
    items = _parsed(value, what) if isinstance(value, str) else value
    if items is None:
        return []
    if not isinstance(items, list):
        raise BadRecord(f"{what} is {_kind(items)}, not a list")
    return [_object(item, what) for item in items]


def _object(item: Any, what: str) -> Any:
    """A call or tool. It, or its field `function`, may be the JSON text of an object."""
    if isinstance(item, str) and item.lstrip().startswith("{"):
        return _parsed(item, what)
    if isinstance(item, dict) and "function" in item:
        return {**item, "function": _object(item["function"], what)}
    return item


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{what} is not JSON: {error}") from error


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def _kind(value: Any) -> str:
    names = {type(None): "missing", dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number")
