"""Shards made with tokenizers of other models, the evaluation on them, and tokenizers that cannot be used."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.cleaning.normalize import normalize
from cdrmix.data.loader import EvalLoader
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet, Split
from cdrmix.errors import ConfigError, ShardError, VocabularyError
from cdrmix.eval.perplexity import evaluate

TEXTS = (
    "Anna reads letters\n    return self.café\n",
    "  two  spaces \n\n\tand a tab  ",
    "e\u0301 is not \u00e9 to bytes; \u212b is no \u00c5",
    "never seen: ½ 🙂 ﬁ \u2581 x 東京",
    "<s>text</s> with <|end_of_text|><|im_end|> names </s></s> [SEP] <unk>",
    "a wörld of naïve people",
)


class Bigram(nn.Module):
    """A model whose next token depends on the last one alone, so that its nats do not depend on the rows."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        table = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.table = nn.Parameter(table.log_softmax(-1))


def nats(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Bigram)
    return -(model.table[batch.ids_BT, batch.targets_BT] * batch.weights_BT).sum()


# Some end with white space, which some tokenizers drop.
DOCUMENTS = [f"{number} {text} {number * 7919}{' ' * (number % 3)}" for number in range(6) for text in TEXTS]


def prepared(make_config: Any, tmp_path: Path, **tokenizer: Any) -> ShardSet:
    path = tmp_path / "corpus.jsonl"
    if not path.exists():  # a file that was written again is another corpus
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    source = {"kind": "jsonl", "paths": [str(path)]}
    config = make_config(source, vocab_size=600, tokenizer=tokenizer, dedup={"near_duplicates": False})
    return prepare(config, say=lambda line: None)


def texts_in(split: Split) -> list[str]:
    return [text.decode() for text in split.text()]


def bytes_in_row(shards: ShardSet, texts: list[str], row: int) -> int:
    """The bytes of the text in a held-out row, from the tokens of the whole documents."""
    total = 0
    for piece in shards.valid.pieces(row):
        text = texts[piece.document]
        ((ids, counts),) = shards.tokenizer.encode_with_bytes([text])
        sizes = [len(shards.tokenizer.token_bytes(token)) for token in ids.tolist()]
        sizes = sizes if shards.tokenizer.lossless else counts.tolist()
        sizes.append(len(text.encode()) - sum(sizes))  # what no token stands for is counted at the end of the document
        total += sum(sizes[piece.offset : piece.offset + piece.tokens])
    return total


def test_prepared_from_a_folder_and_evaluated(
    make_config: Any, tmp_path: Path, foreign: dict[str, Any], kind: str
) -> None:
    """Shards hold the ids of transformers; bits per byte are those of transformers' own tokenizer on the text."""
    _, end, begin = foreign[kind]
    shards = prepared(make_config, tmp_path, path=str(foreign[kind].folder), lossless=kind == "llama3")
    assert (shards.tokenizer.end_of_text, shards.tokenizer.begin_of_text) == (end, begin)
    assert shards.tokenizer.lossless == (kind == "llama3")
    reference = foreign[kind].reference()
    last = reference.convert_tokens_to_ids(end)
    first = last if begin is None else reference.convert_tokens_to_ids(begin)
    texts = texts_in(shards.valid)
    assert shards.valid.text_bytes == sum(len(text.encode()) for text in texts)

    def document(text: str) -> list[int]:
        # what transformers makes of the name of a special token that is a piece of Unigram is not text
        ids = shards.tokenizer.encode(text) if kind == "unigram" else foreign[kind].ids(text)
        return [first, *ids, last]

    model = Bigram(600)
    expected = sum(
        -model.table[before, after].item() for ids in map(document, texts) for before, after in pairwise(ids)
    )
    loader = EvalLoader(shards.valid, 16, 3)
    score = evaluate(model, loader, loader.text_bytes, nats=nats, together=False)
    assert score.tokens == sum(len(document(text)) - 1 for text in texts)
    held_out_bytes = sum(len(text.encode()) for text in texts)
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / held_out_bytes, rel=1e-12)
    # every row by itself
    rows = [loader.split.text_bytes_of(*loader.split.segments_of(np.array([row]))[:2]) for row in loader.rows]
    assert rows == [bytes_in_row(shards, texts, row) for row in loader.rows.tolist()]
    assert sum(rows) == held_out_bytes
    parts = [b"".join(text for _, text in loader.split.trained_text(np.array([row]))) for row in loader.rows]
    assert [len(part) for part in parts] == rows
    every = [text for _, text in loader.split.trained_text(loader.rows[::-1])]  # in the order of the text
    assert b"".join(every).decode() == "".join(texts)
    assert 0 < EvalLoader(shards.valid, 16, 3, max_rows=2).text_bytes < held_out_bytes
    # the training text too
    decoded = texts_in(shards.train)
    assert len(decoded) + len(texts) == len(DOCUMENTS)
    if kind in ("llama3", "qwen"):
        assert sorted([*decoded, *texts]) == sorted(map(normalize, DOCUMENTS))
    else:
        with pytest.raises(ShardError, match="only the held-out text has its bytes stored"):
            EvalLoader(shards.train, 16, 3).text_bytes  # noqa: B018


