"""Makes the source of episodes that a section of the configuration describes, and checks all before training."""

from __future__ import annotations

import hashlib
import json

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import EpisodesOfDocuments, EpisodesOfTask, QuestionFiles
from cdrmix.data.tasks import episode as text_episode
from cdrmix.data.tasks import known_task
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.reason.agent.imitation import check_memories
from cdrmix.reason.documents import FileDocuments, TaskDocuments
from cdrmix.reason.episodes import FIRST_HELD_OUT, EpisodeSource, TextSource, TokenSource
from cdrmix.reason.filler import fillers_of
from cdrmix.reason.question_files import check_demonstrated, read_questions, same_text
from cdrmix.reason.rl.rewards import check_reward

SAMPLE = 16  # documents of a generated task that are made, and whose memories are measured
SAMPLE_CHUNKS = 64  # chunks that these have together, at most where there are several


def source_of(section: EpisodesOfTask, chunk: int, tokenizer: TextTokenizer | None = None) -> EpisodeSource:
    """The source of a section of the configuration. Text needs the run's tokenizer."""
    if section.tokens:
        return TokenSource(section.task, section.seed, chunk, section.difficulty)
    if tokenizer is None:
        raise ConfigError(f"reasoning: {section.task} is text, and there is no tokenizer; set its tokens: true")
    question = answer = fillers = None
    if isinstance(section, EpisodesOfDocuments):
        if section.data is not None:
            return FileDocuments(section, chunk, tokenizer)
        if known_task(section.task).episode is None:
            return TaskDocuments(section, chunk, tokenizer)
        fillers = fillers_of(section.filler)
        question, answer = section.question_tokens, section.answer_tokens
    return TextSource(
        section.task,
        section.seed,
        chunk,
        section.difficulty,
        tokenizer,
        fillers,
        section.chunks,
        question=question,
        answer=answer,
    )


def check_episodes(config: Config, tokenizer: TextTokenizer | None = None) -> None:
    """Makes some episodes of every task that a phase trains, at each number of chunks, to find mistakes early. Files
    and the reward are checked as a whole.

    tokenizer: None leaves out the check that text fits the chunks. Raises ConfigError that names the section,
    CorpusError that names file and line, and PluginError for a reward that cannot be imported.
    """
    reasoning = config.reasoning
    assert reasoning is not None
    phases = reasoning.phases
    if phases.policy.steps:
        check_reward(reasoning.rl.reward, in_ids=reasoning.agent.tokens)
    # plasticity's episodes have 2 chunks and more (those in token ids as many as hold the facts)
    fewest = [] if reasoning.plasticity.tokens else [min(2, reasoning.plasticity.chunks)]
    policy = [phases.policy.chunks] if phases.policy.chunks else []
    used = {
        "plasticity": (reasoning.plasticity, fewest, phases.train_on("plasticity")),
        "acceptance": (reasoning.acceptance or reasoning.plasticity, [], phases.train_on("acceptance")),
        "agent": (reasoning.agent, policy, phases.train_on("imitation", "policy")),
        "operations": (reasoning.operations, [], phases.train_on("operations_imitation", "operations")),
    }
    demonstrated = phases.train_on("imitation")
    if used["agent"][2] and used["plasticity"][2]:
        _check_held_out(reasoning.agent.data, reasoning.plasticity.data)
    for name, (section, others, trained) in used.items():
        lengths = {section.chunks, *others, *reasoning.evaluation.chunks}
        if isinstance(section, EpisodesOfDocuments) and section.data is not None:  # they have the length they have
            lengths = {section.chunks, *(policy if name == "agent" else [])}
        for chunks in sorted(lengths) if trained else ():
            try:
                _check_one(config, section, chunks, tokenizer, demonstrated=demonstrated and name == "agent")
            except ConfigError as error:
                raise ConfigError(f"reasoning.{name}, an episode of {chunks} chunks: {error}") from error


def _check_held_out(agent: QuestionFiles | None, plasticity: QuestionFiles | None) -> None:
    """Raises ConfigError if a document is held out by one section and trained on by the other."""
    if agent is None or plasticity is None or agent.held_out == plasticity.held_out:
        return
    (agents, agents_held), (others, others_held) = (
        [{same_text(document.context) for document in part} for part in read_questions(files)]
        for files in (agent, plasticity)
    )
    if shared := len(agents & others_held) + len(others & agents_held):
        raise ConfigError(
            f"reasoning.agent.data.held_out={agent.held_out} and reasoning.plasticity.data.held_out="
            f"{plasticity.held_out}: {shared:,} documents are trained on by one and held out by the other; set both to"
            " the same share"
        )


def _check_one(
    config: Config, section: EpisodesOfTask, chunks: int, tokenizer: TextTokenizer | None, *, demonstrated: bool
) -> None:
    assert config.reasoning is not None
    files = section.data if isinstance(section, EpisodesOfDocuments) else None
    if tokenizer is None and not section.tokens:
        if files is not None:
            train, _ = read_questions(files)
            if demonstrated:
                check_demonstrated(train)
            return
        known = known_task(section.task)
        if known.episode is not None:
            text_episode(
                section.task, section.seed, 0, known.standard.changed({**section.difficulty, "chunks": chunks})
            )
            return
        if isinstance(section, EpisodesOfDocuments):
            known.standard.changed(section.difficulty)
            return
    source = source_of(section, config.reasoning.chunk, tokenizer)
    check_vocabulary(config, section, source)
    if isinstance(source, FileDocuments):
        part = config.reasoning.memory.tokens // config.reasoning.memory.heads
        source.check(chunks, demonstrated=demonstrated, memory=part)
        memories_BNM = source.memories([0], chunks) if demonstrated else None
        if memories_BNM is not None:
            check_memories(memories_BNM, source.pad, config.reasoning.memory.tokens, config.reasoning.memory.heads)
        return
    sample = max(1, min(SAMPLE, SAMPLE_CHUNKS // chunks))  # long documents take long to make
    episodes = source.batch([*range(sample), *range(FIRST_HELD_OUT, FIRST_HELD_OUT + sample)], chunks)
    memories_BNM = source.memories(range(SAMPLE), chunks) if demonstrated else None
    if memories_BNM is not None:
        check_memories(memories_BNM, source.pad, config.reasoning.memory.tokens, config.reasoning.memory.heads)
    elif demonstrated and not episodes.facts_BFW.numel():
        raise ConfigError(
            f"{section.task} has no demonstrations for the phase imitation, because it does not say which facts an"
            " answer needs; set reasoning.phases.imitation.steps: 0, or take another task"
        )


def check_vocabulary(config: Config, section: EpisodesOfTask, source: EpisodeSource) -> None:
    """Raises ConfigError if the episodes have ids that the model does not have."""
    known = config.cdrmix_model.vocab_size
    if source.vocab_size > known:
        raise ConfigError(f"{section.task} has {source.vocab_size} ids; model.vocab_size is {known}")


def fingerprint_of_questions(config: Config) -> str | None:
    """The SHA-256 of all questions and documents of the configuration's files; None without files."""
    assert config.reasoning is not None
    sections = (config.reasoning.plasticity, config.reasoning.agent)
    files = [section.data for section in sections if section.data is not None]
    digest = hashlib.sha256()
    for data in files:
        for part in read_questions(data):
            rows = [document._replace(place="") for document in part]
            digest.update(json.dumps(rows, sort_keys=True).encode())
    return digest.hexdigest() if files else None
