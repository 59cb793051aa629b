"""Exported models in transformers: weights, logits, generated tokens and training losses equal those of cdrmix."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast
from transformers.utils import logging

from cdrmix.errors import ConfigError
from cdrmix.hf import auto
from cdrmix.hf.configuration_cdrmix import CdrmixConfig
from cdrmix.hf.modeling_cdrmix import CdrmixForCausalLM
from cdrmix.inference.generate import Row, decode
from cdrmix.inference.load import Loaded, load_exported
from cdrmix.inference.sampling import Sampling
from cdrmix.model.loss import LossModel

Exported = Callable[[str], Path]
KINDS = ["attention", "dense", "rwkv7", "mamba2", "routing_mamba", "hybrid"]
PROMPTS = ["def f(x", "x", "return x\n def f", "für größere Öfen"]


@pytest.fixture(autouse=True)
def registered() -> None:
    auto.register()
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> CdrmixForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert isinstance(model, CdrmixForCausalLM)
    return model


def continued(loaded: Loaded, prompts: list[str], count: int) -> list[list[int]]:
    """The ids of each prompt and those that cdrmix takes greedily, up to end-of-text."""
    end, sampling = loaded.tokenizer.end_of_text_id, Sampling(temperature=0, max_new_tokens=count)
    rows = [Row([end, *loaded.tokenizer.encode(prompt)], sampling) for prompt in prompts]
    for number, token in decode(loaded.model, rows, loaded.tokenizer.vocab_size):
        rows[number].ended = token == end
    return [row.ids for row in rows]


def without_padding(ids_T: Tensor, mask_T: Tensor, length: int) -> list[int]:
    """A row without the padding before its prompt and after its text of `length` ids."""
    found: list[int] = ids_T[int((mask_T == 0).sum()) :].tolist()
    return found[:length]


@pytest.mark.parametrize(
    ("kind", "count"),
    [pytest.param(kind, 64, marks=pytest.mark.slow) if "mamba" in kind else (kind, 16) for kind in KINDS],
)
def test_greedy_texts_and_beams_are_those_of_cdrmix(exported: Exported, kind: str, count: int) -> None:
    """Tokens of a prompt alone, and of four in a left-padded batch; 4 beams with the cache, without it, and in a
    batch."""
    folder = exported(kind)
    model, tokenizer, loaded = opened(folder), AutoTokenizer.from_pretrained(folder), load_exported(folder)
    wanted = continued(loaded, PROMPTS, count)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    lengths = batch.attention_mask.sum(1).tolist()
    assert len(set(lengths)) > 1
    assert max(len(ids) - length for ids, length in zip(wanted, lengths, strict=True)) == count
    greedy = model.generate(**batch, max_new_tokens=count, do_sample=False)
    for ids, row, mask in zip(wanted, greedy, batch.attention_mask, strict=True):
        assert without_padding(row, mask, len(ids)) == ids
    alone = tokenizer(PROMPTS[0], return_tensors="pt")
    assert model.generate(**alone, max_new_tokens=count, do_sample=False)[0].tolist() == wanted[0]
    beams = model.generate(**batch, max_new_tokens=4, num_beams=4, do_sample=False)
    kept, again = (
        model.generate(**alone, max_new_tokens=4, num_beams=4, do_sample=False, use_cache=use_cache)[0].tolist()
        for use_cache in (True, False)
    )
    assert kept == again == without_padding(beams[0], batch.attention_mask[0], len(kept))


def test_arguments_of_generate_and_forward_are_those_of_a_llama(exported: Exported) -> None:
    """Stop strings with a tokenizer, positions that count the tokens, and a sentence for what is not possible."""
    folder = exported("attention")
    model, tokenizer = opened(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    whole = model.generate(**batch, **options)
    alone = tokenizer(PROMPTS[0], return_tensors="pt")
    text = tokenizer.decode(model.generate(**alone, **options)[0])
    stop = text[-4:-2]
    found = tokenizer.decode(model.generate(**alone, **options, stop_strings=[stop], tokenizer=tokenizer)[0])
    assert text.startswith(found)
    assert stop in found[len("<|endoftext|>") :]
    assert len(found) < len(text)
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        model.generate(**batch, **options, stop_strings=[stop])
    with pytest.raises(ValueError, match="not used by the model: \\['max_new_token'\\]"):
        model.generate(**batch, max_new_token=3)
    positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
    assert torch.equal(model.generate(**batch, **options, position_ids=positions), whole)
    logits = model(**batch).logits
    assert torch.equal(model(**batch, position_ids=positions).logits, logits)
    ids = batch.input_ids[:1, -3:]
    for wrong in (torch.tensor([[0, 1, 0]]), torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1]])):
        with pytest.raises(ValueError, match="position_ids must count the tokens of each row from 0"):
            model(ids, position_ids=wrong)
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        with pytest.raises(ValueError, match="a cdrmix model has logits only"):
            model(ids, **{name: True})


def test_generation_without_a_cache_reads_padded_rows_whole(exported: Exported) -> None:
    folder = exported("hybrid")
    model, batch = opened(folder), AutoTokenizer.from_pretrained(folder)(PROMPTS, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 6, "do_sample": False}
    kept = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options, use_cache=False), kept)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_have_the_logits_of_each_alone(exported: Exported, kind: str) -> None:
    """In float64, at once and token by token behind the cache; padding has no gradient and no influence."""
    folder = exported(kind)
    model = opened(folder, torch.float64)
    rows = [torch.randint(1, 290, (length,)) for length in (7, 1, 12)]
    mask = torch.stack([torch.arange(12) >= 12 - len(row) for row in rows]).long()
    ids = torch.full((3, 12), 5).masked_scatter(mask.bool(), torch.cat(rows))
    more = torch.randint(1, 290, (3, 3))
    with torch.no_grad():
        first = model(ids, attention_mask=mask)
        others = model(ids.masked_fill(mask == 0, 9), attention_mask=mask)
        steps, grown = [], mask
        for token in more.split(1, 1):
            grown = torch.cat([grown, torch.ones(3, 1, dtype=torch.long)], 1)
            steps.append(model(token, attention_mask=grown, past_key_values=first.past_key_values).logits)
        for number, row in enumerate(rows):
            alone = model(torch.cat([row, more[number]]).unsqueeze(0)).logits[0]
            together = torch.cat([first.logits[number, -len(row) :], torch.cat(steps, 1)[number]])
            assert (alone - together).abs().max() < 1e-10
    assert torch.equal(first.logits[mask.bool()], others.logits[mask.bool()])
    assert first.past_key_values.get_seq_length() == 15


def test_sampling_takes_the_logits_of_cdrmix(exported: Exported) -> None:
    """The scores of every sampled token are those of a whole pass over the row, and ids without a token are never
    sampled."""
    folder = exported("hybrid")
    model, loaded = opened(folder), load_exported(folder)
    assert loaded.tokenizer.vocab_size < loaded.config.model.vocab_size
    batch = AutoTokenizer.from_pretrained(folder)(PROMPTS, return_tensors="pt", padding=True)
    torch.manual_seed(5)
    found = model.generate(
        **batch,
        do_sample=True,
        temperature=5.0,
        top_k=0,
        max_new_tokens=12,
        num_return_sequences=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert len(found.sequences) == 8
    assert len({tuple(row.tolist()) for row in found.sequences}) == 8
    width = batch.input_ids.shape[1]
    assert int(found.sequences[:, width:].max()) < loaded.tokenizer.vocab_size
    logits = torch.stack(found.logits, 1)
    for number, row in enumerate(found.sequences):
        ids = row[int((batch.attention_mask[number // 2] == 0).sum()) :].unsqueeze(0)
        wanted = loaded.model.logits(loaded.model(ids).hidden_BTD)[0, -13:-1]
        assert (logits[number] - wanted).abs().max() < 1e-4


def test_an_export_has_the_bits_of_its_model(exported: Exported, tmp_path: Path) -> None:
    """Loading and saving keep every bit; what transformers saved opens again, also cut into several files."""
    folder = exported("hybrid")
    loaded = load_exported(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == torch.float32
    ids = torch.randint(0, 290, (2, 40))
    assert torch.equal(model(ids).logits, loaded.model.logits(loaded.model(ids).hidden_BTD))
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").is_file()
    again = opened(tmp_path / "saved")
    for other in (model.model, again.model):
        state = other.state_dict()
        assert state.keys() == loaded.model.state_dict().keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in loaded.model.state_dict().items())
    assert again.config.step == 20
    assert again.config.auto_map == json.loads((folder / "config.json").read_text())["auto_map"]
    assert again.config.model == loaded.config.model.model_dump(mode="json")


def test_a_new_model_has_the_first_values_of_cdrmix(exported: Exported) -> None:
    config = AutoConfig.from_pretrained(exported("hybrid"))
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (
        300,
        32,
        4,
        2,
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(3)
    wanted = type(model.model)(config.model_section).state_dict()
    assert all(torch.equal(tensor, wanted[name].to(tensor.dtype)) for name, tensor in model.model.state_dict().items())


@pytest.mark.parametrize("kind", ["rwkv7", "hybrid"])
def test_bfloat16_stays_near_float32(exported: Exported, kind: str) -> None:
    """Within 0.2 standard deviations of the logits; the routers stay in float32, and texts can be generated."""
    folder = exported(kind)
    wide, narrow = opened(folder), opened(folder, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in narrow.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "router" in name} <= {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "router" not in name} == {torch.bfloat16}
    batch = AutoTokenizer.from_pretrained(folder)(PROMPTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected, found = (model(**batch).logits[batch.attention_mask.bool()] for model in (wide, narrow))
    assert found.dtype == torch.float32
    assert (found - expected).std() < 0.2 * expected.std()
    with torch.no_grad():  # routers that a user has rounded select other experts, but they work
        rounded = wide.to(torch.bfloat16)(**batch).logits[batch.attention_mask.bool()]
    assert (rounded - expected).std() < 0.5 * expected.std()
    assert narrow.generate(**batch, max_new_tokens=4).shape[1] == batch.input_ids.shape[1] + 4


CODE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.manual_seed(0)
folder, saved = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
batch = tokenizer("def f(x", return_tensors="pt")
first = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
first.save_pretrained(saved)
tokenizer.save_pretrained(saved)
again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
assert torch.equal(first(**batch).logits, again(**batch).logits)
assert AutoTokenizer.from_pretrained(saved, trust_remote_code=True)("def f(x").input_ids == batch.input_ids[0].tolist()
print(type(first).__module__, type(again).__module__)
"""