def test_each_document_begins_with_its_token(make_config: Any, tmp_path: Path, foreign: dict[str, Any]) -> None:
    with_begin = prepared(make_config, tmp_path, path=str(foreign["llama3"].folder))
    without = prepared(make_config, tmp_path, path=str(foreign["llama3"].folder), begin_of_text=None)
    assert with_begin.key != without.key
    for shards, first in ((with_begin, "<|begin_of_text|>"), (without, "<|end_of_text|>")):
        tokenizer = shards.tokenizer
        assert tokenizer.first_id == tokenizer._tokenizer.token_to_id(first)
        for split in (shards.train, shards.valid):
            begins = set()
            targets = 0
            for row in range(split.rows):
                starts, lengths = split.segments(row)
                for piece, start, length in zip(split.pieces(row), starts.tolist(), lengths.tolist(), strict=True):
                    tokens = split.read(start, start + length + 1).tolist()
                    targets += length
                    if piece.offset == 0:
                        begins.add(tokens[0])
                    if piece.offset + piece.tokens == piece.document_tokens:
                        assert tokens[-1] == tokenizer.end_of_text_id
                    assert tokenizer.end_of_text_id not in tokens[1:-1]
            assert begins == {tokenizer.first_id}
            assert split.token_counts().sum() == targets == sum(stratum.tokens for stratum in split.strata)
    assert texts_in(with_begin.valid) == texts_in(without.valid)
    assert with_begin.report["padding_share"] == without.report["padding_share"]


def test_the_same_shards_by_folder_file_and_explicit_names(
    make_config: Any, tmp_path: Path, foreign: dict[str, Any]
) -> None:
    folder = foreign["llama2"].folder
    by_folder = prepared(make_config, tmp_path, path=str(folder), lossless=False)
    names = {"end_of_text": "</s>", "begin_of_text": "<s>"}
    by_file = prepared(make_config, tmp_path, path=str(folder / "tokenizer.json"), lossless=False, **names)
    assert by_folder.path != by_file.path
    for name in ("train.tokens-00000.bin", "valid.token-bytes.bin", "valid.text.bin", "tokenizer_settings.json"):
        assert (by_folder.path / name).read_bytes() == (by_file.path / name).read_bytes()
    again = prepared(make_config, tmp_path, path=str(folder), lossless=False, begin_of_text="<s>")
    assert again.path == by_folder.path


Change = Callable[[dict[str, Any]], Any]


def broken(kind: str, change: Change = lambda content: None, **settings: Any) -> Callable[[Path, Any], None]:
    """Makes the folder of a kind with a change of tokenizer.json and with these keys in tokenizer_config.json."""

    def make(folder: Path, foreign: dict[str, Any]) -> None:
        content = json.loads((foreign[kind].folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return make


def only_files(**files: str) -> Callable[[Path, Any], None]:
    def make(folder: Path, foreign: dict[str, Any]) -> None:
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    return make


def without_special_tokens(folder: Path, foreign: dict[str, Any]) -> None:
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))


def too_many_ids(folder: Path, foreign: dict[str, Any]) -> None:
    shutil.copytree(foreign["llama3"].folder, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"word{number}" for number in range(400)])
    tokenizer.save(str(folder / "tokenizer.json"))


