"""The records in a run's files of JSON lines, and their reader, which checks them: a file may come from elsewhere."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, Base64Bytes, BeforeValidator, Field, TypeAdapter, ValidationError

from cdrmix.config.best_metric import OF_DOMAIN
from cdrmix.durable import write_atomically
from cdrmix.errors import ConfigError
from cdrmix.json_text import parse_json

Kind = TypeVar("Kind")
LARGEST = 1e100  # of a figure: the square and the sum of a run's figures are finite then
SHOWN = 60  # characters of what an error found


def _nan_of_null(value: Any) -> Any:
    return math.nan if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _none_of_nan(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _at_most_largest(value: float) -> float:
    if abs(value) > LARGEST:
        raise ValueError(f"allowed: a number from {-LARGEST:g} to {LARGEST:g}")
    return value


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Duration = Annotated[float, Field(ge=0, le=1e12)]  # seconds
Share = Annotated[float, Field(ge=0, le=1)]
# `cdrmix.run_folder.finite` writes what is not finite as null. It is read as NaN, or as None where None is allowed.
Number = Annotated[float, BeforeValidator(_nan_of_null)]
Figure = Annotated[Number, AfterValidator(_at_most_largest)]
Measured = Annotated[Annotated[float, AfterValidator(_at_most_largest)] | None, BeforeValidator(_none_of_nan)]


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of stage A, a line of metrics.jsonl. Losses are in nats.

    loss: the optimised loss. next_token_loss: nats per token with a target, over the global batch. tokens: with a
    target, since the start of the run. seconds: training time since then. routers: names as in `Model.routers`.
    router: measure -> one value for each router. load: for each router the fraction of routes of each expert, 1 / E
    when balanced. depth: of the branches that skip tokens, the share of tokens that each kept, with names as in
    `Model.skipping`. valid_*: on steps that were validated. valid_domains: domain -> bits per byte, if there are
    several. parts, valid_parts: part of the loss -> nats per token, with data.objectives.weights; held-out chains of
    thought and held-out documents in the order of fill in the middle are parts, and bits per byte are of the text as
    it is. preferences: of pairs, measure -> mean; then loss and next_token_loss are of a pair. prediction_losses: of
    multi-token prediction, depth -> nats per token; depth 1 is next_token_loss.
    """

    step: Count
    epoch: Figure
    loss: Figure
    next_token_loss: Figure
    load_balance: Figure
    z_loss: Figure
    learning_rate: Figure
    gradient_norm: Figure
    tokens: Count
    tokens_per_second: Figure
    seconds: Duration
    memory_gib: Figure
    routers: list[str] = field(default_factory=list)
    router: dict[str, list[Figure]] = field(default_factory=dict)
    load: list[list[Share]] = field(default_factory=list)
    depth: dict[str, Figure] = field(default_factory=dict)
    valid_bits_per_byte: Measured = None
    valid_loss: Measured = None
    valid_domains: dict[str, Figure] = field(default_factory=dict)
    parts: dict[str, Figure] = field(default_factory=dict)
    valid_parts: dict[str, Figure] = field(default_factory=dict)
    preferences: dict[str, Figure] = field(default_factory=dict)
    valid_preferences: dict[str, Figure] = field(default_factory=dict)
    prediction_losses: dict[str, Figure] = field(default_factory=dict)

    @property
    def router_names(self) -> list[str]:
        """The names of the routers; their numbers, if an older metrics.jsonl has no names."""
        counted = max([len(self.load), *map(len, self.router.values())])
        return self.routers or [str(number) for number in range(counted)]

    def held_out_figure(self, metric: str) -> float | None:
        """A figure of train.best_metric; None without a validation or this figure, and if it is not finite."""
        if self.valid_preferences:
            figure = self.valid_preferences.get(metric)
        elif metric.startswith(OF_DOMAIN):
            figure = self.valid_domains.get(metric.removeprefix(OF_DOMAIN))
        else:
            figure = {"bits_per_byte": self.valid_bits_per_byte, "loss": self.valid_loss}.get(metric)
        return figure if figure is not None and math.isfinite(figure) else None


@dataclass(frozen=True)
class PhaseRecord:
    """One optimizer step of a phase of stage B. `step` continues the count of stage A, `phase_step` counts from 1.

    measures: means and rates of the step, by name.
    """

    step: Count
    phase: str
    phase_step: Count
    loss: Figure
    learning_rate: Figure
    gradient_norm: Figure
    seconds: Duration
    memory_gib: Figure
    measures: dict[str, Figure]


Record = StepRecord | PhaseRecord


class Records(NamedTuple):
    """The records of a metrics.jsonl, those of stage A and those of the phases of stage B, in the order of the file."""

    steps: list[StepRecord]
    phases: list[PhaseRecord]

    @property
    def all(self) -> list[Record]:
        """Both."""
        return [*self.steps, *self.phases]

    @property
    def last(self) -> int:
        """The last step; 0 without records."""
        return max((record.step for record in self.all), default=0)


