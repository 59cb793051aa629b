"""The durable memory of a session: an episodic index in a folder, which later sessions and processes can use.

Each chunk that the controller commits is a commit of the index, on the disk when `commit` returns. A chunk that is
rolled back is not stored. A chunk that is already stored is not stored again but marked as used, so a document can be
read again from its beginning after a kill. The model answers questions by its operations: it searches the index, puts
the found chunks in front of the question, and answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.durable import write_atomically
from cdrmix.errors import ConfigError, MemoryLogError
from cdrmix.json_text import parse_json
from cdrmix.model.decoding import prefill
from cdrmix.reason.episodes import Episodes, EpisodeSource
from cdrmix.reason.memory.episode_log import LOG, NEVER, Floats
from cdrmix.reason.memory.episodic_index import EpisodicIndex
from cdrmix.reason.memory.kept_episodes import Hit, Staged
from cdrmix.reason.model import StageBModel
from cdrmix.reason.operations.rollout import Reader
from cdrmix.reason.operations.windows import Window, Windows
from cdrmix.reason.rl.rollout import decode
from cdrmix.reason.sources import source_of

MODEL = "model.json"  # identifies the model of the memory


class Recalled(NamedTuple):
    """An answer, and the episodes [tokens] that stood in front of the question, in their order."""

    answer_1A: Tensor
    episodes: tuple[np.ndarray, ...]


class DurableMemory:
    """The episodic index in `folder`, new or existing, open for this process alone; `close` it at the end.

    The step count continues from process to process, so that episodes expire. say: prints a line if opening removed an
    incomplete commit. Raises ConfigError for a model that was not trained to use an index on text, MemoryLogError for
    a folder that is damaged, another model's, or open in another process.
    """

    def __init__(
        self,
        folder: Path,
        model: StageBModel,
        reasoning: Reasoning,
        tokenizer: TextTokenizer,
        say: Callable[[str], None],
    ) -> None:
        if model.operations is None or not reasoning.memory.episodic:
            raise ConfigError(
                "--memory: this model was not trained to use an index: its configuration has no steps in "
                "reasoning.phases.operations and operations_imitation, or reasoning.memory.episodic is false"
            )
        if reasoning.operations.tokens:
            raise ConfigError(
                "--memory: this model's operations were trained on ids of a vocabulary of their own, not on text"
            )
        if folder.is_file() or not folder.absolute().parent.is_dir():
            raise ConfigError(
                f"--memory {folder}: name a new folder or the folder of a memory, in a folder that exists"
            )
        self._model, self._settings = model, reasoning.memory
        self._source: EpisodeSource = source_of(reasoning.operations, reasoning.chunk, tokenizer)
        self._reader = Reader(reasoning, self._source)
        _check_model(folder, model, tokenizer)
        self._index = EpisodicIndex(folder, reasoning.memory.dim, reasoning.memory.max_tokens)
        self._step = self._index.last_step
        if self._index.dropped_bytes:
            say(f"{folder}: moved {self._index.dropped_bytes} bytes of an incomplete commit to a separate file")

    def __len__(self) -> int:
        """The number of episodes."""
        return len(self._index)

    @property
    def tokens(self) -> int:
        """The tokens of all episodes."""
        return self._index.tokens

    def check_question(self, tokens: int) -> None:
        """Raises ConfigError for a question that is longer than the window's."""
        if tokens > self._source.question:
            raise ConfigError(
                f"--memory: the question has {tokens} tokens; the window in which this model's operations read it has"
                f" space for {self._source.question}"
            )

    def close(self) -> None:
        """Releases the folder for another process."""
        self._index.close()

    def stage(self, chunk_1C: Tensor) -> Staged:
        """Starts a new step and stages the chunk for it. Before a commit no search sees it, and nothing is stored."""
        self._step += 1
        tokens = chunk_1C[0].cpu().numpy().astype(np.uint32)
        windows, staged = Windows(), Staged()
        windows.add(Window((*chunk_1C[0].tolist(), self._source.marks.update), len(tokens), 1))
        key = windows.read(self._model).keys_WS[0].float().cpu().numpy()
        (hits,) = self._index.search(key[None], self._settings.top_k, self._step)
        stored = [hit for hit in hits if np.array_equal(hit.tokens, tokens)][:1]
        staged.use(stored)
        if not stored:
            time_to_live = self._settings.time_to_live
            staged.add(key, tokens, NEVER if time_to_live is None else self._step + time_to_live)
        return staged

    def __contains__(self, id: object) -> bool:
        return id in self._index

    def search(self, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """See EpisodicMemory. It uses the memory's own step count instead of `step`."""
        return self._index.search(queries, count, self._step)

    def commit(self, staged: Staged, step: int) -> list[int]:
        """See EpisodicMemory. It is durable when it returns, and uses the memory's own step count instead of `step`."""
        return self._index.commit(staged, self._step)

    @torch.no_grad()
    def recall(self, question: list[int], answer: int) -> Recalled:
        """The model's answer, of at most `answer` tokens, with the most probable operations.

        The model may continue after its answer, because the operations phases have no end token after it.
        Raises ConfigError for a question that is longer than the window's.
        """
        self.check_question(len(question))
        padded = torch.tensor([[*question, *[self._source.pad] * (self._source.question - len(question))]])
        empty = torch.empty(1, 0, dtype=torch.long)
        chunks = torch.empty(1, 0, self._source.chunk, dtype=torch.long)
        episodes = Episodes(padded, chunks, empty, empty, empty, empty.bool(), empty.bool())
        rollouts = self._reader.roll_out(self._model, episodes, 1, None, memories=[self])
        (row,) = rollouts.rows
        model, end = self._model.language_model, self._source.marks.end
        prompt = torch.tensor([rollouts.windows.all[row.window].tokens], device=model.embedding.weight.device)
        generated = decode(model, prefill(model, prompt), answer, temperature=0.0, generator=torch.Generator(), end=end)
        tokens = generated.tokens_BN
        written = torch.where(generated.mask_BN & (tokens != end), tokens, self._source.pad)
        return Recalled(written, tuple(hit.tokens for hit in row.spliced))


def _check_model(folder: Path, model: StageBModel, tokenizer: TextTokenizer) -> None:
    """Records in a new folder which model wrote it. Raises MemoryLogError for the memory of another model, whose keys
    this model cannot compare with its own."""
    assert model.summary is not None
    digest = hashlib.sha256(model.language_model.embedding.weight.detach().cpu().numpy().tobytes())
    for _, tensor in sorted(model.summary.state_dict().items()):
        digest.update(tensor.cpu().numpy().tobytes())
    identity = {"tokenizer": tokenizer.fingerprint, "keys": digest.hexdigest()}
    path = folder / MODEL
    if not path.exists():
        if (folder / LOG).exists():
            raise MemoryLogError(f"{folder} has an episode log but no {MODEL}: restore that file, or name a new folder")
        folder.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(identity, indent=1) + "\n")
        return
    try:
        recorded = parse_json(path.read_bytes())
    except ValueError as error:
        raise MemoryLogError(f"{path} is damaged: {error}") from error
    if recorded != identity:
        raise MemoryLogError(f"{folder} is the memory of another model, or of other weights of it: name a new folder")
