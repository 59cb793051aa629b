"""`cdrmix reason demo`: prints how a model reads a document chunk by chunk, what it stores, and its answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from cdrmix.data.tasks import TASKS, episode
from cdrmix.data.tasks.example import listed
from cdrmix.data.tasks.rng import joined
from cdrmix.errors import ConfigError
from cdrmix.inference.load import Loaded
from cdrmix.reason.documents import DocumentEpisodes
from cdrmix.reason.episodes import FIRST_HELD_OUT, filler_for
from cdrmix.reason.filler import fillers_of
from cdrmix.reason.session import Answers, Session, describe, reader_of_text
from cdrmix.reason.sources import source_of

Say = Callable[[str], None]
CHARACTERS_A_TOKEN = 3  # an estimate for generated documents, which gives them about the wanted number of chunks


def demonstrate(
    loaded: Loaded,
    *,
    document: Path | None = None,
    question: str | None = None,
    chunks: int = 8,
    number: int = 1,
    session: Path | None = None,
    memory: Path | None = None,
    say: Say = print,
) -> Answers:
    """Reads a document, prints each step, and answers the question.

    document, question: both or none; without them, held-out episode `number` of the agent's task, from 1, in about
    `chunks` chunks. With a memory the question may be given alone; then no document is read. session: a file; if it
    exists, the session in it continues with its own question; it is saved there at the end. memory: the folder of a
    durable memory, which stores the committed chunks and answers from the chunks that any process has stored.
    Raises ConfigError for a document that cannot be read or is empty, CheckpointError for another model's session,
    MemoryLogError for another model's memory or a damaged one.
    """
    if session is not None and (session.is_dir() or not session.parent.is_dir()):
        raise ConfigError(f"--session {session}: name a file in a folder that exists")
    if question is not None and not question.strip():
        raise ConfigError("--question is empty")
    alone = memory is not None and document is None  # a question to the durable memory
    if (document is None) != (question is None) and not alone:
        raise ConfigError(
            "give --document and --question together; with --memory you can give --question without --document"
        )
    expected = None
    if document is not None and question is not None:
        text = _text_of(document)
    elif question is not None:
        text = ""
    else:
        text, question, expected = generated(loaded, chunks, number)
    if session is not None and session.exists():
        reader = Session.load(loaded, session, memory, say)
        if reader.question != question:
            say(f"{session} has another question, which is used instead of the given one")
            expected = None
    else:
        reader = Session(loaded, question, memory, say)
    if text and not reader_of_text(loaded).phases.train_on("imitation", "policy"):
        say("No phase of this run has trained the token memory, so what it writes and answers may have no meaning.")
    with closing(reader):
        return _read_and_answer(reader, text, session, expected, say)


def _read_and_answer(reader: Session, text: str, session: Path | None, expected: str | None, say: Say) -> Answers:
    say(f"Question: {reader.question}")
    if text:
        say(f"{'chunk':>5}  {'text':<60}  {'fast weights':<12}  memory (*: changed)")
    for step in reader.read(text):
        say(describe(step))
    if reader.spent:
        say(f"The step budget of {reader.budget} is spent: {listed(reader.spent)} no longer change.")
    if session is not None:
        reader.save(session)
    answers = reader.answer() if reader.steps else Answers(None, None)
    if answers.from_memory is not None:
        say(f"Answer from memory:       {answers.from_memory}")
    if answers.from_fast_weights is not None:
        say(f"Answer from fast weights: {answers.from_fast_weights}")
    if reader.steps and answers == Answers(None, None) and reader.durable_memory is None:
        say("No answer: the model has neither token memory nor adapters. `cdrmix reason eval` measures carried states.")
    if reader.durable_memory is not None:
        answer, recalled = reader.recall()
        say(f"The index has {len(reader.durable_memory)} episodes of {reader.durable_memory.tokens} tokens")
        for recalled_text in recalled:
            say(f"Found in the index:       {' '.join(recalled_text.split())}")
        say(f"Answer from the index:    {answer}")
    if expected is not None:
        say(f"Correct answer:           {expected}")
    return answers


def generated(loaded: Loaded, chunks: int, number: int) -> tuple[str, str, str]:
    """A document that no phase trained on, its question and its answer: generated, or of the configured files."""
    reasoning = reader_of_text(loaded)
    section = reasoning.agent
    source = source_of(section, reasoning.chunk, loaded.tokenizer)
    if isinstance(source, DocumentEpisodes):
        if source.held_out is not None and number > source.held_out:
            raise ConfigError(f"--number {number}: {source.held_out} questions of the files are held out")
        held_out = source.document(FIRST_HELD_OUT + number - 1, chunks)
        return held_out.context, held_out.question, held_out.answers[0]
    characters = chunks * reasoning.chunk * CHARACTERS_A_TOKEN
    level = TASKS[section.task].standard.changed({**section.difficulty, "chunks": chunks, "characters": characters})
    wanted = FIRST_HELD_OUT + number - 1
    made = episode(section.task, section.seed, wanted, level, filler=filler_for(wanted, fillers_of(section.filler)))
    return joined(made.chunks), made.question, made.answer


def _text_of(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--document {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--document {path}: byte {error.start} is not UTF-8 text") from error
    if not text.strip():
        raise ConfigError(f"--document {path} is empty")
    return text
