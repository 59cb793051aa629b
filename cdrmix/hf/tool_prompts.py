"""Questions with tools, by the chat template of a model: prompts with its special tokens, and greedy answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cdrmix.data.chat.rendering import end_of_turn, special_names
from cdrmix.data.chat.template import load_template, render
from cdrmix.data.sources.base import BadRecord
from cdrmix.data.sources.conversations import Conversation
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.eval.suites import ToolQuestion
from cdrmix.inference.generate import Row, decode
from cdrmix.inference.load import Trained
from cdrmix.inference.sampling import Sampling

DATE = "2024-07-26"  # for templates that write one; fixed, so that a prompt is always the same
PROBE = "cdrmix_probe_function"


class ToolFormat:
    """The format of a model for tools. Raises ConfigError if it has no chat template, or one that does not write tools.

    folder: has chat_template.jinja, or tokenizer_config.json with a template.
    """

    def __init__(self, loaded: Trained, folder: Path) -> None:
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._source, self._variables = load_template(None, folder)
        function = {"name": PROBE, "description": "A test.", "parameters": {"type": "object", "properties": {}}}
        probe = ToolQuestion([{"role": "user", "content": "Hello"}], [{"type": "function", "function": function}])
        if PROBE not in self.prompt(probe):
            raise ConfigError(f"the chat template in {folder} does not write tools")

    def prompt(self, question: ToolQuestion) -> str:
        """The text up to the assistant's answer. Raises ConfigError if the template refuses it."""
        conversation = Conversation(list(question.messages), list(question.tools))
        try:
            return render(self._source, conversation, self._variables, DATE, prompt=True)
        except BadRecord as error:
            raise ConfigError(str(error)) from error

    def __call__(self, questions: Sequence[ToolQuestion], max_new_tokens: int) -> list[str]:
        """The greedy answer to each question, up to the end of the turn, without special tokens."""
        sampling = Sampling(temperature=0.0, max_new_tokens=max_new_tokens)
        rows = [Row(encode_with_special(self._tokenizer, self.prompt(question)), sampling) for question in questions]
        ends = {self._tokenizer.end_of_text_id, end_of_turn(self._source, self._tokenizer)}
        answers: list[list[int]] = [[] for _ in rows]
        for number, token in decode(self._model, rows, self._tokenizer.vocab_size):
            rows[number].ended = token in ends
            if not rows[number].ended:
                answers[number].append(token)
        return [self._tokenizer.decode(ids) for ids in answers]


def encode_with_special(tokenizer: TextTokenizer, text: str) -> list[int]:
    """The ids of a text in which the names of special tokens are these tokens. It begins as a document begins."""
    names = sorted(special_names(tokenizer.json_bytes), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        if number % 2:
            ids.append(tokenizer.special_id(piece))
        elif piece:
            ids += tokenizer.encode_batch([piece], [number > 0])[0].tolist()
    return ids if ids[:1] == [tokenizer.first_id] else [tokenizer.first_id, *ids]
