"""A session: a trained stage B model reads a long document chunk by chunk, remembers parts of it, and answers.

Every chunk is read twice. The controller reads it with the fast weights, and commits their change or rolls it back.
The memory agent reads it together with the question and the token memory, and writes a new token memory. The state of a
session can be saved; a loaded session gives the same answers. The state has a constant size unless attention's caches
are carried (reasoning.carry: all). With a DurableMemory the chunks that the controller commits are also stored in an
index on the disk, for other sessions and processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.durable import disk_guard
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.inference.load import Loaded
from cdrmix.model.cache import filled, flattened
from cdrmix.model.decoding import prefill
from cdrmix.reason.agent.agent import TokenMemory, Window
from cdrmix.reason.build import load_stage_b
from cdrmix.reason.chunking import chunk_bounds
from cdrmix.reason.controller.controller import Controller, Group, configured
from cdrmix.reason.durable_memory import DurableMemory
from cdrmix.reason.episodes import EpisodeSource
from cdrmix.reason.rl.rollout import decode
from cdrmix.reason.sources import source_of

FORMAT = "cdrmix session 3"  # 2: adds the number of memory changes, which the step budget limits; 3: the model's digest


class Step(NamedTuple):
    """The result of one chunk. text: the chunk. committed: whether its fast-weight update was committed; None without
    adapters and beyond the step budget. scale: the strength of the update. memory: the token memory after the chunk;
    changed: whether the agent changed it."""

    number: int
    text: str
    committed: bool | None
    scale: float
    memory: str
    changed: bool


class Answers(NamedTuple):
    """The same question answered from the token memory and from the fast weights; None where a model has none."""

    from_memory: str | None
    from_fast_weights: str | None


class Session:
    """One document and one question. The question is known from the start: the agent chooses by it what to keep.

    memory: the folder of a durable memory, which stores the committed chunks; with it, `close` the session at the end.
    say: prints a line if opening the memory removed an incomplete commit.
    """

    def __init__(
        self, loaded: Loaded, question: str, memory: Path | None = None, say: Callable[[str], None] = print
    ) -> None:
        reasoning = reader_of_text(loaded)
        self._reasoning, self._tokenizer, self.question = reasoning, loaded.tokenizer, question
        self._loaded, self._model = loaded, load_stage_b(loaded)
        self._source: EpisodeSource = source_of(reasoning.agent, reasoning.chunk, loaded.tokenizer)
        self._window = Window.of(reasoning, self._source)
        self._device = loaded.model.embedding.weight.device
        ids = loaded.tokenizer.encode(f" {question}")
        if len(ids) > self._source.question:
            raise ConfigError(
                f"the question has {len(ids)} tokens; this model's window has space for {self._source.question}"
                " (reasoning.agent.question_tokens of its training)"
            )
        self._question_1Q = self._row(ids, self._source.question)
        self._controller = Controller(loaded.model, reasoning) if loaded.model.adapters else None
        self._decide = configured(reasoning, self._model.controller)
        self._episode = self._controller.begin(1) if self._controller else None
        phases = reasoning.phases
        self._remembers = phases.train_on("imitation", "policy")
        self._token_memory = TokenMemory.empty(self._window, 1, self._device)
        self.steps = self.changes = 0
        self.durable_memory: DurableMemory | None = None
        if memory is not None:
            self.durable_memory = DurableMemory(memory, self._model, reasoning, loaded.tokenizer, say)
            try:
                self.durable_memory.check_question(len(ids))
            except ConfigError:
                self.close()
                raise

    def close(self) -> None:
        """Releases the memory's folder for another process."""
        if self.durable_memory is not None:
            self.durable_memory.close()

    @torch.no_grad()
    def read(self, document: str) -> Iterator[Step]:
        """Reads a document, or continues with the next part of it, chunk by chunk. Short chunks are padded.

        `controller.step_budget` limits a session twice: the controller reads that many chunks, and the agent changes
        its memory that many times. After the first limit the fast weights stay unchanged and no chunk is stored in the
        durable memory. After the second limit the token memory stays unchanged.
        """
        for ids in cut(self._tokenizer, document, self._reasoning.chunk):
            self.steps += 1
            chunk_1C = self._row(ids, self._reasoning.chunk)
            committed, scale = None, 0.0
            if self._controller and self._episode and self._controller.steps_left(self._episode):
                proposal = self._controller.propose(self._episode, chunk_1C)
                staged = None if self.durable_memory is None else self.durable_memory.stage(chunk_1C)
                proposal = proposal._replace(after=proposal.after._replace(transactions=(staged,)))
                decision = self._decide(proposal.end_BD())
                self._episode = self._controller.settle(self._episode, proposal, decision, self.durable_memory)
                committed = bool(decision.commit_B)
                scale = self._controller.scales[int(decision.branch_B)] if committed else 0.0
            elif self.durable_memory is not None and self._controller is None:
                # Without a controller every chunk is stored.
                self.durable_memory.commit(self.durable_memory.stage(chunk_1C), self.steps)
            changed = False
            if self._remembers and self.changes < self.budget:
                before = self._token_memory.parts_BHP
                prompt = torch.cat(
                    [self._window.begin(self._question_1Q), self._window.turn(self._token_memory.shown(), chunk_1C)], 1
                )
                self._token_memory = self._token_memory.write(self._write(prompt, self._window.part), self.steps)
                changed = not torch.equal(before, self._token_memory.parts_BHP)
                self.changes += changed
            memory = self._text(self._token_memory.shown())
            yield Step(self.steps, self._text(chunk_1C), committed, scale, memory, changed)

    @property
    def budget(self) -> int:
        """The number of chunks that the controller may read, and of changes that the agent may make."""
        return self._reasoning.controller.step_budget

    @property
    def spent(self) -> list[str]:
        """The names of what no longer changes because its step budget is spent."""
        no_steps = self._controller and self._episode and not self._controller.steps_left(self._episode)
        no_changes = self._remembers and self.changes >= self.budget
        names = ["the fast weights"] * bool(no_steps)
        names += ["the index"] * bool(no_steps and self.durable_memory is not None)
        return names + ["the memory"] * bool(no_changes)

    @torch.no_grad()
    def answer(self) -> Answers:
        """Answers the question. The session does not change."""
        from_memory = from_fast_weights = None
        if self._remembers:
            last = self._window.last(self._token_memory.shown())
            prompt = torch.cat([self._window.begin(self._question_1Q), last], 1)
            from_memory = self._text(self._write(prompt, self._window.answer)).strip()
        if self._episode is not None:
            (group,) = self._episode.groups
            marks = self._source.marks
            question = self._question_1Q[:, : int((self._question_1Q != self._source.pad).sum())]
            prompt = torch.cat([self._mark(marks.question), question, self._mark(marks.answer)], 1)
            model, generator = self._model.language_model, torch.Generator()
            prefix = prefill(model, prompt, group.cache)
            generated = decode(model, prefix, self._window.answer, temperature=0.0, generator=generator, end=marks.end)
            from_fast_weights = self._text(self._window.written(generated)).strip()
        return Answers(from_memory, from_fast_weights)

    def recall(self) -> tuple[str, list[str]]:
        """The answer from the durable memory, and the texts from it that the model read in front of the question."""
        assert self.durable_memory is not None
        ids = [token for token in self._question_1Q[0].tolist() if token != self._source.pad]
        recalled = self.durable_memory.recall(ids, self._window.answer)
        texts = [self._text(torch.from_numpy(tokens.astype("int64"))) for tokens in recalled.episodes]
        return self._text(recalled.answer_1A).strip(), texts

    def save(self, path: Path) -> None:
        """Writes the state to one safetensors file. Raises DiskFullError."""
        tensors = {"memory.parts": self._token_memory.parts_BHP, "memory.changed": self._token_memory.changed_BH}
        if self._episode is not None:
            (group,) = self._episode.groups
            tensors["commits"] = self._episode.commits_B
            tensors |= {f"state.{name}": tensor for name, tensor in flattened(group.cache or ()).items()}
        metadata = {"format": FORMAT, "question": self.question, "steps": str(self.steps)}
        metadata |= {"changes": str(self.changes), "model": identity_of(self._loaded)}
        with disk_guard(f"the session {path}", "Free some space, or name another folder."):
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)

    @classmethod
    def load(
        cls, loaded: Loaded, path: Path, memory: Path | None = None, say: Callable[[str], None] = print
    ) -> Session:
        """Loads a session that was saved with this model. Raises CheckpointError for any other file."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read as a session: {error}") from error
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no session of this version; its format is {metadata.get('format')!r}")
        if metadata.get("model") != identity_of(loaded):
            raise CheckpointError(
                f"{path} is the session of another model, or of other weights of it; name another file"
            )
        session = cls(loaded, metadata["question"], memory, say)
        session.steps, session.changes = int(metadata["steps"]), int(metadata["changes"])
        try:
            session._restore(tensors, path)
        except BaseException:
            session.close()
            raise
        return session

    @torch.no_grad()
    def _restore(self, tensors: dict[str, Tensor], path: Path) -> None:
        device = self._device
        parts, changed = tensors["memory.parts"].to(device), tensors["memory.changed"].to(device)
        if parts.shape != self._token_memory.parts_BHP.shape:
            raise CheckpointError(
                f"{path} has a memory of shape {list(parts.shape)}, this model's has shape "
                f"{list(self._token_memory.parts_BHP.shape)}: it is the session of another model"
            )
        self._token_memory = TokenMemory(parts, changed)
        if self._episode is None:
            return
        state_tensors = {
            name.removeprefix("state."): tensor.to(device)
            for name, tensor in tensors.items()
            if name.startswith("state.")
        }
        chunk_1C = self._row([], self._reasoning.chunk)
        template = self._model.language_model(chunk_1C, return_cache=True).cache
        assert template is not None
        state = None
        if any(name.startswith("state.") for name in tensors):
            state = filled(template, state_tensors)
            shapes = {name: tensor.shape[1:] for name, tensor in flattened(template).items() if ".plastic." in name}
            filled_tensors = flattened(state)
            if any(
                name not in filled_tensors or filled_tensors[name].shape[1:] != shape for name, shape in shapes.items()
            ):
                raise CheckpointError(f"{path} has fast weights of other sizes: it is the session of another model")
        (group,) = self._episode.groups
        self._episode = self._episode._replace(
            groups=(Group(group.rows_R, state),),
            steps=min(self.steps, self.budget),
            commits_B=tensors["commits"].to(device),
        )

    def _write(self, prompt_1L: Tensor, tokens: int) -> Tensor:
        model, generator = self._model.language_model, torch.Generator()
        end = self._window.marks.end
        generated = decode(model, prefill(model, prompt_1L), tokens, temperature=0.0, generator=generator, end=end)
        return self._window.written(generated)

    def _row(self, ids: list[int], width: int) -> Tensor:
        return torch.tensor([[*ids, *[self._source.pad] * (width - len(ids))]], device=self._device)

    def _mark(self, mark: int) -> Tensor:
        return torch.tensor([[mark]], device=self._device)

    def _text(self, ids_1L: Tensor) -> str:
        ids = [token for token in ids_1L.flatten().tolist() if token != self._source.pad]
        return self._tokenizer.decode(ids)


def identity_of(loaded: Loaded) -> str:
    """The SHA-256 of a model's weights and of its tokenizer's fingerprint, the same after an export in float32.

    Without the heads of further tokens (model.prediction), which an export leaves out by default.
    """
    digest = hashlib.sha256(loaded.tokenizer.fingerprint.encode())
    for name, tensor in sorted(loaded.weights.items()):
        if name.startswith("prediction."):
            continue
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def reader_of_text(loaded: Loaded) -> Reasoning:
    """The configuration's section `reasoning`. Raises ConfigError for a model not trained to read long documents."""
    reasoning = loaded.config.reasoning
    if reasoning is None or not loaded.heads:
        raise ConfigError("this model was not trained in stage B: it cannot read documents longer than its window")
    if reasoning.agent.tokens:
        raise ConfigError("this model's memory agent was trained on ids of a vocabulary of its own, not on text")
    return reasoning


def cut(tokenizer: TextTokenizer, document: str, chunk: int) -> Iterator[list[int]]:
    """A document's tokens in chunks of at most `chunk`."""
    ids = tokenizer.encode(document)
    for start, end in pairwise(chunk_bounds([tokenizer.token_bytes(token) for token in ids], chunk)):
        yield ids[start:end]


def describe(step: Step, width: int = 60) -> str:
    """A step as one line of text."""
    text = " ".join(step.text.split())
    text = text if len(text) <= width else text[: width - 1] + "…"
    update = f"written x{step.scale:g}" if step.committed else "rolled back"
    update = "" if step.committed is None else update
    memory = json.dumps(" ".join(step.memory.split()), ensure_ascii=False)
    return f"{step.number:>5}  {text:<{width}}  {update:<12}  {'*' if step.changed else ' '} {memory}"
