"""Tokenizers of other models: their ids, their decoding, the bytes of the text, and what begins a document."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cdrmix.config.schema_objectives import Objectives, Span
from cdrmix.data import tokenizer as tokenizer_module
from cdrmix.data.objectives import encode_documents
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import VocabularyError

TEXTS = [
    "Anna reads 12 letters\n    return self.café[12]\n",
    "a wörld of naïve people, 東京 text, some </s> words",
    "  two  spaces \n\n\tand a tab  ",
    "e\u0301 is not \u00e9 to bytes; \u212b is no \u00c5",
    "never seen: ½ 🙂 ﬁ \u2581 \0 x",
    "<s>text</s> with <|end_of_text|><|im_end|> names </s></s> [SEP] <unk>",
    "",
    " ",
    "x",
]


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a folder's tokenizer.json with a change."""
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    to.write_text(json.dumps(content))
    return to


def test_ids_are_those_of_transformers(foreign: dict[str, Any], kind: str) -> None:
    ours = TextTokenizer.load(foreign[kind].folder, lossless=False)
    texts = [text for text in TEXTS if "</s>" not in text] if kind == "unigram" else TEXTS
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == [foreign[kind].ids(text) for text in texts]


def test_what_begins_and_ends_a_document_is_found(foreign: dict[str, Any], kind: str) -> None:
    _, end, begin = foreign[kind]
    tokenizer = TextTokenizer.load(foreign[kind].folder, lossless=False)
    assert (tokenizer.end_of_text, tokenizer.begin_of_text) == (end, begin)
    assert tokenizer.first_id == tokenizer._tokenizer.token_to_id(begin or end)
    # as transformers begins a text
    with_special = foreign[kind].reference()("x")["input_ids"]
    assert (with_special[0] == tokenizer.first_id) == (begin is not None)
    assert (
        TextTokenizer.load(foreign[kind].folder, begin_of_text=None, lossless=False).first_id
        == tokenizer.end_of_text_id
    )


@pytest.mark.parametrize(
    ("settings", "begin"),
    [
        ({"add_bos_token": True}, "<s>"),
        ({"add_bos_token": False}, None),
        ({"add_bos_token": True, "bos_token": "</s>"}, None),  # the token that ends a document begins the next one
        ({}, None),
    ],
)
def test_tokenizer_config_decides_where_it_says_so(
    foreign: dict[str, Any], tmp_path: Path, settings: dict[str, Any], begin: str | None
) -> None:
    changed(foreign["llama2"].folder, tmp_path / "tokenizer.json", lambda content: content.update(post_processor=None))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>", **settings}))
    assert TextTokenizer.load(tmp_path, lossless=False).begin_of_text == begin
    changed(foreign["llama2"].folder, tmp_path / "tokenizer.json", lambda content: None)
    expected = begin if "add_bos_token" in settings else "<s>"
    assert TextTokenizer.load(tmp_path, lossless=False).begin_of_text == expected


def test_a_tokenizer_that_changes_text_is_refused_unless_asked_for(foreign: dict[str, Any], kind: str) -> None:
    if kind == "llama3":
        assert TextTokenizer.load(foreign[kind].folder).lossless
        assert TextTokenizer.load(foreign[kind].folder, lossless=False).lossless
        return
    with pytest.raises(VocabularyError, match=r"data\.tokenizer\.lossless: false"):
        TextTokenizer.load(foreign[kind].folder)
    assert not TextTokenizer.load(foreign[kind].folder, lossless=False).lossless


def test_names_of_special_tokens_in_text_stay_text(foreign: dict[str, Any], kind: str) -> None:
    tokenizer = TextTokenizer.load(foreign[kind].folder, lossless=False)
    added = tokenizer._tokenizer.get_added_tokens_decoder()
    ids = {number: token.content for number, token in added.items() if token.content not in ("<unk>", "[UNK]")}
    assert len(ids) >= 1
    for name in ids.values():
        for text in (name, f"a {name}", f"{name}{name} n"):
            assert not ids.keys() & set(tokenizer.encode(text))
            (with_bytes, counts) = tokenizer.encode_with_bytes([text])[0]
            assert with_bytes.tolist() == tokenizer.encode(text)
            assert counts.sum() == len(text)
            if kind != "wordpiece":
                assert tokenizer.decode(tokenizer.encode(text)) == text


def kept(kind: str, text: str) -> str:
    """What a tokenizer keeps of a text."""
    return unicodedata.normalize("NFC", text) if kind == "qwen" else text


def test_text_comes_back_and_streams(foreign: dict[str, Any], kind: str) -> None:
    tokenizer = TextTokenizer.load(foreign[kind].folder, lossless=False)
    reference = foreign[kind].reference()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        if kind in ("llama3", "qwen"):
            assert whole == kept(kind, text)
        elif kind in ("llama2", "gemma"):
            assert whole == text.replace("▁", " ")
        assert whole == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        begun, stream = False, b""  # as generate does for an empty prompt
        for token in ids:
            stream += tokenizer.token_bytes(token, begins=not begun)
            begun = begun or tokenizer.token_bytes(token) != b""
        assert stream.decode() == whole
        # What follows a prompt is what its text lacks: the space before it is not removed.
        for cut in range(1, len(ids)):
            rest = b"".join(map(tokenizer.token_bytes, ids[cut:]))
            assert stream.endswith(rest) or not any(map(tokenizer.token_bytes, ids[:cut]))


