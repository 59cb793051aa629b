"""Sources without files: Hugging Face datasets, which are streamed and can be resumed, and generated tasks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix.config import schema_data
from cdrmix.data.sources.base import SOURCES, BadRecord, Metadata, Record, Source, missing_column
from cdrmix.data.sources.conversations import Conversation, Pair, messages_of
from cdrmix.data.sources.files import walk
from cdrmix.durable import disk_full, is_disk_full
from cdrmix.errors import CdrmixError, CorpusError


@SOURCES("huggingface")
class HuggingFace(Source):
    """A Hugging Face dataset, streamed without shuffling.

    Its identity is its name, so that shards are reused offline. Set a revision if the dataset may change.
    """

    kind = "huggingface"

    def __init__(self, section: schema_data.HuggingFaceSource, max_expansion: int = 1) -> None:
        self.section = section
        self.parse = partial(parse_row, text_field=section.text_field)
        self._dataset: Any = None
        self._number = 0

    def identity(self) -> list[Any]:
        identity: list[Any] = [
            self.section.name,
            self.section.config_name,
            self.section.revision,
            self.section.split,
        ]
        if (folder := Path(self.section.name)).is_dir():  # a local folder has no revision
            for path in walk(folder, (), frozenset()):
                status = path.stat()
                identity.append([str(path), status.st_size, status.st_mtime_ns])
        return identity

    def describe(self) -> str:
        revision = f", revision {self.section.revision!r}" if self.section.revision else ""
        return f"Hugging Face dataset {self.section.name!r}, split {self.section.split!r}{revision}"

    def parts(self) -> list[str]:
        return [f"{self.section.name}/{self.section.split}"]

    def checkpoint(self) -> Any:
        return {"rows": self._number, "stream": self._dataset.state_dict()}

    def records(self, part: str, checkpoint: Any = None) -> Iterator[Record]:
        try:
            import datasets
            from huggingface_hub.errors import HfHubHTTPError
        except ImportError as error:
            raise CorpusError(
                f"data.source.kind=huggingface needs the package {error.name}: pip install datasets"
            ) from error
        section = self.section
        # the bases of HfHubHTTPError include the error class of the HTTP library of the hub client
        failures = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, *HfHubHTTPError.__bases__)
        try:
            self._dataset = datasets.load_dataset(
                section.name, section.config_name, split=section.split, revision=section.revision, streaming=True
            )
            self._number = 0
            if checkpoint is not None:
                self._dataset.load_state_dict(checkpoint["stream"])
                self._number = checkpoint["rows"]
            rows = iter(self._dataset)
        except failures as error:
            raise self._unreadable(error) from error
        while True:
            try:
                row = next(rows, None)
            except failures as error:
                raise self._unreadable(error) from error
            if row is None:
                return
            self._number += 1
            if section.text_field not in row:
                raise missing_column(section.text_field, self.describe(), list(row))
            yield Record(self._number, row, sum(len(cell) for cell in row.values() if isinstance(cell, str)))

    def _unreadable(self, error: BaseException) -> CdrmixError:
        cause: BaseException | None = error
        while cause is not None:  # libraries wrap the system error
            if is_disk_full(cause):
                return disk_full(
                    f"the cache of the {self.describe()}",
                    "Free some space, or set HF_HOME to a folder on another disk. What was prepared is kept.",
                )
            cause = cause.__cause__ or cause.__context__
        return CorpusError(
            f"data.source: cannot stream the {self.describe()}: {error}. Check data.source.name, config_name, "
            "revision and split, and that this machine reaches huggingface.co (HF_HUB_OFFLINE unset; HF_TOKEN set if "
            "it is gated); the preparation is then resumed. If the connection is unreliable, download the dataset "
            "and use kind: parquet or jsonl with paths."
        )


def parse_row(raw: dict[str, Any], text_field: str) -> tuple[str, Metadata]:
    """The text and the other fields of a row that are scalars or mappings."""
    text = raw[text_field]
    if not isinstance(text, str):
        raise BadRecord(f"field {text_field!r} is not a string")
    kept = (str, int, float, bool, type(None), dict)
    return text, {name: value for name, value in raw.items() if name != text_field and isinstance(value, kept)}


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
