"""Evaluation suites: one interface, one registry, and results with intervals that print as a table or as JSON.

A suite is one entry of SUITES. A file in this package or a plugin can add one:

    @SUITES("length")
    def length(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
        texts = subject.generate([""], samples=options.samples, writing=Writing(max_new_tokens=64, seed=options.seed))
        ...
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import cdrmix.eval
from cdrmix.config.schema import Config
from cdrmix.data.shards import ShardSet
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.eval.documents import DocumentScores
from cdrmix.eval.evaluation import Answerer
from cdrmix.model.causal import CausalModel
from cdrmix.model.loss import LossModule
from cdrmix.registry import Registry, nearest


@dataclass(frozen=True)
class Writing:
    """How a suite lets a model write. Sample i of a prompt has the seed + i. The others are as in cdrmix.Sampling."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 1
    stop: Sequence[str] = ()
    top_p: float = 1.0


class Generate(Protocol):
    """Continues each prompt `samples` times; a list of that many texts for each prompt.

    The last token of a prompt may be replaced by one that begins with it (`TextModel.sample`, heal).
    """

    def __call__(self, prompts: Sequence[str], samples: int, writing: Writing) -> list[list[str]]: ...


class Likelihood(NamedTuple):
    """Of a continuation: the sum of the log-probabilities of its tokens in nats, and whether each is the likeliest.

    cut: whether the model did not read the beginning of the context, because it was too long.
    """

    nats: float
    greedy: bool
    cut: bool = False


class ToolQuestion(NamedTuple):
    """Messages (role, content), and tools as JSON schemas in the form of chat templates."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]


Likelihoods = Callable[[Sequence[tuple[str, str]]], list[Likelihood]]  # of pairs (context, continuation)
Decode = Callable[[Sequence[Sequence[int]], int], Iterator[tuple[int, int]]]


@dataclass(frozen=True)
class Parts:
    """The model itself, for suites that need more than its text.

    config, step: of its training; config.data.row_length is the length of its rows in tokens.
    answer: greedy answers to prompts, each with its most new tokens, in batches, as of `cdrmix eval --tasks`.
    decode: (prompts as token ids, new tokens) -> (number of the prompt, token id), one at a time, greedy, beyond the
        end of a text too.
    loss_model: makes the model with its loss, which reports its routers.
    text: the prepared text and its configuration. Raises CdrmixError if there is none.
    own_text: whether that is the text of its training, and not one that the user named.
    """

    model: CausalModel
    tokenizer: TextTokenizer
    config: Config
    step: int
    answer: Answerer
    decode: Decode
    loss_model: Callable[[], LossModule]
    text: Callable[[], tuple[ShardSet, Config]]
    own_text: bool


@dataclass(frozen=True)
class Subject:
    """The model that suites measure. name: for messages.

    held_out, training: the documents of the prepared text of the model. They raise CdrmixError if it has none.
    likelihoods: of continuations; it raises CdrmixError for one that is empty or too long. None: not available.
    max_length: tokens that it reads at most. documents: the scores of the held-out documents; None: not available.
    tools: the answers to questions with tools, of at most that many tokens; None: the model has no format for them.
    parts: None for a writer that is no model.
    """

    name: str
    generate: Generate
    held_out: Callable[[], Iterator[str]]
    training: Callable[[], Iterator[str]]
    likelihoods: Likelihoods | None = None
    max_length: int | None = None
    documents: Callable[[], DocumentScores] | None = None
    tools: Callable[[Sequence[ToolQuestion], int], list[str]] | None = None
    parts: Parts | None = None

    def model_parts(self, suite: str) -> Parts:
        """The parts. Raises ConfigError, naming the suite, if there are none."""
        if self.parts is None:
            raise ConfigError(f"--suite {suite} needs a model with its weights; {self.name} only writes text")
        return self.parts


@dataclass(frozen=True)
class SuiteOptions:
    """Options of all suites; each uses those that it needs.

    samples: texts for each problem. limit: problems of each set; None: all. sets: a folder with wheels of data sets, in
    addition to installed packages. seconds, megabytes, allow_unsafe: of the sandbox.
    canaries, policy, verbatim_tokens: of the suite leak.
    """

    seed: int = 1
    samples: int = 1
    limit: int | None = None
    temperature: float = 0.2
    max_new_tokens: int = 256
    sets: Path | None = None
    seconds: float = 10.0
    megabytes: int = 512
    allow_unsafe: bool = False
    canaries: Path | None = None
    policy: Path | None = None
    verbatim_tokens: int = 32

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature must be finite and at least 0; found {self.temperature}")
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError("--samples needs a --temperature above 0: at 0 all samples of a problem are the same")
        if self.sets is not None and not self.sets.is_dir():
            raise ConfigError(f"--sets {self.sets}: there is no such folder; name one with the wheels of the data sets")
        for name, path in (("canaries", self.canaries), ("policy", self.policy)):
            if path is not None and not path.is_file():
                raise ConfigError(f"--{name} {path}: there is no such file; name one with a JSON object on each line")


@dataclass(frozen=True)
class Measure:
    """A figure of a suite. low, high: its 95 % interval; high alone: a 95 % bound. count: problems or other items.

    problem: why it was not measured, with the remedy; value is None then.
    """

    name: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class SuiteResult:
    """The figures of one suite. facts: what they depend on, as JSON data. notes: for readers."""

    suite: str
    measures: tuple[Measure, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON data."""
        return {
            "suite": self.suite,
            "measures": [vars(measure) for measure in self.measures],
            "facts": self.facts,
            "notes": list(self.notes),
        }

    def table(self) -> str:
        """The figures as aligned lines, with the reasons for what was not measured, and the notes."""
        width = max(len(measure.name) for measure in self.measures) + 2
        intervals = [_interval(measure) for measure in self.measures]
        wide = max(16, *map(len, intervals)) + 2
        lines = [f"{self.suite:<{width}}{'value':>9}{'95 % interval':>{wide}}{'count':>10}"]
        for measure, interval in zip(self.measures, intervals, strict=True):
            if measure.value is None:
                lines.append(f"{measure.name:<{width}}{'-':>9}  not measured: {measure.problem}")
                continue
            lines.append(f"{measure.name:<{width}}{measure.value:>9.3f}{interval:>{wide}}{measure.count:>10,}")
        return "\n".join([*lines, *self.notes])


def _interval(measure: Measure) -> str:
    if measure.high is None:
        return "-"
    return f"{f'{measure.low:.3f} ' if measure.low is not None else ''}to {measure.high:.3f}"


Suite = Callable[[Subject, SuiteOptions, Callable[[str], None]], SuiteResult]
SUITES = Registry[Suite]("suite")


def suites(asked: Sequence[str]) -> list[str]:
    """The suites with these names, each once. Raises ConfigError for an unknown name, with the nearest and all."""
    for module in pkgutil.iter_modules(cdrmix.eval.__path__):
        importlib.import_module(f"cdrmix.eval.{module.name}")
    known = SUITES.names()
    for name in asked:
        if name not in known:
            close = nearest(name, known)
            hint = f"; did you mean {close!r}?" if close else "."
            raise ConfigError(f"--suite: there is no suite {name!r}{hint} The suites are {', '.join(known)}.")
    return list(dict.fromkeys(asked))
