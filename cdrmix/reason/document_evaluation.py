"""`cdrmix reason eval`: questions about documents of several lengths, answered with each mechanism and without it.

    memory         the agent reads chunk by chunk, and answers from its token memory
    last chunk     the same agent reads the last chunk alone
    fast weights   the adapters read chunk by chunk, all updates are committed, and the model answers from them
    no writes      the same with fast weights of zeros
    carried states a model without adapters reads chunk by chunk, and answers from the states that it carries
    whole text     the model reads the document and the question in one pass, without adapters

Answers are greedy. score: of generated tasks that of `cdrmix eval --tasks`, of files 1 for a right answer (`exact` of
`rl.rewards`). f1: see there. Intervals: Wilson's, 95 %; too wide where a score can be between 0 and 1. An answer from
the whole text is the first line. Questions of files that the model was trained on are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema_reasoning import EpisodesOfDocuments, QuestionFiles, Reasoning
from cdrmix.data.tasks import TASKS, known_task, score
from cdrmix.errors import ConfigError, CorpusError
from cdrmix.eval.intervals import wilson
from cdrmix.inference.load import Loaded
from cdrmix.model.cache import select, with_fast_weights
from cdrmix.model.decoding import Prefix, prefill, prefill_rows
from cdrmix.model.language_model import Cache, LanguageModel
from cdrmix.peak_memory import peak, reset_peak
from cdrmix.reason.agent.agent import Window, last_chunk_only, read_episodes
from cdrmix.reason.build import load_stage_b
from cdrmix.reason.documents import GivenDocuments, TaskDocuments
from cdrmix.reason.episodes import FIRST_HELD_OUT
from cdrmix.reason.model import StageBModel
from cdrmix.reason.plasticity.phase import read, zeroed
from cdrmix.reason.question_files import Document, read_documents, read_questions, same_text
from cdrmix.reason.rl.rewards import REWARDS
from cdrmix.reason.rl.rollout import decode
from cdrmix.reason.session import reader_of_text
from cdrmix.reason.sources import source_of

FILES = "jsonl:"
ROWS = 32  # documents that are read together


class DocumentScore(NamedTuple):
    """One mechanism's answers to questions of one task and length.

    length: tokens asked for; None for documents of files. tokens: mean tokens of a document. questions: their number.
    score: see the module; its interval. f1: of the words. capture, retention: of the memory; None without facts.
    tokens_per_second: of documents, with their answers. memory_mib: largest of the GPU, on a CPU of the process.
    """

    task: str
    length: int | None
    tokens: float
    mechanism: str
    questions: int
    score: float
    low: float
    high: float
    f1: float
    capture: float | None
    retention: float | None
    tokens_per_second: float
    memory_mib: float


class _Answered(NamedTuple):
    """Texts of the answers; of the memory the asked, captured and held facts, and in how many documents the step budget
    was spent."""

    texts: list[str]
    facts: tuple[int, int, int] = (0, 0, 0)
    spent: int = 0


def evaluate_documents(
    loaded: Loaded,
    tasks: Sequence[str] | None,
    lengths: Sequence[int],
    *,
    count: int,
    seed: int,
    mechanisms: Sequence[str] | None = None,
    say: Callable[[str], None],
) -> list[DocumentScore]:
    """The scores of every mechanism of a model for each task and length.

    tasks: names, families or last parts of names of generated tasks, jsonl:FILE; None: those that the agent was trained
    on, or without an agent the fast weights or states. mechanisms: those of the module; None: all that the model has.
    Raises ConfigError for an unknown task and for a mechanism that the model does not have, CorpusError for a file that
    cannot be read.
    """
    reasoning = reader_of_text(loaded)
    model = load_stage_b(loaded)
    rows: list[DocumentScore] = []
    for name, length, source in _sources(loaded, reasoning, tasks, lengths, count, seed, say):
        numbers = range(FIRST_HELD_OUT, FIRST_HELD_OUT + source.held_out)
        reader = _Reader(loaded, model, reasoning, source)
        for mechanism, answer in reader.mechanisms(mechanisms).items():
            of_length = "" if length is None else f", {length:,} tokens"
            say(f"{name}{of_length}, {mechanism}: {len(numbers)} questions")
            row, spent = reader.score(name, length, mechanism, answer, numbers)
            rows.append(row)
            if spent:
                say(f"In {spent} of {len(numbers)} documents the step budget was spent: the memory changed no more.")
    return rows


def table(rows: Sequence[DocumentScore]) -> str:
    """The scores as aligned lines."""
    lines: list[tuple[str, ...]] = [
        ("task", "tokens", "mechanism", "questions", "score", "95 %", "f1", "capture", "retention", "tokens/s", "MiB")
    ]
    for row in rows:
        shares = ["-" if share is None else f"{share:.3f}" for share in (row.capture, row.retention)]
        bounds = f"{row.low:.3f} to {row.high:.3f}"
        figures = (f"{row.score:.3f}", bounds, f"{row.f1:.3f}", *shares)
        speed = (f"{row.tokens_per_second:,.0f}", f"{row.memory_mib:,.0f}")
        lines.append((row.task, f"{row.tokens:,.0f}", row.mechanism, str(row.questions), *figures, *speed))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = {0, 2}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place in texts else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def tasks_named(asked: str) -> list[str]:
    """The generated tasks of a name, a family (ruler) or a part of names (qa1, niah). Raises ConfigError for none."""
    names = TASKS.names()
    if asked in names:
        return [asked]
    found = [name for name in names if f"_{asked}_" in f"_{name}_"]
    if not found:
        known_task(asked)  # raises, with the nearest name
    return found


def _trained_section(reasoning: Reasoning) -> EpisodesOfDocuments:
    """The documents that a model was trained on: those of the agent, or without an agent those of the fast weights."""
    phases = reasoning.phases
    without_agent = phases.train_on("plasticity") and not phases.train_on("imitation", "policy")
    return reasoning.plasticity if without_agent and not reasoning.plasticity.tokens else reasoning.agent


def _sources(
    loaded: Loaded,
    reasoning: Reasoning,
    tasks: Sequence[str] | None,
    lengths: Sequence[int],
    count: int,
    seed: int,
    say: Callable[[str], None],
) -> Iterator[tuple[str, int | None, GivenDocuments]]:
    """(name, length, documents) of everything that is asked for. All names and files are checked before the first."""
    section, chunk, tokenizer = _trained_section(reasoning), reasoning.chunk, loaded.tokenizer
    trained = source_of(section, chunk, tokenizer)
    widths = {"question_tokens": trained.question, "answer_tokens": trained.answer}

    def of_task(name: str) -> EpisodesOfDocuments:
        difficulty = section.difficulty if name == section.task and section.data is None else {}
        return section.model_copy(update={"task": name, "data": None, "difficulty": difficulty, "seed": seed, **widths})

    def made(name: str, length: int, count: int) -> list[Document]:
        source = TaskDocuments(of_task(name), chunk, tokenizer)
        return [source.document(FIRST_HELD_OUT + number, -(-length // chunk)) for number in range(count)]

    def given(name: str, documents: list[Document], section: EpisodesOfDocuments) -> GivenDocuments:
        source = GivenDocuments(documents, section, chunk, tokenizer)
        for part, width in (("question", source.question), ("answer", source.answer)):
            if width > widths[f"{part}_tokens"]:
                say(f"{name}: the windows have {width} tokens for the {part}, in training {widths[f'{part}_tokens']}")
        return source

    asked = _asked(tasks, section, reasoning, say)
    for name, documents in asked:
        if documents is None:
            made(name, min(lengths), 1)  # raises for a task without a question
    for name, documents in asked:
        if documents is not None:
            yield name, None, given(name, documents[:count], section.model_copy(update=widths))
            continue
        for length in lengths:
            yield name, length, given(name, made(name, length, count), of_task(name))


def _asked(
    tasks: Sequence[str] | None, section: EpisodesOfDocuments, reasoning: Reasoning, say: Callable[[str], None]
) -> list[tuple[str, list[Document] | None]]:
    """The names of tasks, and of files with their documents that were not trained on."""

    def documents_of(name: str, files: QuestionFiles) -> tuple[str, list[Document]]:
        return name, _not_trained_on(read_documents(files), reasoning, name, say)

    if tasks is None:
        if section.data is None:
            return [(section.task, None)]
        return [documents_of(f"{FILES}{','.join(section.data.paths)}", section.data)]
    asked: list[tuple[str, list[Document] | None]] = []
    for name in tasks:
        if name == FILES:
            raise ConfigError(f"--tasks {FILES} names no file; give {FILES}FILE")
        if name.startswith(FILES):
            fields = section.data.model_dump(exclude={"paths"}) if section.data is not None else {"kind": "jsonl"}
            asked.append(documents_of(name, QuestionFiles(**fields | {"paths": [name.removeprefix(FILES)]})))
        else:
            asked += [(task, None) for task in tasks_named(name)]
    return asked


def _not_trained_on(
    documents: list[Document], reasoning: Reasoning, name: str, say: Callable[[str], None]
) -> list[Document]:
    """The documents that no phase trained on, as far as the files of the phases still have those that were.

    Raises ConfigError if none is left.
    """
    phases = reasoning.phases
    sections = [reasoning.agent] if phases.train_on("imitation", "policy") else []
    sections += [reasoning.plasticity] if phases.train_on("plasticity", "acceptance") else []
    trained: set[str] = set()
    for files in (section.data for section in sections if section.data is not None):
        try:
            trained |= {same_text(document.context) for document in read_questions(files)[0]}
        except CorpusError as error:
            say(f"{name}: it is not known which documents the model was trained on: {error}")
    kept = [document for document in documents if same_text(document.context) not in trained]
    if len(kept) < len(documents):
        say(f"{name}: {len(documents) - len(kept):,} of {len(documents):,} questions were trained on, and are left out")
    if not kept:
        raise ConfigError(f"{name}: the model was trained on all of these documents; name others")
    return kept


@contextmanager
def _without_adapters(model: LanguageModel) -> Iterator[None]:
    """The adapters add zeros to their projections."""
    ups = {
        each: each.clone() for name, each in model.named_parameters() if ".plastic." in name and name.endswith(".up")
    }
    try:
        for up in ups:
            up.zero_()
        yield
    finally:
        for up, before in ups.items():
            up.copy_(before)


class _Reader:
    """A model's mechanisms, with documents of one source."""

    def __init__(self, loaded: Loaded, model: StageBModel, reasoning: Reasoning, source: GivenDocuments) -> None:
        self._model, self._reasoning, self._source, self._chunks = model, reasoning, source, source.longest
        self._tokenizer = loaded.tokenizer
        self._device = loaded.model.embedding.weight.device
        self._adapted = bool(loaded.model.adapters)
        self._carries = reasoning.carry == "all" and reasoning.phases.train_on("plasticity")

    def mechanisms(self, wanted: Sequence[str] | None) -> dict[str, Callable[[range], _Answered]]:
        """What a model of this configuration can answer from; of these the wanted ones."""
        phases = self._reasoning.phases
        found: dict[str, Callable[[range], _Answered]] = {}
        if phases.train_on("imitation", "policy"):
            found |= {"memory": self._from_memory, "last chunk": self._from_last_chunk}
        if self._adapted:
            found |= {"fast weights": self._from_states, "no writes": self._without_writes}
        elif self._carries:
            found |= {"carried states": self._from_states}
        found |= {"whole text": self._from_whole_text}
        for name in wanted or ():
            if name not in found:
                raise ConfigError(f"--mechanisms: this model has no {name!r}; it has {', '.join(found)}")
        return found if wanted is None else {name: found[name] for name in found if name in wanted}

    @torch.no_grad()
    def score(
        self, task: str, length: int | None, mechanism: str, answer: Callable[[range], _Answered], numbers: range
    ) -> tuple[DocumentScore, int]:
        """The score of one mechanism, and in how many documents the step budget was spent."""
        total = f1 = seconds = 0.0
        tokens, facts, spent = 0, [0, 0, 0], 0
        reset_peak(self._device)
        for start in range(0, len(numbers), ROWS):
            part = numbers[start : start + ROWS]
            tokens += sum(
                len(self._tokenizer.encode(self._source.document(number, self._chunks).context)) for number in part
            )
            asked = self._source.questions(part, self._chunks)
            begun = time.perf_counter()
            answered = answer(part)
            seconds += time.perf_counter() - begun
            facts = [before + more for before, more in zip(facts, answered.facts, strict=True)]
            spent += answered.spent
            for number, text, question in zip(part, answered.texts, asked, strict=True):
                example = self._source.document(number, self._chunks).example
                total += REWARDS["exact"](text, question.answers) if example is None else score(example, text)
                f1 += REWARDS["f1"](text, question.answers)
        of_facts, captured, held = facts
        row = DocumentScore(
            task,
            length,
            tokens / len(numbers),
            mechanism,
            len(numbers),
            total / len(numbers),
            *wilson(total, len(numbers)),
            f1 / len(numbers),
            captured / of_facts if of_facts else None,
            held / captured if captured else None,
            tokens / max(seconds, 1e-9),
            peak(self._device) / 2**20,
        )
        return row, spent

    def _from_memory(self, numbers: range, *, last_only: bool = False) -> _Answered:
        episodes, budget = self._source.batch(numbers, self._chunks), self._reasoning.controller.step_budget
        if last_only:
            episodes = last_chunk_only(episodes, self._source.pad)
        reading = read_episodes(
            self._model.language_model,
            Window.of(self._reasoning, self._source),
            episodes,
            temperature=0.0,
            generator=torch.Generator(),
            step_budget=budget,
        )
        facts = (reading.asked_BF, reading.captured_BF, reading.held_BF)
        texts = [self._source.text(ids) for ids in reading.answer_BA.tolist()]
        asked, captured, held = (int(part.sum()) for part in facts)
        return _Answered(texts, (asked, captured, held), int((reading.changes_B >= budget).sum()))

    def _from_last_chunk(self, numbers: range) -> _Answered:
        return self._from_memory(numbers, last_only=True)

    def _from_states(self, numbers: range, change: Callable[[Tensor], Tensor] | None = None) -> _Answered:
        episodes = self._source.batch(numbers, self._chunks)
        texts = [""] * len(numbers)
        model, carry = self._model.language_model, self._reasoning.carry
        for rows, cache in read(model, episodes.chunks_BNC, carry, self._source.pad):
            ended = cache if change is None else with_fast_weights(cache, change)
            for row, text in zip(rows, self._answers_from(ended, episodes.question_BQ[rows]), strict=True):
                texts[row] = text
        return _Answered(texts)

    def _without_writes(self, numbers: range) -> _Answered:
        return self._from_states(numbers, zeroed)

    def _answers_from(self, cache: Cache, asked_BQ: Tensor) -> list[str]:
        """The answers from the states of all rows, questions of one length together: fast weights count their tokens
        for the batch, not for a row."""
        marks = self._source.marks
        lengths_B = (asked_BQ != self._source.pad).sum(1)
        texts = [""] * len(asked_BQ)
        for length in lengths_B.unique().tolist():
            rows = (lengths_B == length).nonzero().flatten()
            begin, end = (torch.full((len(rows), 1), mark) for mark in (marks.question, marks.answer))
            prompts = torch.cat([begin, asked_BQ[rows, :length], end], 1).to(self._device)
            prefix = prefill(self._model.language_model, prompts, select(cache, rows.to(self._device)))
            for row, text in zip(rows.tolist(), self._decoded(prefix, marks.end), strict=True):
                texts[row] = text
        return texts

    def _from_whole_text(self, numbers: range) -> _Answered:
        texts = []
        with _without_adapters(self._model.language_model):
            for number in numbers:
                document = self._source.document(number, self._chunks)
                prompt = f"{document.context}\nQuestion: {document.question}\nAnswer:"
                ids = [self._tokenizer.first_id, *self._tokenizer.encode(prompt)]
                prefix = prefill_rows(self._model.language_model, [ids])
                (text,) = self._decoded(prefix, self._tokenizer.end_of_text_id)
                texts.append((text.splitlines() or [""])[0])
        return _Answered(texts)

    def _decoded(self, prefix: Prefix, end: int) -> list[str]:
        generated = decode(
            self._model.language_model,
            prefix,
            self._source.answer,
            temperature=0.0,
            generator=torch.Generator(),
            end=end,
        )
        rows = zip(generated.tokens_BN, generated.mask_BN, strict=True)
        return [self._source.text(tokens_N[mask_N].tolist()) for tokens_N, mask_N in rows]
