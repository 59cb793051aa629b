"""Generated tasks as sources: as texts, as conversations of a question and its answer, and as pairs of answers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from cdrmix.config import schema_data
from cdrmix.data.sources.base import SOURCES, Metadata, Record, Source
from cdrmix.data.sources.conversations import Conversation, Pair, messages_of


@SOURCES("tasks")
class Tasks(Source):
    """Generated examples of tasks. They depend only on the section."""

    kind = "tasks"

    def __init__(self, section: schema_data.TasksSource, max_expansion: int = 1) -> None:
        self.section = section
        self.parse = parse_example

    def identity(self) -> list[Any]:
        return [self.section.model_dump()]

    def describe(self) -> str:
        return f"{self.section.documents:,} generated examples ({', '.join(self.section.tasks)})"

    def parts(self) -> list[str]:
        return ["tasks"]

    def records(self, part: str, checkpoint: Any = None) -> Iterator[Record]:
        from cdrmix.data.tasks import generate

        for number, (where, text, metadata) in enumerate(generate(self.section), 1):
            yield Record(number, (text, {**metadata, "example": where}), len(text))


@SOURCES("chat_tasks")
class ChatTasks(Tasks):
    """The examples of `Tasks` as conversations of a question and its answer, as JSON."""

    kind = "chat_tasks"

    def __init__(self, section: schema_data.ChatTasksSource, max_expansion: int = 1) -> None:
        super().__init__(section)
        self.parse = partial(parse_chat_example, section=section)


def parse_chat_example(raw: tuple[str, Metadata], section: schema_data.ChatTasksSource) -> tuple[str, Metadata]:
    """The conversation of a generated example as JSON, and the metadata of the example."""
    text, metadata = raw
    prompt = metadata["prompt"]
    return _conversation(prompt, text.removeprefix(prompt), section).to_json(), metadata


@SOURCES("task_preferences")
class TaskPreferences(Tasks):
    """The examples of `Tasks` as pairs: the right answer, and that of the next example of the task with another one.

    Examples without such a later example are left out.
    """

    kind = "task_preferences"

    def __init__(self, section: schema_data.TaskPreferencesSource, max_expansion: int = 1) -> None:
        super().__init__(section)
        self.parse = partial(parse_preference, section=section)

    def records(self, part: str, checkpoint: Any = None) -> Iterator[Record]:
        waiting: dict[str, list[Record]] = {}  # of each task its last examples, which have the same answer
        for record in super().records(part):
            text, metadata = record.raw
            earlier = waiting.setdefault(metadata["task"], [])
            if earlier and earlier[0].raw[1]["answer"] != metadata["answer"]:
                rejected = text.removeprefix(metadata["prompt"])
                for other in earlier:
                    yield Record(other.number, (*other.raw, rejected), other.size + len(rejected))
                earlier.clear()
            earlier.append(record)


def parse_preference(
    raw: tuple[str, Metadata, str], section: schema_data.TaskPreferencesSource
) -> tuple[str, Metadata]:
    """The pair of a generated example and another answer as JSON, and the metadata of the example."""
    text, metadata, rejected = raw
    prompt = metadata["prompt"]
    answers = (text.removeprefix(prompt), rejected)
    return Pair(*(_conversation(prompt, answer, section) for answer in answers)).to_json(), metadata


def _conversation(prompt: str, answer: str, section: schema_data.Turns) -> Conversation:
    turns = [{"role": "user", "content": prompt.strip()}, {"role": "assistant", "content": answer.strip()}]
    return Conversation(messages_of(turns, section))


def parse_example(raw: tuple[str, Metadata]) -> tuple[str, Metadata]:
    """Returns the text and metadata of a generated example unchanged."""
    return raw