def test_bytes_of_tokens_are_held_against_the_text(foreign: dict[str, Any], kind: str) -> None:
    tokenizer = TextTokenizer.load(foreign[kind].folder, lossless=False)
    for text, (ids, counts) in zip(TEXTS, tokenizer.encode_with_bytes(TEXTS), strict=True):
        assert ids.tolist() == tokenizer.encode(text)
        assert len(counts) == len(ids)
        stripped = text.rstrip() if kind in ("unigram", "wordpiece") else text
        assert len(stripped.encode()) <= counts.sum() <= len(text.encode())
        position = 0
        for token, count in zip(ids.tolist(), counts.tolist(), strict=True):
            piece = text.encode()[position : position + count]
            position += count
            piece.decode()  # whole characters
            if kind == "gemma" and piece and piece.isascii():
                assert piece.replace("▁".encode(), b" ") == tokenizer.token_bytes(token)


def test_a_long_text_has_no_spaces_where_it_is_cut(
    foreign: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TextTokenizer.load(foreign[kind].folder, lossless=False)
    text = "".join(f"the café reads {number} letters\n    return self.Anna[{number}]\n" for number in (0, 1))
    whole = tokenizer.decode(tokenizer.encode(text))
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 30)
    monkeypatch.setattr(tokenizer_module, "GROUP_CHARACTERS", 50)
    ((ids, counts),) = tokenizer.encode_with_bytes([text])
    assert tokenizer.decode(tokenizer.encode(text)) == whole
    assert ids.tolist() == tokenizer.encode(text)
    assert counts.sum() == len((text.rstrip() if kind == "wordpiece" else text).encode())


def test_a_marked_span_adds_no_space(foreign: dict[str, Any]) -> None:
    tokenizer = TextTokenizer.load(foreign["llama2"].folder, lossless=False)
    objectives = Objectives(spans=[Span(begin="[", end="]", weight=0.5)])
    ((ids, weights, *_),) = encode_documents(["Anna[the]Anna"], [bytes(16)], ["text"], tokenizer, objectives)
    assert tokenizer.decode(ids.tolist()) == "Anna[the]Anna"
    assert weights is not None
    assert tokenizer.decode(ids[weights == 0.5].tolist()) == "[the]"


def test_the_end_of_text_of_a_folder_is_the_default(make_config: Any, foreign: dict[str, Any]) -> None:
    def end_of_text(**section: Any) -> str | None:
        return make_config(None, tokenizer=section).data.tokenizer.end_of_text

    assert end_of_text() == end_of_text(path="a/tokenizer.json") == "<|endoftext|>"
    assert end_of_text(path="a/folder") is end_of_text(path="model") is None
    assert end_of_text(path="a/folder", end_of_text="</s>") == "</s>"


def test_a_vocabulary_with_holes(foreign: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"

    def with_hole(kind: str, token: str, number: int) -> None:
        changed(foreign[kind].folder, path, lambda content: content["model"]["vocab"].update({token: number}))
        Tokenizer.from_file(str(path)).save(str(path))  # added tokens get other ids

    with_hole("llama3", "Ġhole", 450)
    tokenizer = TextTokenizer.load(path, "<|end_of_text|>")
    assert tokenizer.vocab_size == 451
    assert tokenizer.decode([449, 450]) == " hole"
    with_hole("llama2", "▁hole", 800)
    tokenizer = TextTokenizer.load(path, "</s>", lossless=False)
    assert tokenizer.vocab_size == 801
    assert (tokenizer.token_bytes(799), tokenizer.token_bytes(800), tokenizer.token_bytes(900)) == (b"", b" hole", b"")
    # a hole before an added token: the package gives the token another id
    changed(foreign["llama3"].folder, path, lambda content: content["added_tokens"][-1].update(id=700))
    with pytest.raises(VocabularyError, match=r"gives its token '<\|end_of_text\|>' the id 700, but the tokenizers"):
        TextTokenizer.load(path, "<|end_of_text|>")


def test_added_tokens(foreign: dict[str, Any]) -> None:
    """Special tokens that a model gets have the next ids; ordinary added tokens are read in text."""
    plain = TextTokenizer.load(foreign["qwen"].folder, lossless=False)
    tokenizer = TextTokenizer.load(foreign["qwen"].folder, lossless=False, added_tokens=["<|tool|>", "<|im_end|>"])
    assert tokenizer.vocab_size == plain.vocab_size + 1
    assert tokenizer.special_id("<|tool|>") == plain.vocab_size
    assert tokenizer.special_id("<|im_end|>") == plain.special_id("<|im_end|>")
    assert tokenizer.fingerprint != plain.fingerprint
    assert tokenizer.encode(TEXTS[0]) == plain.encode(TEXTS[0])
