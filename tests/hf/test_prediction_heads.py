"""Exports with and without the further depths of model.prediction: in cdrmix, in transformers, and from commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from in_process import main

from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.hf.export import export_model
from cdrmix.inference.load import Loaded, load_exported
from cdrmix.inference.text_model import TextModel
from cdrmix.model.language_model import LanguageModel

TINY = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"
SMALL = (
    *("model.vocab_size=300", "model.d_model=32", "model.layers=2", "model.attention_fraction=0.5"),
    *("model.attention.heads=2", "model.attention.kv_heads=1", "model.rwkv.head_size=16"),
    *("model.feed_forward.hidden=16", "data.row_length=64"),
)
TEXT = ["def f(x):\n    return x\n", "while True: print('<|endoftext|>')\n"] * 20


def exported(folder: Path, kind: str, heads: str) -> tuple[LanguageModel, Path]:
    section = f"model.prediction={{kind: {kind}, tokens: 3}}"
    config = Config.from_yaml(TINY, [*SMALL, section, f"export.prediction_heads={heads}"])
    torch.manual_seed(1)
    model = LanguageModel(config.cdrmix_model).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    tokenizer = TextTokenizer.train(TEXT, vocab_size=290, end_of_text="<|endoftext|>")
    return model, export_model(Loaded(model, tokenizer, config, 20), folder / f"{kind}-{heads}")


@pytest.mark.parametrize("kind", ["chain", "heads", "sequential"])
@pytest.mark.parametrize("heads", ["keep", "drop"])
def test_an_export_has_the_depths_only_if_it_keeps_them(tmp_path: Path, kind: str, heads: str) -> None:
    original, folder = exported(tmp_path, kind, heads)
    loaded = load_exported(folder)
    kept = {name for name in loaded.model.state_dict() if name.startswith("prediction.")}
    wanted = {name for name in original.state_dict() if name.startswith("prediction.")}
    assert wanted
    assert original.prediction is not None
    assert kept == (wanted if heads == "keep" else set())
    assert (loaded.config.cdrmix_model.prediction is None) == (heads == "drop")
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, original.state_dict()[name])
    text = TextModel(loaded)
    sampling = {"max_new_tokens": 12, "temperature": 0.7}
    plain = text.generate(["def ", "while"], **sampling)  # type: ignore[arg-type]
    assert text.drafts is None
    if heads == "drop":
        with pytest.raises(ConfigError, match=r"export\.prediction_heads: keep"):
            text.generate("def ", speculative=True)
    else:
        assert text.generate(["def ", "while"], **sampling, speculative=True) == plain  # type: ignore[arg-type]
        assert text.drafts is not None
        assert text.drafts.passes > 0


@pytest.mark.parametrize("heads", ["keep", "drop"])
def test_transformers_loads_both(tmp_path: Path, heads: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    import cdrmix.hf.auto  # noqa: F401  # registers the classes

    original, folder = exported(tmp_path, "chain", heads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original.logits(original(ids).hidden_BTD))
    names = {name for name in model.state_dict() if ".prediction." in name}
    assert bool(names) == (heads == "keep")
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_the_command_writes_the_same_text_and_says_what_was_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = exported(tmp_path, "chain", "keep")
    command = ["generate", "--model", str(folder), "--device", "cpu", "--prompt", "def ", "--max-new-tokens", "9"]
    for more in ([], ["--samples", "2", "--json"]):
        assert main([*command, *more]) == 0
        plain = capsys.readouterr()
        assert main([*command, *more, "--speculative"]) == 0
        drafted = capsys.readouterr()
        assert drafted.out == plain.out
        assert "drafts accepted" in drafted.err
        assert "drafts accepted" not in plain.err
