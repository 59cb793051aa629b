"""What an export says to other packages: its card on the Hub, its tokenizer, its chat template, ids without a token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import VocabularyError
from cdrmix.hf.card import adapter_card, foreign_card, model_card
from cdrmix.hf.export import export_model
from cdrmix.inference.load import backbone_weights, load_exported, read_sums, tokenizer_file

Exported = Callable[[str], Path]
LORA = Path(__file__).parents[2] / "configs" / "cpt-nemotron-h-8b-lora-24gb.yaml"
TINY = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"


def test_the_hub_reads_the_card() -> None:
    """Also of a run whose name has characters of YAML."""
    config = Config.from_yaml(
        TINY, ["run.name='a: \"b\" [c]'", "export.license=apache-2.0", "export.base_model=someone/base-1b"]
    )
    figures = {"tokens": 10, "text_bytes": 30, "bits_per_byte": 1.5, "perplexity": 9.0}
    figures |= {"unigram_bits_per_byte": 3.0, "gzip9_bits_per_byte": 2.5, "zstd19_bits_per_byte": 2.25}
    data = ModelCard(model_card(config, 20, 1000, {"held_out": figures, "held_out_step": 20})).data
    assert (data.library_name, data.license, data.base_model) == ("transformers", "apache-2.0", "someone/base-1b")
    assert data.pipeline_tag == "text-generation"
    assert data.model_name == 'a: "b" [c]'
    assert {(each.metric_type, each.metric_value) for each in data.eval_results} == {
        ("bits_per_byte", 1.5),
        ("perplexity", 9.0),
    }
    plain = ModelCard(model_card(Config.from_yaml(TINY), 20, 1000, {})).data
    assert (plain.license, plain.base_model, plain.eval_results) == ("unknown", None, None)


def cards_of_transformers(*overrides: str) -> list[ModelCard]:
    """The card of a whole model and that of its adapters, of a run that continued the model `models/a: b`."""
    config = Config.from_yaml(LORA, ["run.name=continued", "model.path='models/a: b'", *overrides])
    score = {"tokens": 10, "text_bytes": 30, "bits_per_byte": 1.5, "perplexity": 9.0}
    figures = score | {"unigram_bits_per_byte": 3.0, "gzip9_bits_per_byte": 2.5, "zstd19_bits_per_byte": 2.25}
    summary = {
        "held_out": {**figures, "domains": {"code": score}},
        "held_out_before": {**score, "bits_per_byte": 2.0},
        "held_out_step": 20,
    }
    cards = (
        foreign_card(config, "llama", 20, 1000, summary),
        adapter_card(config, "llama", 20, 100, ["lm_head"], summary),
    )
    return [ModelCard(card) for card in cards]


def test_the_cards_of_models_of_transformers_have_the_same_lines() -> None:
    """The license, the base and the results, also by domain and before the training."""
    for card in cards_of_transformers():
        assert (card.data.license, card.data.base_model, card.data.model_name) == ("unknown", "a: b", "continued")
        assert "| code | 30 | - | 1.5000 | - |" in card.text
        assert "| all text | 30 | 2.0000 | 1.5000 | -0.5000 |" in card.text
    for card in cards_of_transformers("export.license=apache-2.0", "export.base_model=someone/base-1b"):
        assert (card.data.license, card.data.base_model) == ("apache-2.0", "someone/base-1b")


def test_the_card_of_adapters_of_a_quantized_base_has_the_quantization_before_its_use() -> None:
    _, card = cards_of_transformers("model.lora.quantize=nf4")
    assert 0 < card.text.index("settings = BitsAndBytesConfig(") < card.text.index("quantization_config=settings)")
    assert "BitsAndBytes" not in cards_of_transformers("model.lora.quantize=null")[1].text


def test_the_tokenizer_of_an_export_keeps_its_fingerprint(exported: Exported, tmp_path: Path) -> None:
    """tokenizer.json has a template, so cdrmix reads the other file; exports from before have tokenizer.json alone."""
    folder = exported("hybrid")
    loaded = load_exported(folder)
    wanted = json.loads((folder / "config.json").read_text())["tokenizer_fingerprint"]
    assert loaded.tokenizer.fingerprint == wanted
    assert tokenizer_file(folder) == folder / "tokenizer_cdrmix.json"
    assert TextTokenizer.load(folder / "tokenizer.json").fingerprint != wanted
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    sums = read_sums(old)
    (old / "tokenizer.json").unlink()
    (old / "tokenizer_cdrmix.json").rename(old / "tokenizer.json")
    sums["tokenizer.json"] = sums.pop("tokenizer_cdrmix.json")
    (old / "SHA256SUMS").chmod(0o644)
    (old / "SHA256SUMS").write_text("".join(f"{value}  {name}\n" for name, value in sums.items()))
    (old / "tokenizer_cdrmix.json").write_text("not in SHA256SUMS, so it is not read")
    assert load_exported(old).tokenizer.fingerprint == wanted
    assert tokenizer_file(old) == old / "tokenizer.json"


def test_the_message_about_another_tokenizer_names_the_file_to_use(exported: Exported) -> None:
    folder = exported("hybrid")
    with pytest.raises(VocabularyError, match=r"set data\.tokenizer\.path to .*export/tokenizer_cdrmix\.json"):
        backbone_weights(folder, load_exported(folder).config, folder / "tokenizer.json")
    assert backbone_weights(folder, load_exported(folder).config, folder / "tokenizer_cdrmix.json")


def test_ids_without_a_token_are_suppressed_in_generation(exported: Exported) -> None:
    generation = json.loads((exported("hybrid") / "generation_config.json").read_text())
    loaded = load_exported(exported("hybrid"))
    assert generation["suppress_tokens"] == list(range(loaded.tokenizer.vocab_size, 300)) != []


def test_a_text_begins_with_the_token_of_the_training(exported: Exported, tmp_path: Path) -> None:
    """Which is not end-of-text for a tokenizer with a token for the beginning of a document."""
    loaded = load_exported(exported("hybrid"))
    trained = TextTokenizer.train(["a b"], vocab_size=280, end_of_text="</s>", special_tokens=["<s>"])
    tokenizer = TextTokenizer(trained.json_bytes, "</s>", begin_of_text="<s>")
    target = export_model(loaded._replace(tokenizer=tokenizer), tmp_path / "export")
    again, theirs = load_exported(target).tokenizer, AutoTokenizer.from_pretrained(target)
    assert (again.begin_of_text, again.fingerprint) == ("<s>", tokenizer.fingerprint)
    assert theirs("a b").input_ids == [tokenizer.first_id, *tokenizer.encode("a b")]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.first_id, tokenizer.end_of_text_id)
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation["bos_token_id"] == tokenizer.first_id != tokenizer.end_of_text_id


def test_a_chat_template_is_exported_and_its_marks_are_tokens(exported: Exported, tmp_path: Path) -> None:
    """From one export to the next; without a template, special tokens in a text stay text."""
    loaded = load_exported(exported("hybrid"))
    assert loaded.chat_template is None
    target = export_model(loaded._replace(chat_template=TEMPLATE), tmp_path / "export")
    again = load_exported(target)
    assert again.chat_template == TEMPLATE
    assert "chat_template.jinja" in read_sums(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    conversation = [{"role": "user", "content": "x"}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert text == "<|endoftext|><|user|>x\n"
    assert tokenizer(text, add_special_tokens=False).input_ids == [0, *again.tokenizer.encode("<|user|>x\n")]
    assert AutoTokenizer.from_pretrained(exported("hybrid")).chat_template is None
