"""Exported toy models of every mixer, made once for the tests of a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from built_once import built_once

for name in ("pydantic", "matplotlib"):
    pytest.importorskip(name, reason=f"needs {name}, which is not installed")

import short_endings
from tqdm import tqdm

from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.hf.export import export_model
from cdrmix.inference.load import Loaded, build
from cdrmix.model.language_model import LanguageModel

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = (
    "model.vocab_size=300",
    "model.d_model=32",
    "model.layers=2",
    "model.attention.heads=2",
    "model.attention.kv_heads=1",
    "model.rwkv.head_size=16",
    "model.mamba.head_dim=32",
    "model.mamba.d_state=16",
    "model.feed_forward.hidden=16",
    "data.row_length=256",
)
KINDS = {
    "attention": ("model.attention_fraction=1.0", "model.attention.qk_norm=true"),
    "rwkv7": ("model.attention_fraction=0.0", "model.feed_forward.kind=channel_mix", "model.tie_embeddings=false"),
    "dense": (
        "model.attention_fraction=1.0",
        "model.feed_forward.kind=dense",
        "model.norm=rmsnorm",
        "model.embedding_norm=false",
    ),
    "mamba2": ("model.attention_fraction=0.0", "model.mixer_layers={mamba2: [0, 1]}"),
    "routing_mamba": ("model.attention_fraction=0.0", "model.mixer_layers={routing_mamba: [0, 1]}"),
    "bigrams": ("model.attention_fraction=0.5", "model.bigrams.rows=61"),
    "hybrid": (
        "model.layers=4",
        "model.attention_fraction=0.25",
        "model.mixer_layers={mamba2: [0], routing_mamba: [2]}",
    ),
}
TEXT = ["def f(x):\n    return x\n", "für größere Öfen, naïve café 🐍\n", "while True: print('<|endoftext|>')\n"] * 20


def model_with_weights(config: Config, *, plastic: bool = False, seed: int = 0) -> LanguageModel:
    """A model whose parameters all differ from their first values, so that each changes the logits."""
    torch.manual_seed(seed)
    model = LanguageModel(config.model, reasoning=config.reasoning if plastic else None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


@pytest.fixture
def without_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes the kernels of fla where it is installed, and they need a GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setitem(sys.modules, "fla", None)


@pytest.fixture(scope="module", autouse=True)
def short_runs() -> Iterator[None]:
    """Short endings of runs; and progress bars of transformers without a thread that watches them, which would stay."""
    with short_endings.short_endings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm, "monitor_interval", 0)
        yield


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The export folder of a kind of model; the same folder each time, so that tests must not change it."""

    def export(kind: str) -> Path:
        def build(folder: Path) -> None:
            config = Config.from_yaml(CONFIGS / "base" / "tiny.yaml", [*SMALL, *KINDS[kind]])
            tokenizer = TextTokenizer.train(TEXT, vocab_size=290, end_of_text="<|endoftext|>")
            export_model(Loaded(model_with_weights(config), tokenizer, config, 20), folder / "export")

        return built_once(tmp_path_factory, f"exported-{kind}", build) / "export"

    return export


@pytest.fixture(scope="session")
def stage_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export folder of a model with fast weights and a head of stage B."""
    config = Config.from_yaml(
        CONFIGS / "cdrmix-reason-tiny.yaml",
        [*SMALL, "reasoning.plastic_lora.rank=4", "reasoning.plastic_lora.key_width=8"],
    )
    weights = dict(model_with_weights(config, plastic=True).state_dict())
    weights["controller.probe"] = torch.randn(3)
    model, heads = build(config, weights, origin=Path("the test"))
    assert model.adapters
    tokenizer = TextTokenizer.train(TEXT, vocab_size=290, end_of_text="<|endoftext|>")
    return export_model(Loaded(model, tokenizer, config, 30, heads), tmp_path_factory.mktemp("stage_b") / "export")