@pytest.mark.slow
def test_remote_code_is_the_installed_package(exported: Exported, tmp_path: Path) -> None:
    """In a fresh process, without `register` and without a network; also for what transformers saves."""
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CODE, str(exported("attention")), str(tmp_path / "saved")]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["cdrmix.hf.modeling_cdrmix"] * 2
    for file in ("modeling_cdrmix.py", "configuration_cdrmix.py"):
        assert (tmp_path / "saved" / file).read_text() == (exported("attention") / file).read_text()


def test_the_tokenizer_gives_the_ids_of_cdrmix(exported: Exported, tmp_path: Path) -> None:
    """A text begins with end-of-text, and its own end-of-text is text; also after transformers saved it."""
    folder = exported("hybrid")
    ours, tokenizer = load_exported(folder).tokenizer, AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    for theirs in (tokenizer, AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(folder)):
        for text in (
            "",
            " a  b\n",
            "<|endoftext|>",
            "x<|endoftext|>",
            "für größere Öfen, naïve café 🐍\r\n",
            "1234567",
        ):
            ids = theirs(text).input_ids
            assert ids == [ours.end_of_text_id, *ours.encode(text)]
            assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
            assert theirs.decode(ids, skip_special_tokens=True) == text
        names = theirs.bos_token, theirs.eos_token, theirs.pad_token
        assert names == (ours.end_of_text,) * 3
        assert (theirs.padding_side, theirs.model_max_length) == ("left", 256)


