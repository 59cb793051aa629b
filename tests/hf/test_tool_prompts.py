"""Prompts with tools: the special tokens of a template, the end of a turn, and models without a format for tools."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from in_process import main
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cdrmix.data.chat.template import CHATML
from cdrmix.errors import ConfigError
from cdrmix.eval.suites import ToolQuestion
from cdrmix.eval.tools import SETS
from cdrmix.hf.load import load_alone
from cdrmix.hf.tool_prompts import ToolFormat, encode_with_special

pytestmark = pytest.mark.usefixtures("own_settings")

WITH_TOOLS = (
    """{%- if tools %}{{ '<|im_start|>system\\n' }}{%- for tool in tools %}{{ tool | tojson }}{% endfor %}"""
    """{{ '<|im_end|>\\n' }}{%- endif %}""" + CHATML
)
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
QUESTION = ToolQuestion([{"role": "user", "content": "1 + 2?"}], [{"type": "function", "function": FUNCTION}])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers with random weights and a chat template that writes tools."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a question about functions and tools"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": WITH_TOOLS}))
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size(), eos_token_id=0, bos_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def with_template(llama: Path, folder: Path, template: str | None) -> Path:
    """The same model with another template; None: without one."""
    folder.mkdir()
    for path in llama.iterdir():
        if path.name != "chat_template.jinja":
            (folder / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_prompts_are_those_of_transformers(llama: Path) -> None:
    loaded = load_alone(llama, "cpu")
    theirs = AutoTokenizer.from_pretrained(llama)
    text = ToolFormat(loaded, llama).prompt(QUESTION)
    options = {"tools": list(QUESTION.tools), "add_generation_prompt": True}
    assert text == theirs.apply_chat_template(list(QUESTION.messages), tokenize=False, **options)
    expected = theirs(text)["input_ids"]
    assert encode_with_special(loaded.tokenizer, text) == [loaded.tokenizer.first_id, *expected]
    assert expected.count(theirs.convert_tokens_to_ids("<|im_start|>")) == 3


def test_answers_end_with_the_turn(llama: Path) -> None:
    """The answer is the greedy one of the logits up to the end of the turn, which is a token of the template."""
    loaded = load_alone(llama, "cpu")
    tools = ToolFormat(loaded, llama)
    ids = encode_with_special(loaded.tokenizer, tools.prompt(QUESTION))
    written: list[int] = []
    with torch.no_grad():
        for _ in range(6):
            hidden = loaded.model(torch.tensor([ids + written])).hidden_BTD
            written.append(int(loaded.model.logits(hidden)[0, -1, : loaded.tokenizer.vocab_size].argmax()))
        (answer,) = tools([QUESTION], 6)
        assert answer == loaded.tokenizer.decode(written)
        # The head row of the end of the turn becomes twice that of the first token, which has a positive logit.
        head = loaded.model.transformers_model.lm_head.weight  # type: ignore[union-attr]
        head[loaded.tokenizer.special_id("<|im_end|>")] = 2 * head[written[0]]
    assert tools([QUESTION], 6) == [""]


@pytest.mark.parametrize(("template", "message"), [(CHATML, "does not write tools"), (None, "has no chat template")])
def test_models_without_a_format(llama: Path, tmp_path: Path, template: str | None, message: str) -> None:
    folder = with_template(llama, tmp_path / "plain", template)
    with pytest.raises(ConfigError, match=message):
        ToolFormat(load_alone(folder, "cpu"), folder)


def test_suite_tools(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "bfcl_eval-2026.3.23-py3-none-any.whl", "w") as archive:
        row = {"id": "a", "question": [[dict(QUESTION.messages[0])]], "function": [FUNCTION]}
        for questions, answers in SETS.values():
            archive.writestr(questions.file, json.dumps(row))
            if answers is not None:
                archive.writestr(answers.file, json.dumps({"id": "a", "ground_truth": [{"add": {}}]}))
    command = ["eval", "--suite", "tools", "--sets", str(tmp_path), "--max-new-tokens", "4", "--json", "--model"]
    assert main([*command, str(llama)]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    values = {measure["name"]: measure["value"] for measure in result["measures"]}
    assert values == {"simple accuracy": 0.0, "multiple accuracy": 0.0, "irrelevance accuracy": 1.0}
    plain = with_template(llama, tmp_path / "plain", None)
    assert main([*command, str(plain)]) == 2
    assert "--suite tools: nothing can be measured; the model has no chat template" in capsys.readouterr().err
