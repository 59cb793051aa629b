"""Conversations: from a record in one of the common formats to a list of messages with role and content.

    messages       {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
    conversations  {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}  (ShareGPT)
    alpaca         {"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [[...], ...]}

    preferences    {"prompt": ..., "chosen": ..., "rejected": ...}, each a text or messages; chosen and rejected may
                   begin with the prompt; without a prompt they are whole conversations, as messages or as
                   "\\n\\nHuman: ...\\n\\nAssistant: ..."

Other fields of a message, such as tool_calls, are kept for the template. Fields that say what is trained on become
the field UNTRAINED of the turns without a loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cdrmix.config import schema_data as schema
from cdrmix.data.sources import training_fields
from cdrmix.data.sources.base import BadRecord, Metadata
from cdrmix.json_text import parse_json

Message = dict[str, Any]
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "bard", "bing"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "ipython"), "tool"),
}
DIALOGUE = re.compile(r"\s*(Human|User):")  # the beginning of a dialogue in one text
ALPACA = ("instruction", "input", "output", "history")  # fields of this format
MAX_DEPTH = 100  # of lists and objects in a turn, far from the depth that Python can follow
UNTRAINED = "untrained"  # field of a turn of the assistant, true: no loss is on it. No template gets it
UNWRITTEN = ("functions", "documents")  # other fields of records that templates elsewhere write, and ours do not get
LISTS = ("messages", "conversations")  # names of the field with the turns, in the order in which they are looked for


@dataclass(frozen=True)
class Conversation:
    """Messages with at least role and content, and the tools that the assistant may call (JSON schemas), or None."""

    messages: list[Message]
    tools: list[Any] | None = None

    def mapped(self, change: Callable[[str], str]) -> Conversation:
        """The conversation with every string of the messages and of the tools changed, also names of fields, but not
        the roles.
        """
        messages = [
            {
                name if name in ("role", "content") else change(name): value
                if name == "role"
                else _mapped(value, change)
                for name, value in message.items()
            }
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
    fields = parse_json(text)
    if "chosen" in fields:
        return Pair(Conversation(**fields["chosen"]), Conversation(**fields["rejected"]))
    return Conversation(**fields)


def pair_of(record: Any, section: schema.PreferencesSource) -> tuple[Pair, Metadata]:
    """The pair of a record, and its other fields. Raises BadRecord with the reason if it has none."""
    rest = dict(checked_record(record))
    names = (section.chosen_field, section.rejected_field)
    for name in names:
        if name not in rest:
            raise BadRecord(f"has no field {name!r}; its fields are: {', '.join(rest) or '(none)'}")
    given = rest.pop(section.prompt_field, None)
    texts = _without_prompt(given, [rest.pop(name) for name in names])
    system, tools = rest.pop("system", None), _tools(rest.pop("tools", None))
    _check_variables(rest)
    trained = training_fields.of_record(rest, _roles(section))
    prompt = _messages(_turns(given, "user"), section, trained) if given else []
    answers = [_messages(_turns(text, "assistant"), section, trained, len(prompt) + 1) for text in texts]
    if not all(messages and messages[-1]["role"] == "assistant" for messages in answers):
        raise BadRecord("its chosen or rejected conversation does not end with a turn of the assistant")
    whole = [_joined_turns(prompt, messages, section.prompt_field) for messages in answers]
    if any(len(messages) == 1 for messages in whole):
        raise BadRecord(
            f"has no prompt: its field {section.prompt_field!r} is missing or empty, and its chosen and rejected "
            "answers are not whole conversations"
        )
    if whole[0][:-1] != whole[1][:-1]:
        raise BadRecord("its chosen and rejected conversations differ before the last turn")
    return Pair(*(Conversation(_with_system(messages, section, system), tools) for messages in whole)), rest


def _without_prompt(prompt: Any, answers: list[Any]) -> list[Any]:
    """The answers; texts that both begin with the text of the prompt without it.

    A text that goes on in the same word, as "apple" after the prompt "a", does not begin with the prompt.
    """
    texts = [answer for answer in answers if isinstance(answer, str)]
    if not isinstance(prompt, str) or not prompt.strip() or len(texts) < len(answers):
        return answers
    rests = [text.removeprefix(prompt) for text in texts]
    same_word = prompt[-1].isalnum() and any(rest[:1].isalnum() for rest in rests)
    begin = all(text.startswith(prompt) and rest.strip() for text, rest in zip(texts, rests, strict=True))
    if same_word or not begin:
        return answers
    return rests if prompt[-1].isspace() else [rest.removeprefix(" ") for rest in rests]


def _joined_turns(prompt: list[Message], answer: list[Message], field: str) -> list[Message]:
    """The whole conversation of a prompt and an answer, which may have the turns of the prompt too."""
    if not prompt:
        return answer
    before = [(message["role"], message["content"].strip()) for message in answer[:-1] if message["role"] != "system"]
    asked = [(message["role"], message["content"].strip()) for message in prompt if message["role"] != "system"]
    if before and asked and (before[: len(asked)] == asked or before[-len(asked) :] == asked):
        system = [message for message in prompt if message["role"] == "system"]
        if answer[0]["role"] != "system":
            return [*system, *answer]
        for message in system:
            _check_system(message["content"], answer, f"its field {field!r}")
        return answer
    last, first = prompt[-1]["role"], answer[0]["role"]
    if first == last or (first == "system" and last != "system"):
        raise BadRecord(
            f"its field {field!r} ends with a turn of the role {last}, and the turns of its answers begin with one of "
            f"the role {first}; an answer is a turn of the assistant, or the whole conversation with the same prompt"
        )
    return [*prompt, *answer]


def _turns(value: Any, role: str) -> list[Any]:
    """The turns of a prompt or an answer: a text, one message or a list of messages."""
    if isinstance(value, str):
        return _dialogue(value, role) or [{"role": role, "content": value}]
    return value if isinstance(value, list) else [value]


def _dialogue(text: str, role: str) -> list[Message]:
    """The turns of a text such as "\\n\\nHuman: Hello\\n\\nAssistant: Hi"; none if it is not one.

    role: user: of a prompt, which ends with "Assistant:". assistant: of a conversation, which ends with what it says.
    """
    first = DIALOGUE.match(text)
    if not first:
        return []
    pieces = re.split(rf"\n\n({first[1]}|Assistant):", f"\n\n{text.lstrip()}")[1:]
    turns = [
        {"role": ROLES[name.lower()], "content": content.strip()}
        for name, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    ends = turns[-1]["role"] == "assistant" and (turns[-1]["content"] == "") == (role == "user")
    return (turns[:-1] if role == "user" else turns) if ends else []


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
    _check_variables(rest)
    trained = training_fields.of_record(rest, _roles(section))
    return Conversation(messages_of(turns, section, system, trained), tools), rest


def _check_variables(record: Mapping[str, Any]) -> None:
    """Raises BadRecord for a record that sets variables of the template, which would give it another text."""
    if record.get("chat_template_kwargs"):
        raise BadRecord(
            "has the field 'chat_template_kwargs', and the template gets the same variables for all conversations; "
            "set them in a .jinja file of your own for `template`, and remove the field"
        )


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
    return _with_system(_messages(turns, section, trained), section, system)


def _messages(turns: Any, section: schema.Turns, trained: bool | None, first: int = 1) -> list[Message]:
    """The messages of a list of turns. trained: whether the record says that it is trained on. first: number of the
    first turn, for messages of errors."""
    if not isinstance(turns, list):
        raise BadRecord(f"its turns are {_kind(turns)}, not a list")
    roles = _roles(section)
    messages = [_message(turn, number, roles) for number, turn in enumerate(turns, first)]
    for number, message in enumerate(messages, first):
        _settle_training(message, number, section, trained)
    return messages


def _with_system(messages: list[Message], section: schema.Turns, system: Any) -> list[Message]:
    """The messages, after the system prompt if there is none among them."""
    if system is not None and not isinstance(system, str):
        raise BadRecord(f"its system prompt is {_kind(system)}, not a string")
    prompt = system or section.system
    if prompt and messages and all(message["role"] != "system" for message in messages):
        return [{"role": "system", "content": prompt}, *messages]
    if system and messages:
        _check_system(system, messages, "its field 'system'")
    return messages


def _check_system(prompt: str, messages: Iterable[Message], where: str) -> None:
    """Raises BadRecord if a system prompt is not that of the messages, of which only one would be written."""
    if all(message["role"] != "system" or message["content"].strip() != prompt.strip() for message in messages):
        raise BadRecord(f"the system prompt in {where} is not that of its turns; keep the one that is meant")


def _format_of(record: Mapping[str, Any], name: str | None) -> str:
    names = LISTS if name is None else (name,)
    found = [known for known in names if record.get(known)] or [known for known in names if known in record]
    found = [known for known in found if record[known] is not None]
    if len(found) > 1 and record[found[0]] != record[found[1]]:
        raise BadRecord(f"has the fields {' and '.join(found)}; set `format` of the source to the one that is meant")
    if found:
        return found[0]
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
    history = record.pop("history", None) or []
    pairs = history if isinstance(history, list) else [history]
    if not all(isinstance(earlier, list) and len(earlier) == 2 for earlier in pairs):
        raise BadRecord("its field 'history' is not a list of pairs of instruction and output")
    turns = []
    for earlier in pairs:
        turns += [{"role": "user", "content": earlier[0]}, {"role": "assistant", "content": earlier[1]}]
    user = f"{instruction}\n{extra}" if extra else instruction
    return [*turns, {"role": "user", "content": user}, {"role": "assistant", "content": output}]


def _roles(section: schema.Turns) -> dict[str, str]:
    return {**ROLES, **section.roles}


def _message(turn: Any, number: int, roles: Mapping[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise BadRecord(f"turn {number} is {_kind(turn)}, not an object")
    _check_depth(turn, f"turn {number}")
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
        given = {name: value for name, value in part.items() if name not in ("type", "text") and value is not None}
        if training_fields.taken_from_turn(given, number) is False:
            raise BadRecord(
                f"turn {number} has a part that is to have no loss; only a whole turn can be left out of it"
            )
        texts.append(text)
    return "".join(texts)


def _tools(tools: Any) -> list[Any] | None:
    found = None if tools is None else _objects(tools, "its field 'tools'") or None
    _check_depth(found, "its field 'tools'")
    return found


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
        return parse_json(text) if text.strip() else None
    except ValueError as error:
        raise BadRecord(f"{what} is not JSON: {error}") from error


def json_object(text: str) -> dict[str, Any] | None:
    """The object of a JSON text. None if it is none, or has more than MAX_DEPTH lists and objects in each other."""
    try:
        value = parse_json(text)
        _check_depth(value, "it")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _check_depth(value: Any, where: str, left: int = MAX_DEPTH) -> None:
    """Raises BadRecord for a value of more than MAX_DEPTH lists and objects in each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        if isinstance(item, dict | list):
            if not left:
                raise BadRecord(f"{where} has more than {MAX_DEPTH} lists and objects in each other")
            _check_depth(item, where, left - 1)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    return value


def _kind(value: Any) -> str:
    names = {type(None): "missing", dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number")