def test_a_cache_is_continued_copied_and_branched(exported: Exported) -> None:
    """A second turn behind the cache of the first gives the text of one call; a copy of the cache stays as it was."""
    model = opened(exported("hybrid"))
    ids = torch.randint(1, 290, (2, 30))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 299}
    whole = model.generate(ids, **options)
    with torch.no_grad():
        begun = model(ids[:, :20]).past_key_values
    kept = copy.deepcopy(begun)
    assert torch.equal(model.generate(ids, past_key_values=begun, **options), whole)
    assert (kept.get_seq_length(), begun.get_seq_length()) == (20, 35)
    kept.batch_repeat_interleave(2)
    kept.batch_select_indices(torch.tensor([True, False, True, True]))
    again = model(ids[[0, 1, 1], 20:], past_key_values=kept).logits
    assert (again - model(ids[[0, 1, 1]]).logits[:, 20:]).abs().max() < 1e-5
    kept.reset()
    assert kept.get_seq_length() == 0
    assert torch.equal(model(ids, past_key_values=kept).logits, model(ids).logits)


def test_beams_take_the_states_of_their_rows(exported: Exported) -> None:
    """As beam search reorders a cache: rows change places, and one is there twice."""
    model, order = opened(exported("hybrid")), torch.tensor([2, 0, 2])
    ids = torch.randint(1, 290, (3, 12))
    with torch.no_grad():
        cache = model(ids[:, :9]).past_key_values
        cache.reorder_cache(order)
        found = model(ids[order, 9:], past_key_values=cache).logits
        assert (found - model(ids[order]).logits[:, 9:]).abs().max() < 1e-5