END = "<|end_of_text|>"


@pytest.mark.parametrize(
    ("make", "message", "exit_code"),
    [
        (only_files(), r"has no tokenizer\.json; name a folder of a model", 2),
        (
            only_files(tokenizer__model="", tokenizer_config__json="{}"),
            r"has no tokenizer\.json, only tokenizer\.model.*save_pretrained.*pip install sentencepiece",
            2,
        ),
        (only_files(tokenizer__json="{", tokenizer_config__json="{}"), r"is not a tokenizer\.json", 7),
        (only_files(tokenizer__json="{}", tokenizer_config__json="{"), r"tokenizer_config\.json is not JSON", 7),
        (only_files(tokenizer__json="{}", tokenizer_config__json="[]"), "must be a JSON object; found list", 7),
        (without_special_tokens, "has no special token, so no token can end a document; add one", 7),
        (broken("llama3"), r"2 special tokens; set data\.tokenizer\.end_of_text to one of them: '<\|begin_of", 7),
        (too_many_ids, r"7\d\d ids, more than model\.vocab_size=600; set model\.vocab_size=7\d\d or higher", 7),
        (
            broken("llama3", eos_token="</s>"),
            r"has no token '</s>'; set data\.tokenizer\.end_of_text to one of its special tokens: '<\|begin",
            7,
        ),
        (
            broken("llama3", eos_token=END, bos_token="<s>", add_bos_token=True),
            r"has no token '<s>' to begin a document; set data\.tokenizer\.begin_of_text to one of",
            7,
        ),
        (
            broken("qwen", lambda content: content["model"].update(dropout=0.1), eos_token="<|im_end|>"),
            r"has model\.dropout=0\.1, so it encodes a text differently each time; set it to null",
            7,
        ),
        (broken("unigram", eos_token="<unk>"), "encodes unknown characters to its end-of-text token '<unk>'", 7),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_remedy(
    make_config: Any, tmp_path: Path, foreign: Any, make: Callable[[Path, Any], None], message: str, exit_code: int
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder, foreign)
    with pytest.raises((ConfigError, VocabularyError), match=message) as caught:
        prepared(make_config, tmp_path, path=str(folder), lossless=False)
    assert caught.value.exit_code == exit_code
    assert str(folder) in str(caught.value)


def of_model(make_config: Any, tmp_path: Path, model: dict[str, Any], **tokenizer: Any) -> Config:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    config = make_config({"kind": "jsonl", "paths": [str(path)]}, tokenizer={"path": "model", **tokenizer})
    return Config.model_validate({**config.model_dump(), "model": {"kind": "huggingface", **model}})


def test_the_tokenizer_of_the_model(make_config: Any, tmp_path: Path, foreign: Any) -> None:
    """`path: model` is the folder of the model. Tokens that the model gets have ids of their own."""
    folder = tmp_path / "model"
    shutil.copytree(foreign["llama2"].folder, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 600}))
    model = {"path": str(folder)}
    shards = prepare(of_model(make_config, tmp_path, model, lossless=False), say=lambda line: None)
    assert (shards.tokenizer.end_of_text, shards.tokenizer.begin_of_text) == ("</s>", "<s>")
    assert shards.vocab_size == 600
    more = of_model(make_config, tmp_path, {**model, "vocab": {"add_tokens": ["<|tool|>"]}}, lossless=False)
    again = prepare(more, say=lambda line: None)
    assert again.tokenizer.special_id("<|tool|>") == shards.tokenizer.vocab_size
    assert again.vocab_size == 601
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 30}))
    small = tmp_path / "small"
    shutil.move(folder, small)
    with pytest.raises(VocabularyError, match="ids, more than the 30 of the model; use the tokenizer that belongs to"):
        prepare(of_model(make_config, tmp_path, {"path": str(small)}, lossless=False), say=lambda line: None)
    with pytest.raises(ConfigError, match=r"no folder some/model; `cdrmix train` downloads some/model from"):
        prepare(of_model(make_config, tmp_path, {"path": "some/model", "online": True}), say=lambda line: None)


def test_the_tokenizer_of_a_model_without_folder(make_config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model means the tokenizer in the folder model\.path, which this"):
        prepared(make_config, tmp_path, path="model")
