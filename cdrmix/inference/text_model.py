"""A trained model for use from Python: generates text and computes logits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import overload

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.inference.generate import generate
from cdrmix.inference.load import Trained
from cdrmix.inference.sampling import Sampling
from cdrmix.inference.speculative import DraftStatistics, decode_speculatively, drafting_model
from cdrmix.model.causal import CausalModel
from cdrmix.runtime import device_type


class TextModel:
    """A language model with its tokenizer, in evaluation mode and float32. `cdrmix.load` returns it.

    Attributes:
        model: the torch module.
        tokenizer: the tokenizer.
        config: the configuration of the run that trained the model.
        step: number of optimizer steps of the training.
        drafts: counts of the last generation with `speculative`; None after one without.
    """

    def __init__(self, loaded: Trained, settings: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """settings: the threads and the determinism of the process while the model computes; by default as they are."""
        self._settings = settings
        self.model: CausalModel = loaded.model
        self.tokenizer: TextTokenizer = loaded.tokenizer
        self.config: Config = loaded.config
        self.step: int = loaded.step
        self.drafts: DraftStatistics | None = None

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"TextModel({self.config.run.name}, step {self.step}, {parameters:,} parameters, {self.device})"

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    def to(self, device: str | torch.device) -> TextModel:
        """Moves the weights to a device and returns this object.

        device: auto, cpu, cuda, or a torch.device of a GPU. Raises ConfigError if it does not exist.
        """
        if not isinstance(device, torch.device):
            device = torch.device(device_type(device, "device"))
        elif device.type != "cpu":
            device_type(device.type, "device")  # whether there is one
        self.model.to(device)
        return self

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without an end-of-text token. Raises ValueError if it is not a string."""
        if not isinstance(text, str):
            raise ValueError(f"text must be a string; found {text!r}")
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD. Ids without a token give no text.

        ids: integers, also as a tensor or a NumPy array [T].
        Raises ValueError for anything else, and for ids outside of the vocabulary of the model.
        """
        try:
            integers = [operator.index(each) for each in ids]
        except TypeError:
            raise ValueError(f"ids must be a sequence of integers; found {ids!r}") from None
        if integers:
            self._check_range(min(integers), max(integers))
        return self.tokenizer.decode(integers)

    @torch.no_grad()
    def logits(self, ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Next-token logits: float32 [B, T, vocab_size] for token ids [B, T], or [T, vocab_size] for one row [T].

        Each row begins a document. In training, the token `tokenizer.first_id` comes before a document: end-of-text, or
        the begin-of-text token of the tokenizer. `generate` adds it; this method does not.
        Raises ValueError if the ids are not integers of the vocabulary, or the rows do not have the same length.
        """
        try:
            ids_BT = torch.as_tensor(ids, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"ids must be integers [T] or [B, T], with rows of the same length: {error}") from error
        if not ids_BT.numel():
            raise ValueError("ids are empty; give at least one token")
        kind = ids_BT.dtype
        if ids_BT.ndim not in (1, 2) or kind.is_floating_point or kind.is_complex or kind == torch.bool:
            raise ValueError(f"ids must be integers [T] or [B, T]; found {kind} {list(ids_BT.shape)}")
        wide = ids_BT.long()
        self._check_range(int(wide.min()), int(wide.max()))
        rows_BT = wide if ids_BT.ndim == 2 else wide.unsqueeze(0)
        with self._settings():
            logits = self.model.logits(self.model(rows_BT).hidden_BTD)
        return logits if ids_BT.ndim == 2 else logits[0]

    def _check_range(self, least: int, most: int) -> None:
        vocabulary = self.model.vocab_size
        if not 0 <= least <= most < vocabulary:
            raise ValueError(f"ids must lie in [0, {vocabulary}); found {least} to {most}")

    @overload
    def generate(
        self,
        prompts: str,
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        min_p: float = ...,
        repetition_penalty: float = ...,
        stop: str | Sequence[str] = ...,
        seed: int | Sequence[int] = ...,
        speculative: bool = ...,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompts: list[str] | tuple[str, ...],
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        min_p: float = ...,
        repetition_penalty: float = ...,
        stop: str | Sequence[str] = ...,
        seed: int | Sequence[int] = ...,
        speculative: bool = ...,
    ) -> list[str]: ...

    def generate(
        self,
        prompts: str | list[str] | tuple[str, ...],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 0.95,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | Sequence[int] = 1,
        speculative: bool = False,
    ) -> str | list[str]:
        """Continues one prompt (returns a string) or a list of prompts of any lengths (returns a list).

        The other arguments are those of `cdrmix.Sampling`. seed: one seed for all prompts, or a list with one seed for
        each prompt. speculative: as of `stream`. Raises ValueError for arguments out of range.
        """
        texts = _texts(prompts)
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            max_new_tokens=max_new_tokens,
            stop=stop,
        )
        written = self._written(self._stream(texts, sampling, seed, speculative=speculative), len(texts))
        return written[0] if isinstance(prompts, str) else written

    def sample(
        self,
        prompts: list[str] | tuple[str, ...],
        count: int,
        sampling: Sampling | None = None,
        *,
        heal: bool = False,
        speculative: bool = False,
    ) -> list[list[str]]:
        """Continues each prompt `count` times, in batches; returns a list of `count` texts for each prompt.

        A prompt is read once. Sample i of every prompt has the seed of the sampling + i, so it is the text that
        `generate` gives for that seed, unless `heal` is set: the first sampled token may then also be one that begins
        with the last token of the prompt, instead of it (for prompts that end where the tokenizer would not cut).
        speculative: as of `stream`; then prompts are read for each sample, and rows one after another.
        Raises ValueError for arguments out of range.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling must be a cdrmix.Sampling, as Sampling(top_k=40); found {sampling!r}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"count must be an integer of at least 1; found {count!r}")
        texts = [text for text in _texts(prompts) for _ in range(count)]
        seeds = [sampling.seed + number % count for number in range(len(texts))]
        written = self._written(self._stream(texts, sampling, seeds, heal, speculative=speculative), len(texts))
        return [written[start : start + count] for start in range(0, len(texts), count)]

    def stream(
        self,
        prompts: str | list[str] | tuple[str, ...],
        sampling: Sampling | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        speculative: bool = False,
    ) -> Iterator[tuple[int, str]]:
        """Yields (number of the prompt, piece of text) while the texts are generated. A piece has complete characters.

        sampling: the arguments of `generate`, except for the seeds.
        seed: one seed for all prompts, or one for each prompt; it replaces the seed of the sampling.
        speculative: the further depths of the model (model.prediction) draft tokens, which one pass verifies. The texts
            are the same, one prompt after another. `drafts` has the counts. ConfigError for a model that cannot draft.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling must be a cdrmix.Sampling, as Sampling(top_k=40); found {sampling!r}")
        seed = sampling.seed if seed is None else seed
        return self._computed(self._stream(_texts(prompts), sampling, seed, speculative=speculative))

    def _stream(
        self,
        texts: list[str],
        sampling: Sampling,
        seed: int | Sequence[int],
        heal: bool = False,
        *,
        speculative: bool = False,
    ) -> Iterator[tuple[int, str]]:
        seeds = list(seed) if isinstance(seed, Sized) else [seed] * len(texts)
        if len(seeds) != len(texts):
            raise ValueError(
                f"seed has {len(seeds)} numbers for {len(texts)} prompts; give one seed, or one for each prompt"
            )
        samplings = [replace(sampling, seed=each) for each in seeds]
        decoding = None
        self.drafts = None
        if speculative:
            drafting_model(self.model)
            self.drafts = DraftStatistics()
            decoding = partial(decode_speculatively, statistics=self.drafts)
        return generate(self.model, self.tokenizer, texts, samplings, heal=heal, decoding=decoding)

    def _written(self, pieces: Iterator[tuple[int, str]], count: int) -> list[str]:
        """The whole texts. Nobody reads between their pieces, so the settings change once."""
        texts: list[list[str]] = [[] for _ in range(count)]
        with self._settings():
            for number, piece in pieces:
                texts[number].append(piece)
        return ["".join(each) for each in texts]

    def _computed(self, pieces: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """The pieces, each computed within the settings: the reader of a stream works with its own."""
        while True:
            with self._settings():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece


def _texts(prompts: str | list[str] | tuple[str, ...]) -> list[str]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts must be a string or a list of strings; found {prompts!r}")
    return list(prompts)
