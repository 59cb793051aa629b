"""A memory that outlives its process: the episodic index of a model, in a folder, written and asked by a session.

A chunk that the controller commits is a commit of the index, on the disk when `keep` returns; one that is rolled back
leaves nothing. A chunk that is there already is not written twice but used again, so that a document may be read again
from its beginning after a kill. Questions are answered by the model's operations: it searches the index, puts what was
found in front of the question, and answers.
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
from cdrmix.reason.episodes import Episodes, EpisodeSource, source_of
from cdrmix.reason.memory.episode_log import NEVER, Floats
from cdrmix.reason.memory.episodic_index import EpisodicIndex
from cdrmix.reason.memory.kept_episodes import Hit, Staged
from cdrmix.reason.model import StageBModel
from cdrmix.reason.operations.rollout import Reader
from cdrmix.reason.operations.windows import Window, Windows
from cdrmix.reason.rl.rollout import decode, prefill

MODEL = "model.json"  # which model's memory it is


class Recalled(NamedTuple):
    """An answer from the index, and the episodes [tokens] that it was read with, the first in front."""

    answer_1A: Tensor
    episodes: tuple[np.ndarray, ...]


class KeptMemory:
    """The episodic index in `folder`, new or gone on with, open for this process alone; `close` it.

    Steps count on over processes, so that what expires does. say: hears of commits that were found unfinished.
    Raises ConfigError for a model that has not learnt to use an index on text, MemoryLogError for a folder that is
    damaged, another model's, or open in another process.
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
                "--memory: this model has not learnt to use an index: its configuration has no steps in "
                "reasoning.phases.operations and operations_imitation, or reasoning.memory.episodic is false"
            )
        if reasoning.operations.tokens:
            raise ConfigError("--memory: this model's operations were trained on ids of their own, not on text")
        if folder.is_file() or not folder.absolute().parent.is_dir():
            raise ConfigError(f"--memory {folder}: name a folder, new or a memory's, in a folder that exists")
        self._model, self._settings = model, reasoning.memory
        self._source: EpisodeSource = source_of(reasoning.operations, reasoning.chunk, tokenizer)
        self._reader = Reader(reasoning, self._source)
        _check_model(folder, model, tokenizer)
        self._index = EpisodicIndex(folder, reasoning.memory.dim, reasoning.memory.max_tokens)
        self._step = self._index.last_step
        if self._index.dropped_bytes:
            say(f"{folder}: {self._index.dropped_bytes} bytes of a commit that was not finished are put aside")

    def __len__(self) -> int:
        """How many episodes there are."""
        return len(self._index)

    @property
    def tokens(self) -> int:
        """Of all episodes."""
        return self._index.tokens

    def close(self) -> None:
        """Gives the folder free for another process."""
        self._index.close()

    def proposed(self, chunk_1C: Tensor) -> Staged:
        """What a chunk would write, in a step of its own: nothing of it is seen, or kept, before a commit."""
        self._step += 1
        tokens = chunk_1C[0].cpu().numpy().astype(np.uint32)
        windows, staged = Windows(), Staged()
        windows.add(Window((*chunk_1C[0].tolist(), self._source.marks.update), len(tokens), 1))
        key = windows.read(self._model).keys_WS[0].float().cpu().numpy()
        (hits,) = self._index.search(key[None], self._settings.top_k, self._step)
        there = [hit for hit in hits if np.array_equal(hit.tokens, tokens)][:1]
        staged.use(there)
        if not there:
            lives = self._settings.time_to_live
            staged.add(key, tokens, NEVER if lives is None else self._step + lives)
        return staged

    def __contains__(self, id: object) -> bool:
        return id in self._index

    def search(self, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """See EpisodicMemory. The step is the memory's own, whatever the caller's is."""
        return self._index.search(queries, count, self._step)

    def commit(self, staged: Staged, step: int) -> list[int]:
        """See EpisodicMemory: durable when it returns. The step is the memory's own, whatever the caller's is."""
        return self._index.commit(staged, self._step)

    @torch.no_grad()
    def recall(self, question: list[int], answer: int) -> Recalled:
        """What the model answers, in at most `answer` tokens, by the operations that it thinks likeliest.

        Raises ConfigError for a question that is longer than the window's.
        """
        width = self._source.question
        if len(question) > width:
            raise ConfigError(f"the question has {len(question)} tokens; this model's window holds one of {width}")
        padded = torch.tensor([[*question, *[self._source.pad] * (width - len(question))]])
        none = torch.empty(1, 0, dtype=torch.long)
        of_question = Episodes(
            padded, torch.empty(1, 0, self._source.chunk, dtype=torch.long), none, none, none, none.bool(), none.bool()
        )
        rollouts = self._reader.roll_out(self._model, of_question, 1, None, memories=[self])
        (row,) = rollouts.rows
        model, end = self._model.language_model, self._source.marks.end
        prompt = torch.tensor([rollouts.windows.all[row.window].tokens], device=model.embedding.weight.device)
        said = decode(model, prefill(model, prompt), answer, temperature=0.0, generator=torch.Generator(), end=end)
        tokens = said.tokens_BN
        written = torch.where(said.mask_BN & (tokens != end), tokens, self._source.pad)
        return Recalled(written, tuple(hit.tokens for hit in row.spliced))


def _check_model(folder: Path, model: StageBModel, tokenizer: TextTokenizer) -> None:
    """Notes in a new folder which model's memory it is; MemoryLogError for another's: its keys lie in another space."""
    assert model.summary is not None
    digest = hashlib.sha256(model.language_model.embedding.weight.detach().cpu().numpy().tobytes())
    for _, tensor in sorted(model.summary.state_dict().items()):
        digest.update(tensor.cpu().numpy().tobytes())
    ours = {"tokenizer": tokenizer.fingerprint, "keys": digest.hexdigest()}
    path = folder / MODEL
    if not path.exists():
        if (folder / "episodes.log").exists():
            raise MemoryLogError(
                f"{folder} holds an episode log and no {MODEL}: put that file back, or name a new folder"
            )
        folder.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(ours, indent=1) + "\n")
        return
    try:
        theirs = json.loads(path.read_bytes())
    except ValueError as error:
        raise MemoryLogError(f"{path} is damaged: {error}") from error
    if theirs != ours:
        raise MemoryLogError(f"{folder} is the memory of another model, or of other weights of it: name a new folder")
