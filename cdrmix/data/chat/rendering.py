"""Rendering: from a conversation to its text, with the positions of special tokens and of what is trained on.

Special tokens. Only the template writes special tokens. The name of one in the contents is marked before the template
runs, and stays text. So no user can end a turn or begin another.

Trained spans. A template with {% generation %} blocks says itself what the assistant wrote. For other templates, the
conversation is rendered up to each assistant turn (with the generation prompt) and up to its end: the difference is
trained on, up to its last special token if only white space follows. Each of these texts must begin the next one. A
template that writes earlier turns differently later, such as one that removes the reasoning of earlier turns, is
refused, because the tokens of an earlier turn would have no unique text.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

from cdrmix.config import schema_data as schema
from cdrmix.data.chat import template
from cdrmix.data.chat.template import GENERATION_BEGIN, GENERATION_END
from cdrmix.data.chat.visibility import hidden_parts, shows_nothing
from cdrmix.data.objectives import special_tokens
from cdrmix.data.sources.base import BadRecord
from cdrmix.data.sources.conversations import Conversation, Pair
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.json_text import parse_json

Span = tuple[int, int]
RULES = 2  # increased when a conversation gives another text or loss. 2: weights of turns, arguments that are JSON

# Around the name of a special token in the contents. Normalised text does not have these characters.
TEXT_BEGIN, TEXT_END = "\ufffe", "\uffff"
PROBE = Conversation([{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}])


@dataclass(frozen=True)
class Rendered:
    """A text to train on. Positions are in characters, and spans are (start, stop) in ascending order.

    special: the special tokens that the template wrote. trained: what the loss is on. prompt: end of the text before
    the first assistant turn. second: where a second document begins, as the rejected answer of a pair; 0: nowhere.
    """

    text: str
    special: tuple[Span, ...]
    trained: tuple[Span, ...]
    prompt: int
    second: int = 0

    def marks(self) -> str:
        """Everything but the text, as JSON."""
        return json.dumps([self.special, self.trained, self.prompt, self.second], separators=(",", ":"))

    @classmethod
    def from_marks(cls, text: str, marks: str) -> Self:
        """The object whose `marks` these are."""
        special, trained, prompt, second = parse_json(marks)
        return cls(text, tuple(map(tuple, special)), tuple(map(tuple, trained)), prompt, second)

    def plain(self) -> list[str]:
        """The pieces of the text between the special tokens."""
        borders = [0, *(position for span in self.special for position in span), len(self.text)]
        return [self.text[start:stop] for start, stop in zip(borders[::2], borders[1::2], strict=True) if start < stop]

    def documents(self) -> list[Rendered]:
        """The one or two documents of the text, each by itself."""
        if not self.second:
            return [self]
        borders = (0, self.second, len(self.text))
        return [
            Rendered(self.text[low:high], _within(self.special, low, high), _within(self.trained, low, high), 0)
            for low, high in pairwise(borders)
        ]


class Unmarked(NamedTuple):
    """The output of a template without marks, its special tokens, and its {% generation %} blocks."""

    text: str
    special: tuple[Span, ...]
    generated: tuple[Span, ...]


@dataclass(frozen=True)
class Renderer:
    """A template with all that it needs. It can be pickled for other processes.

    key: of the configuration, for messages. special: names of all special tokens of the tokenizer, sorted. variables:
    bos_token and others, for the template. train_on: as `data.source.train_on`.
    """

    key: str
    source: str
    special: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    date: str
    train_on: str

    def render(self, conversation: Conversation) -> Rendered:
        """The text of a conversation with at least one turn to train on (`Conversation.trained_turns`).

        Raises BadRecord if the template refuses it, ConfigError if the template cannot be masked.
        """
        marked = conversation.mapped(lambda text: _special_names(self.special).sub(_mark, text))
        whole = self._unmarked(marked)
        if marked != conversation and self._unmarked(conversation).text != whole.text:
            raise BadRecord("the chat template treats names of special tokens in the contents differently from text")
        assistant = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        turns = conversation.trained_turns(self.train_on)
        assert turns, "a conversation without a turn to train on is dropped before"
        if self.train_on == "all":
            return Rendered(whole.text, whole.special, ((0, len(whole.text)),), 0)
        if self.has_generation_blocks:
            spans = self._blocks(marked, assistant, turns, whole)
            prompt = whole.generated[0][0] if whole.generated else 0
        else:
            spans = [self._turn(marked, index, whole) for index in turns]
            prompt = spans[0][0] if turns[0] == assistant[0] else len(self._prompt(marked, assistant[0]))
        chosen = tuple(span for span in spans if span[0] < span[1])
        if not chosen:
            raise ConfigError(
                f"{self.key}.template: the template marks nothing of {_short(conversation)} as written by the "
                "assistant, so nothing would be trained on; give it {% generation %} blocks around the assistant's text"
            )
        return Rendered(whole.text, whole.special, chosen, prompt)

    def render_pair(self, pair: Pair) -> Rendered:
        """The texts of two answers to one prompt, as two documents of one text. Raises as `render`."""
        first, second = self.render(pair.chosen), self.render(pair.rejected)
        shift = len(first.text)

        def joined(one: tuple[Span, ...], other: tuple[Span, ...]) -> tuple[Span, ...]:
            return (*one, *((start + shift, stop + shift) for start, stop in other))

        return Rendered(
            first.text + second.text,
            joined(first.special, second.special),
            joined(first.trained, second.trained),
            first.prompt,
            shift,
        )

    def hidden_fields(self, conversation: Conversation | Pair, rendered: Rendered) -> set[str]:
        """The names of the fields of turns, and `tools`, that the template does not write, or only in part.

        rendered: the result for the conversation. Raises BadRecord for a turn to train on of which nothing is written.
        """
        if isinstance(conversation, Pair):
            pair = zip((conversation.chosen, conversation.rejected), rendered.documents(), strict=True)
            return set().union(*(self.hidden_fields(*each) for each in pair))
        hidden = hidden_parts(conversation, rendered.text, lambda changed: self._unmarked(changed).text)
        for turn in conversation.trained_turns(self.train_on):
            if shows_nothing(turn, conversation, hidden):
                names = dict.fromkeys(part.name for part in hidden if part.turn == turn)
                raise BadRecord(
                    f"the chat template writes nothing of turn {turn + 1} ({', '.join(names)}), which is to be trained "
                    "on; use a template that writes it, or give the turn the weight 0"
                )
        return {part.name for part in hidden}

    def probe(self) -> None:
        """Raises ConfigError if the template cannot render and mask a question with its answer."""
        try:
            rendered = self.render(PROBE)
        except BadRecord as error:
            raise ConfigError(f"{self.key}.template: {error} (a user turn and an assistant turn)") from error
        if not any("Answer" in rendered.text[start:stop] for start, stop in rendered.trained):
            raise ConfigError(
                f"{self.key}.template: the part that would be trained on does not have the text of the assistant; "
                "give the template {% generation %} blocks around the assistant's text"
            )

    @property
    def has_generation_blocks(self) -> bool:
        """Whether the template says itself what the assistant wrote."""
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def identity(self) -> list[object]:
        """JSON values that determine the result for a conversation."""
        return [RULES, *(value for name, value in dataclasses.asdict(self).items() if name != "key")]

    def _unmarked(self, conversation: Conversation, *, prompt: bool = False) -> Unmarked:
        try:
            raw = template.render(self.source, conversation, dict(self.variables), self.date, prompt=prompt)
        except ConfigError as error:
            raise ConfigError(f"{self.key}.{error}") from error
        pieces: list[str] = []
        special: list[Span] = []
        borders: list[int] = []
        position = end = 0
        for match in _marks(self.special).finditer(raw):
            pieces.append(raw[end : match.start()])
            position += match.start() - end
            end = match.end()
            kept = match["text"] or match["special"] or ""
            if match["special"]:
                special.append((position, position + len(kept)))
            elif match["border"]:
                borders.append(position)
            pieces.append(kept)
            position += len(kept)
        pieces.append(raw[end:])
        return Unmarked("".join(pieces), tuple(special), tuple(zip(borders[::2], borders[1::2], strict=True)))

    def _prompt(self, marked: Conversation, turn: int) -> str:
        """The text before what the assistant writes in its turn with this index."""
        before = dataclasses.replace(marked, messages=marked.messages[:turn])
        try:
            return self._unmarked(before, prompt=True).text
        except BadRecord:
            if turn:
                raise
            return ""  # many templates refuse a conversation without messages

    def _blocks(self, marked: Conversation, assistant: list[int], turns: list[int], whole: Unmarked) -> list[Span]:
        """The {% generation %} blocks of some of the assistant turns. A turn may have several, or none.

        assistant: the indices of all assistant turns. turns: those of which the blocks are wanted.
        """
        if turns == assistant:
            return [*whole.generated]
        following = assistant[assistant.index(turns[0]) :]
        borders = [self._blocks_before(marked, turn) for turn in following] + [len(whole.generated)]
        if borders != sorted(borders):
            raise BadRecord("the chat template writes other {% generation %} blocks of a turn when turns follow")
        of_turns = dict(zip(following, pairwise(borders), strict=True))
        return [span for turn in turns for span in whole.generated[slice(*of_turns[turn])]]

    def _blocks_before(self, marked: Conversation, turn: int) -> int:
        before = dataclasses.replace(marked, messages=marked.messages[:turn])
        return len(self._unmarked(before, prompt=True).generated) if turn else 0

    def _turn(self, marked: Conversation, turn: int, whole: Unmarked) -> Span:
        """The trained span of the assistant turn with this index, by the difference of two prefixes."""
        after = dataclasses.replace(marked, messages=marked.messages[: turn + 1])
        prefix = self._prompt(marked, turn)
        text = whole.text if len(after.messages) == len(marked.messages) else self._unmarked(after).text
        if not text.startswith(prefix) or not whole.text.startswith(text):
            raise ConfigError(
                f"{self.key}.template: the template writes turn {turn + 1} of {_short(marked)} differently when turns "
                "follow, so its tokens cannot be told apart; set train_on: last, or give the template "
                "{% generation %} blocks around the assistant's text"
            )
        start, stop = len(prefix), len(text)
        ends = [end for _, end in whole.special if start < end <= stop]
        return start, ends[-1] if ends and not text[ends[-1] :].strip() else stop


def make_renderers(data: schema.Data, tokenizer: TextTokenizer | None, path: Path | None) -> dict[str, Renderer]:
    """The renderer of each domain with conversations, after a probe of its template.

    tokenizer: the one at `path`; None: one is trained, with the special tokens of the templates.
    Raises ConfigError if there is no template, or it cannot be masked.
    """
    special: list[str] = []
    if data.has_conversations():
        special = (
            special_names(tokenizer.json_bytes)
            if tokenizer is not None
            else [_end_of_text(data), *special_tokens(data.objectives), *template_tokens(data)]
        )
    return {
        name: _make_renderer(
            domain.source,
            _train_on(domain.source),
            f"data.domains.{name}.source" if data.domains else "data.source",
            tuple(special),
            path,
            _end_of_text(data) if tokenizer is None else tokenizer.end_of_text,
        )
        for name, domain in data.all_domains().items()
        if isinstance(domain.source, schema.Turns)
    }


def _make_renderer(
    section: schema.Turns, train_on: str, key: str, special: tuple[str, ...], tokenizer: Path | None, end_of_text: str
) -> Renderer:
    try:
        datetime.date.fromisoformat(section.date)
    except ValueError as error:
        raise ConfigError(f"{key}.date={section.date!r}: {error}; write YEAR-MONTH-DAY") from error
    try:
        source, variables = template.load_template(section.template, tokenizer)
        template.compiled(source, section.date)
    except ConfigError as error:
        raise ConfigError(f"{key}.{error}") from error
    if tokenizer is None:
        variables = {"bos_token": end_of_text, "eos_token": end_of_text}
    names = tuple(sorted(special, key=lambda name: (-len(name), name)))
    renderer = Renderer(key, source, names, tuple(sorted(variables.items())), section.date, train_on)
    renderer.probe()
    return renderer


def _within(spans: tuple[Span, ...], low: int, high: int) -> tuple[Span, ...]:
    """The spans that start in low .. high - 1, by their positions after `low`."""
    return tuple((start - low, stop - low) for start, stop in spans if low <= start < high)


def _end_of_text(data: schema.Data) -> str:
    assert data.tokenizer.end_of_text is not None, "the rules of the configuration refuse it for a trained tokenizer"
    return data.tokenizer.end_of_text


def _train_on(section: schema.Turns) -> str:
    if isinstance(section, schema.ChatSource):
        return section.train_on
    return "assistant" if type(section) is schema.ChatTasksSource else "last"  # of pairs the answers


def end_of_turn(source: str, tokenizer: TextTokenizer) -> int | None:
    """The id of the special token with which a template ends an assistant turn; None if it has none.

    source: of the template. tokenizer: of the model; its end-of-text is the template's bos_token and eos_token.
    """
    names = tuple(sorted(special_names(tokenizer.json_bytes), key=lambda name: (-len(name), name)))
    variables = (("bos_token", tokenizer.end_of_text), ("eos_token", tokenizer.end_of_text))
    try:
        rendered = Renderer("chat_template", source, names, variables, "2024-07-26", "last").render(PROBE)
    except (BadRecord, ConfigError):
        return None  # it is a template that no conversation of this package was trained with
    ends = [span for span in rendered.special if span[1] == rendered.trained[-1][1]]
    return tokenizer.special_id(rendered.text[slice(*ends[0])]) if ends else None


def template_tokens(data: schema.Data) -> list[str]:
    """The special tokens that the templates of all domains ask of the tokenizer."""
    tokens: list[str] = []
    for domain in data.all_domains().values():
        if isinstance(domain.source, schema.Turns):
            tokens += template.SPECIAL_TOKENS.get(domain.source.template or "", ())
            tokens += domain.source.special_tokens
    return list(dict.fromkeys(tokens))


def special_names(json_bytes: bytes) -> list[str]:
    """The names of the special tokens of a tokenizer.json."""
    return [token["content"] for token in parse_json(json_bytes)["added_tokens"] if token["special"]]


def _mark(match: re.Match[str]) -> str:
    return f"{TEXT_BEGIN}{match[0]}{TEXT_END}"


@lru_cache(maxsize=16)
def _special_names(special: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the name of a special token, the longest at a position. special: longest first."""
    return re.compile("|".join(map(re.escape, special)) or "(?!)")


@lru_cache(maxsize=16)
def _marks(special: tuple[str, ...]) -> re.Pattern[str]:
    """Matches a marked name in the contents, a special token of the template, a border of a generation block, and a
    mark alone, which is left over when a template cuts a marked name.
    """
    name = _special_names(special).pattern
    return re.compile(
        f"{TEXT_BEGIN}(?P<text>{name}){TEXT_END}|(?P<special>{name})|(?P<border>[{GENERATION_BEGIN}{GENERATION_END}])"
        f"|[{TEXT_BEGIN}{TEXT_END}]"
    )


def _short(conversation: Conversation) -> str:
    """The beginning of a conversation, for messages."""
    text = conversation.contents().replace("\n", " ")
    return f"the conversation {text[:60] + '...' if len(text) > 60 else text!r}"
