"""Log-likelihoods and continuations of token sequences by any causal language model, in batches.

Sequences of a batch are filled up on the right: a causal model does not see the filling before their last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from cdrmix.data import tokenizer_files
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.eval.countdown import counted
from cdrmix.eval.suites import Likelihood
from cdrmix.hf.load import LoadedForeign
from cdrmix.inference.generate import Row, TextStream, decode
from cdrmix.inference.load import Loaded
from cdrmix.inference.sampling import Sampling
from cdrmix.json_text import parse_json
from cdrmix.model.causal import CausalModel
from cdrmix.model.decoding import check_finite
from cdrmix.runtime import threads_for

Item = TypeVar("Item")

LOGIT_TOKENS = 256  # tokens whose logits are stored at once


class Continuation(NamedTuple):
    """A text to continue, and how. sampling.stop: the continuation ends before these strings."""

    prompt: str
    sampling: Sampling


def prompts_begin(loaded: Loaded | LoadedForeign) -> bool:
    """Whether a prompt begins with the token that begins a document: with a model of transformers, whether its
    tokenizer puts a token before a text."""
    if isinstance(loaded, Loaded):
        return True
    settings = loaded.folder / tokenizer_files.SETTINGS
    given = parse_json(settings.read_bytes()) if settings.is_file() else {}
    files = tokenizer_files.TokenizerFiles(loaded.tokenizer.json_bytes, tokenizer_files.JSON, given)
    return tokenizer_files.begin_of_text(files) is not None


class HarnessModel:
    """A model with its tokenizer for the requests of lm-eval.

    begins: whether a prompt begins with `first_id`, the token that begins a document in training. A document and an
    answer without a question always do. max_length: tokens that the model reads at most. batch_size: sequences in one
    forward pass. say: gets the progress.
    """

    def __init__(
        self,
        model: CausalModel,
        tokenizer: TextTokenizer,
        *,
        begins: bool,
        max_length: int,
        batch_size: int,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_length, self.batch_size = max_length, batch_size
        self.first_id = tokenizer.first_id
        self._begins, self._say = begins, say

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a context and of its continuation.

        The two are encoded as one text, and spaces at the end of the context belong to the continuation, as in lm-eval.
        A token over the border, such as that of "return" after "ret", belongs to the continuation with all that follow:
        the context has the longest beginning that the ids of both texts share.
        """
        kept = context.rstrip()
        ids, alone = self.tokenizer.encode(context + continuation), self.tokenizer.encode(kept) if kept else []
        before = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(ids, alone, strict=False)))
        first = [self.first_id] if self._begins or not before else []
        return [*first, *ids[:before]], ids[before:]

    def likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Likelihood]:
        """The likelihoods of the continuations in pairs (context ids, continuation ids).

        Of a longer pair the model reads the last max_length ids before the last one. Pairs that differ only in the last
        id are computed together.
        Raises ConfigError for a continuation without ids, and for one of more than max_length ids.
        """
        if (longest := max((len(continuation) for _, continuation in pairs), default=0)) > self.max_length:
            raise ConfigError(
                f"an answer of a task has {longest:,} tokens, but the model reads {self.max_length:,} at most; set "
                "--max-length"
            )
        by_input: dict[tuple[int, ...], list[int]] = {}
        for number, (context, continuation) in enumerate(pairs):
            if not continuation:
                raise ConfigError("an answer of a task has no tokens; an answer must not be empty")
            by_input.setdefault(tuple([*context, *continuation][-self.max_length - 1 : -1]), []).append(number)
        results: dict[int, Likelihood] = {}
        for batch in self._batches(sorted(by_input, key=lambda ids: (-len(ids), ids)), "log-likelihoods"):
            for ids, hidden_TD in zip(batch, self._hidden(batch), strict=True):
                numbers = by_input[ids]
                targets = [pairs[number][1] for number in numbers]
                found = self._likelihoods_after(hidden_TD, targets)
                results.update(zip(numbers, found, strict=True))
        return [
            results[number]._replace(cut=len(context) + len(continuation) - 1 > self.max_length)
            for number, (context, continuation) in enumerate(pairs)
        ]

    def continuations(self, requests: Sequence[Continuation]) -> list[str]:
        """The continuation of each prompt, of which the last max_length - max_new_tokens ids are read.

        Raises ConfigError if max_new_tokens is not below max_length.
        """
        prompts = []  # and how many ids are put before each
        for prompt, sampling in requests:
            kept = self.max_length - sampling.max_new_tokens
            if kept < 1:
                raise ConfigError(
                    f"a task asks for answers of up to {sampling.max_new_tokens:,} tokens, but the model "
                    f"reads {self.max_length:,} with the question; set max_gen_toks in generation_kwargs of the task, "
                    "or --max-length"
                )
            first = [self.first_id] if self._begins or not prompt else []
            ids = [*first, *self.tokenizer.encode(prompt)]
            prompts.append((ids[-kept:], len(first) if len(ids) <= kept else 0))
        texts = [""] * len(requests)
        order = sorted(range(len(requests)), key=lambda number: -len(prompts[number][0]))
        for batch in self._batches(order, "texts"):
            rows = [Row(prompts[number][0], requests[number].sampling, added=prompts[number][1]) for number in batch]
            for place, text in self._texts(rows):
                texts[batch[place]] += text
        return texts

    def _texts(self, rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
        """Yields (number of the row, piece of its continuation). Rows end at the end-of-text token or a stop string."""
        streams = [TextStream(row.sampling.stop) for row in rows]
        for number, token in decode(self.model, rows, self.tokenizer.vocab_size):
            row, stream = rows[number], streams[number]
            row.ended = token == self.tokenizer.end_of_text_id
            # As in lm-eval, a continuation is a text of its own, without the space that some tokenizers put before one.
            spelled = b"" if row.ended else self.tokenizer.token_bytes(token, begins=row.drawn == 1)
            yield number, stream.push(spelled, last=row.ended or row.drawn == row.sampling.max_new_tokens)
            row.ended = row.ended or stream.stopped

    def _hidden(self, batch: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """The hidden states [T, D] of each sequence."""
        device = next(self.model.parameters()).device
        longest = max(map(len, batch))
        filled = [[*ids, *[self.tokenizer.end_of_text_id] * (longest - len(ids))] for ids in batch]
        ids_BT = torch.tensor(filled, device=device)
        with torch.no_grad(), threads_for(ids_BT.numel()):
            hidden_BTD = self.model(ids_BT).hidden_BTD
        return [hidden_TD[: len(ids)] for ids, hidden_TD in zip(batch, hidden_BTD, strict=True)]

    def _likelihoods_after(self, hidden_TD: Tensor, continuations: Sequence[list[int]]) -> list[Likelihood]:
        """The likelihoods of continuations whose last ids are those after the last hidden state."""
        longest = max(map(len, continuations))
        filled = [[*[0] * (longest - len(ids)), *ids] for ids in continuations]
        targets_NK = torch.tensor(filled, device=hidden_TD.device).T
        nats, greedy = [], []
        with torch.no_grad(), threads_for(longest):
            for hidden, targets in zip(
                hidden_TD[-longest:].split(LOGIT_TOKENS), targets_NK.split(LOGIT_TOKENS), strict=True
            ):
                logits = self.model.logits(hidden)
                check_finite(logits)
                log_probabilities = logits.float().log_softmax(-1)
                nats.append(log_probabilities.gather(1, targets).double())
                greedy.append(log_probabilities.argmax(-1, keepdim=True) == targets)
        nats_KN, greedy_KN = torch.cat(nats).T.cpu(), torch.cat(greedy).T.cpu()
        return [
            Likelihood(nats_N[-len(ids) :].sum().item(), bool(greedy_N[-len(ids) :].all()))
            for ids, nats_N, greedy_N in zip(continuations, nats_KN, greedy_KN, strict=True)
        ]

    def _batches(self, items: Sequence[Item], name: str) -> Iterator[Sequence[Item]]:
        """The items in batches; tells how many are done."""
        batches = (items[first : first + self.batch_size] for first in range(0, len(items), self.batch_size))
        return counted(batches, len(items), name, self._say, len)