def test_what_transformers_sees_of_stage_b(stage_b: Path, tmp_path: Path) -> None:
    """The language model with its fast weights, as cdrmix; not the heads, which it does not report as unexpected."""
    loaded = load_exported(stage_b)
    assert loaded.heads.keys() == {"controller.probe"}
    model, info = AutoModelForCausalLM.from_pretrained(stage_b, output_loading_info=True)
    assert not any(info.values())
    ids = torch.randint(1, 290, (2, 80))
    found = model(ids).logits
    assert torch.equal(found, loaded.model.logits(loaded.model(ids).hidden_BTD))
    model.save_pretrained(tmp_path)
    assert torch.equal(opened(tmp_path)(ids).logits, found)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".plastic." in name:
                parameter.zero_()
    assert not torch.equal(model(ids).logits, found)
    model, tokenizer = opened(stage_b), AutoTokenizer.from_pretrained(stage_b)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    wanted = continued(loaded, PROMPTS[:1], 40)
    assert model.generate(ids, max_new_tokens=40, do_sample=False).tolist() == wanted
    kept, again = (
        model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert torch.equal(kept, again)
    with pytest.raises(ValueError, match=r"plastic adapters .* padding is not possible"):
        model.generate(**tokenizer(PROMPTS, return_tensors="pt", padding=True), max_new_tokens=2)
    assert "does not read the heads" in (stage_b / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # new in 5.23
def test_the_training_loss_is_that_of_cdrmix(exported: Exported) -> None:
    """With the routers' losses in training mode, without them in evaluation; padding has no loss; micro-batches sum up
    to the whole batch; recomputed activations give the same gradients."""
    model = opened(exported("hybrid"))
    ids = torch.randint(1, 290, (4, 20))
    with torch.no_grad():
        wanted = LossModel(model.model)(ids[:, :-1], ids[:, 1:], torch.ones(4, 19), None, 4 * 19)
    assert model(ids, labels=ids).loss.item() == pytest.approx(float(wanted.next_token_sum) / (4 * 19), rel=1e-5)
    model.train()
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        assert model.model.activation_checkpointing == recompute
        model.zero_grad()
        output = model(ids, labels=ids)
        assert output.past_key_values is None
        cross_entropy = float((output.loss - output.aux_loss).detach())
        assert cross_entropy == pytest.approx(float(wanted.next_token_sum) / (4 * 19), rel=1e-5)
        output.loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))
    halves = [model(half, labels=half, num_items_in_batch=4 * 19) for half in ids.split(2)]
    assert sum(half.loss.item() for half in halves) == pytest.approx(
        cross_entropy + sum(half.aux_loss.item() for half in halves) / 2, rel=1e-5
    )
    model.eval()
    mask = torch.ones_like(ids)
    mask[:2, :7] = 0
    kept = model(ids[:2, 7:], labels=ids[:2, 7:]).loss * 24 + model(ids[2:], labels=ids[2:]).loss * 38
    assert model(ids, attention_mask=mask, labels=ids).loss.item() == pytest.approx(kept.item() / 62, rel=1e-5)