@dataclass(frozen=True)
class Rollout:
    """A rollout in rollouts.jsonl (cdrmix.reason.agent.policy.ShownRollout), of the step in which it was made."""

    step: Count
    question: str
    right: list[str]
    memories: list[str]
    answer: str
    reward: Measured
    task: Measured


@dataclass(frozen=True)
class Extension:
    """A line of extensions.jsonl: the step after which a run was extended, the hashes of its configuration before and
    after, and what changed: key -> values before and after."""

    step: Count
    before: Annotated[str | None, Field(alias="from")]
    after: Annotated[str, Field(alias="to")]
    keys: dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class DigestNames:
    """A line of digests.jsonl with the parameters of the steps that follow."""

    parameters: list[str]


@dataclass(frozen=True)
class DigestRow:
    """A step in digests.jsonl. state, weights: 4 bytes for each parameter, little-endian."""

    step: Count
    loss: Number
    state: Base64Bytes
    weights: Base64Bytes


class Line(NamedTuple):
    """A line of a file. where: path and number, for messages."""

    where: str
    text: bytes

    def data(self) -> dict[str, Any]:
        """Its JSON object; {} if it is none."""
        try:
            data = parse_json(self.text)
        except ValueError:
            return {}
        return data if isinstance(data, dict) else {}


def complete_lines(path: Path) -> Iterator[Line]:
    """The lines of a file of JSON lines; without a last one that is no JSON, which a kill cut off; none without the
    file. Empty lines are left out.
    """
    numbered = enumerate(path.read_bytes().splitlines(), 1) if path.exists() else ()
    lines = [Line(f"{path}:{number}", text) for number, text in numbered if text.strip()]
    for place, line in enumerate(lines, 1):
        if place == len(lines):
            try:
                parse_json(line.text)
            except ValueError:
                return
        yield line


def write_lines(path: Path, texts: Iterable[bytes]) -> None:
    """Replaces a file of JSON lines. texts: without line ends."""
    write_atomically(path, b"".join(text + b"\n" for text in texts))


def end_last_line(path: Path) -> None:
    """Removes a last line that a kill cut off, so that what is appended is a line of its own."""
    written = path.read_bytes() if path.exists() else b""
    if written and not written.endswith(b"\n"):
        write_lines(path, (line.text for line in complete_lines(path)))


def read_line(line: Line, kind: type[Kind]) -> Kind:
    """The record in a line. Raises ConfigError, which names the line and the key, if it is not of this kind.

    Keys that the kind does not have are of another version of cdrmix, and are left out.
    """
    try:
        return _adapter(kind).validate_json(line.text, strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
    try:
        is_object = isinstance(parse_json(line.text), dict)
    except ValueError as error:
        raise damaged(line, f"is not JSON: {error}") from error
    if not is_object:
        raise damaged(line, f"found {line.text[:SHOWN]!r}; allowed: a JSON object")
    key, found = ".".join(map(str, detail["loc"])), repr(detail["input"])
    found = found if len(found) <= SHOWN else f"{found[:SHOWN]}..."
    allowed = detail["msg"].removeprefix("Value error, ").replace("Input should be", "allowed:")
    what = "missing" if detail["type"] == "missing" else f"found {found}; {allowed}"
    raise damaged(line, f"{key}: {what}" if key else what)


def read_lines(path: Path, kind: type[Kind]) -> list[Kind]:
    """The records of a file of one kind; [] without the file. Raises ConfigError as `read_line`."""
    return [read_line(line, kind) for line in complete_lines(path)]


def read_record(line: Line) -> Record:
    """The record in a line of metrics.jsonl. Raises ConfigError as `read_line`."""
    if b'"phase"' in line.text and "phase" in line.data():
        return read_line(line, PhaseRecord)
    record = read_line(line, StepRecord)
    by_router = [*record.router.values(), *(each for each in (record.routers, record.load) if each)]
    if len({*map(len, by_router)}) > 1 or not all(record.load):
        raise damaged(line, "found other numbers of routers in routers, router, load; allowed: as many, with experts")
    return record


def step_record(fields: Mapping[str, Any]) -> StepRecord:
    """The record with these fields, from the state of a checkpoint. Raises ValueError if it is none."""
    return _adapter(StepRecord).validate_json(json.dumps(fields), strict=True)


def read_records(path: Path) -> Records:
    """The records of a metrics.jsonl; none without the file.

    Raises ConfigError as `read_line`, and where two steps have other routers or experts: a run has one model.
    """
    records, first = Records([], []), dict[str, tuple[str, list[int]]]()
    for line in complete_lines(path):
        record = read_record(line)
        if isinstance(record, PhaseRecord):
            records.phases.append(record)
            continue
        records.steps.append(record)
        sizes = {"routers": [len(record.router_names)], "experts of each router": [*map(len, record.load)]}
        for what, found in sizes.items():
            where, expected = first.setdefault(what, (line.where, found)) if any(found) else ("", found)
            if found != expected:
                raise damaged(line, f"load: found {found} {what}; allowed: {expected}, as in {where}")
    return records


def damaged(line: Line, problem: str) -> ConfigError:
    """The error for a line with this problem, with the remedy."""
    return ConfigError(f"{line.where}: {problem}; the file is damaged: restore it, or remove this line")


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
