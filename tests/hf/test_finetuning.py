"""Models of transformers trained on conversations and on preferences, with the chat template of their own folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from json_rows import read_metrics
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from cdrmix.config.schema import Config
from cdrmix.data.loader import make_batch
from cdrmix.data.pairs import make_pair_batch
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.hf.build import build_foreign
from cdrmix.hf.foreign import ForeignLossModel
from cdrmix.run_folder import RunFolder
from cdrmix.runtime import restored_settings
from cdrmix.training.distributed import join
from cdrmix.training.preferences import log_probs
from cdrmix.training.stage_a import train
from cdrmix.workflow import run_all

pytestmark = pytest.mark.usefixtures("own_settings")  # of `join` and `train`

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
TASKS = {"tasks": ["copying"], "documents": 120, "characters": 40}
Configure = Callable[..., Config]


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Configure:
    """A configuration of a small Llama: SFT on generated conversations from random weights, or what `model`, `data` and
    `train` say instead."""
    root = tmp_path_factory.mktemp("finetuning")

    def make(model: dict[str, Any], data: dict[str, Any], **train: Any) -> Config:
        content = {
            "run": {"name": "finetuning", "root": str(root / "runs"), "device": "cpu", "threads": 1},
            "model": {"kind": "huggingface", **model},
            "data": {
                "row_length": 256,
                "cache": str(root / "cache"),
                "dedup": {"near_duplicates": False},
                "valid_fraction": 0.1,
                **data,
            },
            "train": {
                "steps": 12,
                "batch_rows": 4,
                "micro_batch_rows": 2,
                "learning_rate": 1e-2,
                "warmup_steps": 1,
                "precision": "fp32",
                "evaluate_every": 12,
                "checkpoint_every": 12,
                **train,
            },
        }
        path = root / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        return Config.from_yaml(path)

    return make


def trained(config: Config, shards: ShardSet) -> RunFolder:
    run = RunFolder.create(config)
    train(config, run, shards, build=build, console=False)
    return run


def build(config: Config) -> ForeignLossModel:
    return build_foreign(config, join(config))


@pytest.fixture(scope="module")
def base(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as people publish models: a small random Llama, its tokenizer, and its chat template."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    config = configure({"random": LLAMA}, {"source": {"kind": "stdlib"}})
    with restored_settings():
        torch.manual_seed(3)
        model: Any = build(config).language_model
    model.save_pretrained(folder)
    names = ["<|user|>", "<|assistant|>", "<|end|>"]
    corpus = ["Copy the text, repeat the word 0123456789.\n"] * 4
    tokenizer = TextTokenizer.train(corpus, vocab_size=320, end_of_text="<|endoftext|>", special_tokens=names)
    (folder / "tokenizer.json").write_bytes(tokenizer.json_bytes)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return folder


def answer_log_prob(model: Any, ids_T: Tensor, targets_T: Tensor, weights_T: Tensor) -> Tensor:
    """The log-probability of the weighted targets of one document alone, from the logits of transformers."""
    log_probs_TV = model(input_ids=ids_T.unsqueeze(0), use_cache=False).logits[0].log_softmax(-1)
    return (log_probs_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1) * weights_T).sum()


def quiet(line: str) -> None:
    """Says nothing."""


def test_conversations_train_a_model_from_random_weights(configure: Configure) -> None:
    """With a tokenizer that is trained on the conversations, and the built-in template."""
    source = {"kind": "chat_tasks", "template": "chatml", **TASKS}
    config = configure({"random": LLAMA}, {"source": source})
    shards = prepare(config, say=quiet)
    assert {shards.tokenizer.special_id(name) for name in ("<|im_start|>", "<|im_end|>")} <= {0, 1, 2}
    rows = read_metrics(trained(config, shards).metrics_jsonl)
    assert rows[-1]["next_token_loss"] < 0.7 * rows[0]["next_token_loss"]
    assert rows[-1]["valid_bits_per_byte"] > 0
    # the steps count the tokens of the assistant alone
    assert rows[-1]["tokens"] < 0.7 * rows[-1]["step"] * 4 * 256


def test_conversations_train_a_published_model(base: Path, configure: Configure) -> None:
    """With its own tokenizer and template: the loss is that of transformers on the tokens of the assistant."""
    source = {"kind": "chat_tasks", **TASKS}
    config = configure({"path": str(base)}, {"tokenizer": {"path": "model"}, "source": source}, steps=2)
    shards = prepare(config, say=quiet)
    text = next(shards.train.pieces(0)).text
    assert text.startswith("<|user|>")
    assert text.endswith("<|end|><|endoftext|>")
    loss_model = build(config)
    loss_model.prepare()
    batch = make_batch(shards.train, np.array([0, 1]), step=0, token_count=1.0)
    with torch.no_grad():
        found = loss_model(batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.cu_seqlens_N, 1.0).next_token_sum
        exact = torch.zeros(())
        for start, stop in pairwise(batch.cu_seqlens_N.tolist()):
            ids, targets, weights = (
                tensor.flatten()[start:stop] for tensor in (batch.ids_BT, batch.targets_BT, batch.weights_BT)
            )
            exact -= answer_log_prob(loss_model.language_model, ids, targets, weights)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-3)
    assert len(read_metrics(trained(config, shards).metrics_jsonl)) == 2


def test_preferences_train_a_published_model(base: Path, configure: Configure, tmp_path: Path) -> None:
    """The reference is the model of model.path, and log-probabilities are those of transformers."""
    lines = [{"prompt": f"Copy {number}", "chosen": f"the {number}", "rejected": "text"} for number in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"kind": "preferences", "paths": [str(tmp_path / "pairs.jsonl")]}
    data = {"tokenizer": {"path": "model"}, "source": source}
    config = configure({"path": str(base)}, data, dpo={"beta": 0.3})
    shards = prepare(config, say=quiet)
    loss_model = build(config)
    loss_model.prepare()
    batch = make_pair_batch(shards.train, np.array([0, 1]))
    exact = []
    with torch.no_grad():
        found_P2 = log_probs(loss_model, batch).float()
        for answer in range(found_P2.numel()):
            chosen = batch.answers_BT == answer
            row = (tensor[chosen] for tensor in (batch.ids_BT, batch.targets_BT, batch.weights_BT))
            exact.append(answer_log_prob(loss_model.language_model, *row))
    torch.testing.assert_close(found_P2, torch.stack(exact).view(-1, 2), rtol=1e-5, atol=1e-3)
    rows = read_metrics(trained(config, shards).metrics_jsonl)
    assert rows[0]["preferences"]["loss"] == pytest.approx(np.log(2), rel=1e-5), "the policy is the reference"
    assert rows[-1]["preferences"]["accuracy"] > 0.8
    assert rows[-1]["valid_preferences"]["loss"] < 0.65


@pytest.mark.slow
def test_an_export_of_conversations_has_their_template(configure: Configure) -> None:
    source = {"kind": "chat_tasks", "template": "chatml", **TASKS}
    run = RunFolder.open(run_all(configure({"random": LLAMA}, {"source": source})), writes=False)
    tokenizer = AutoTokenizer.from_pretrained(run.export)
    conversation = [{"role": "user", "content": "Copy"}, {"role": "assistant", "content": "Copy"}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert text == "<|im_start|>user\nCopy<|im_end|>\n<|im_start|>assistant\nCopy<|im_end|>\n"
    ids = tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"]
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end_of_turn) == 2
    ends = AutoModelForCausalLM.from_pretrained(run.export).generation_config.eos_token_id
    assert {end_of_turn, tokenizer.eos_token_id} <= set(ends)


def test_a_model_of_transformers_starts_from_its_path(configure: Configure) -> None:
    source = {"kind": "chat_tasks", "template": "chatml", **TASKS}
    with pytest.raises(ConfigError, match=r"train\.start_from: .*\n.*model\.path"):
        configure({"random": LLAMA}, {"source": source}, start_from="models/x")
