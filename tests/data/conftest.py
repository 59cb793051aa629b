"""Small corpora and the configurations that name them, and tokenizers like those of other models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm import tqdm

from cdrmix.config.schema import Config

tqdm.monitor_interval = 0  # the progress bars of datasets would start a thread that watches them for ever

MODEL = {
    "d_model": 32,
    "layers": 1,
    "attention": {"heads": 1, "kv_heads": 1},
    "rwkv": {"head_size": 32, "decay_rank": 4, "iclr_rank": 4, "value_rank": 4, "gate_rank": 4},
    "feed_forward": {"hidden": 32},
}
TRAIN = {"steps": 1, "batch_rows": 1, "micro_batch_rows": 1, "learning_rate": 1e-3}

MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A function: `data.source` and other keys of `data` to a configuration whose cache is in tmp_path."""

    def make(source: dict[str, Any] | None, *, vocab_size: int = 320, **data: Any) -> Config:
        defaults = {"cache": str(tmp_path / "cache"), "row_length": 16, "valid_fraction": 0.25}
        return Config.model_validate(
            {
                "model": {**MODEL, "vocab_size": vocab_size},
                "data": {**defaults, **data, "source": source},
                "train": TRAIN,
            }
        )

    return make


@pytest.fixture
def texts() -> list[str]:
    """Sixty documents of 1 to 400 characters, all different, some not ASCII, one spelling the end-of-text token."""
    lines = [f"def function_{number}(x):\n    return x + {number}\n" * (number % 9) for number in range(57)]
    return [f"{number}{line}" for number, line in enumerate(lines)] + [
        "naïve Ærøskøbing 東京 🙂",
        "a<|endoftext|>b",
        "\0\r\n",
    ]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> dict[str, Any]:
    """A `data.source` section for a JSON-lines file of `texts`."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"kind": "jsonl", "paths": [str(path)]}


FOREIGN_TRAINING = [
    f"{name} reads {count} letters\n    return self.{name}[{count}]\n"
    for count, name in enumerate(("Anna", "the café", "a wörld", "naïve people", "東京 text", "some </s> words"))
] * 2


def begin_by_template(tokenizer: Tokenizer, token: str) -> None:
    special = [(token, tokenizer.token_to_id(token))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=special)


def byte_level(model: models.BPE, normalizer: normalizers.Normalizer | None, *special: str) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(FOREIGN_TRAINING, trainer)
    tokenizer.add_special_tokens([*special])
    return tokenizer


def llama3() -> Tokenizer:
    """Byte-level BPE with whole words as tokens (ignore_merges) and a token before a text."""
    tokenizer = byte_level(models.BPE(ignore_merges=True), None, "<|begin_of_text|>", "<|end_of_text|>")
    begin_by_template(tokenizer, "<|begin_of_text|>")
    return tokenizer


def qwen() -> Tokenizer:
    """Byte-level BPE of text in NFC."""
    return byte_level(models.BPE(), normalizers.NFC(), "<|endoftext|>", "<|im_end|>")


def llama2(prefix: bool = True) -> Tokenizer:
    """BPE of characters, spaces as ▁, byte fallback, a space before a text (Gemma: none)."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*names, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator([text.replace("é", "") for text in FOREIGN_TRAINING], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(names)]  # the bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(content))
    begin_by_template(tokenizer, "<s>")
    return tokenizer


def gemma() -> Tokenizer:
    return llama2(prefix=False)


def unigram() -> Tokenizer:
    """Unigram with a space before a text. Its special tokens are pieces too, so it encodes their names to them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(FOREIGN_TRAINING, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """WordPiece: lower case, no white space, an unknown token, tokens around a text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(FOREIGN_TRAINING, trainer)
    special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.BertProcessing(special[1], special[0])
    return tokenizer


FOREIGN = {
    "llama3": (llama3, "<|end_of_text|>", "<|begin_of_text|>"),
    "qwen": (qwen, "<|endoftext|>", None),
    "llama2": (llama2, "</s>", "<s>"),
    "gemma": (gemma, "</s>", "<s>"),
    "unigram": (unigram, "</s>", None),
    "wordpiece": (wordpiece, "[SEP]", "[CLS]"),
}


class Foreign(NamedTuple):
    """A tokenizer like that of another model: its folder, and the tokens that end and begin a document."""

    folder: Path
    end: str
    begin: str | None

    def reference(self) -> Any:
        """The tokenizer of transformers, which does not read special tokens in text."""
        transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")
        path = str(self.folder / "tokenizer.json")
        return transformers.PreTrainedTokenizerFast(tokenizer_file=path, split_special_tokens=True)

    def ids(self, text: str) -> list[int]:
        """Its ids of a text."""
        ids: list[int] = self.reference()(text, add_special_tokens=False)["input_ids"]
        return ids


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Foreign]:
    """A folder of each kind, with tokenizer.json and tokenizer_config.json."""
    made = {}
    for kind, (make, end, begin) in FOREIGN.items():
        folder = tmp_path_factory.mktemp(kind)
        make().save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        if begin is not None:
            settings["bos_token"] = {"content": begin}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        made[kind] = Foreign(folder, end, begin)
    return made


@pytest.fixture(params=FOREIGN)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of `foreign`."""
    name: str = request.param
    return name