def test_arguments_that_are_not_supported_are_refused(exported: Exported) -> None:
    model = opened(exported("hybrid"))
    ids = torch.randint(1, 290, (2, 5))
    begun = model(ids).past_key_values
    left, right, hole = (torch.tensor([[1] * 5, row]) for row in ([0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 1]))
    for mask in (right, hole, torch.tensor([[1] * 5, [0] * 5])):
        with pytest.raises(ValueError, match="padding is on the left"):
            model(ids, attention_mask=mask)
        with pytest.raises(ValueError, match="padding_side"):
            model.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"the shape \[2, 5\], .*found \[2, 7\]"):
        model(ids, attention_mask=torch.ones(2, 7))
    with pytest.raises(ValueError, match="only the first tokens of a row can be padded"):
        model(ids, attention_mask=torch.cat([torch.ones(2, 5), left], 1), past_key_values=begun)
    with pytest.raises(ValueError, match="found DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="inputs_embeds is not supported"):
        model(inputs_embeds=torch.zeros(1, 2, 32))
    for name in ("output_attentions", "output_hidden_states"):
        with pytest.raises(ValueError, match="must be False"):
            model(ids, **{name: True})
    with pytest.raises(ValueError, match="cannot go back"):
        begun.crop(-1)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(ids, assistant_model=model, max_new_tokens=2)
    with pytest.raises(ValueError, match="vocabulary of a cdrmix model cannot be resized: it has 300 ids"):
        model.resize_token_embeddings(512)
    assert model.resize_token_embeddings(300) is model.get_input_embeddings()
    assert isinstance(model(ids, return_dict=False), tuple)
    assert model(ids, logits_to_keep=2).logits.shape == (2, 2, 300)


def test_a_folder_that_is_not_whole_is_refused(exported: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(exported("hybrid"), folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    missing = {name: tensor for name, tensor in weights.items() if name != "blocks.1.mixer.w0"}
    save_file(missing, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for w0 of model\.blocks\.1\.mixer"):
        AutoModelForCausalLM.from_pretrained(folder)
    for change, message in (
        ({"model": None}, "config.json has no `model`"),
        ({"model": {"layers": 2}}, "not the model section"),
        ({"reasoning": {"chunk": -1}}, "`reasoning` in config.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            CdrmixForCausalLM(CdrmixConfig(**(AutoConfig.from_pretrained(folder).to_dict() | change)))


def test_registering_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'cdrmix\[hf\]'"):
        auto.register()
