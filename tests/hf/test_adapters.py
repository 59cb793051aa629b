"""Adapters (LoRA) in models of transformers: what is trained, saved, merged, exported, resumed and refused."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from in_process import main
from safetensors.torch import load_file
from torch import Tensor

import cdrmix
from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import Lora, _vocab_size
from cdrmix.data.batch import Batch
from cdrmix.errors import BaseModelError, CheckpointError, ConfigError, Preempted
from cdrmix.hf.adapters import add_adapters, merge_adapters, trained_parameters, uncalled
from cdrmix.hf.build import build_foreign, make_model
from cdrmix.hf.foreign import base_model, section_of
from cdrmix.hf.load import load_trained
from cdrmix.inference.checkpoints import read_weights
from cdrmix.records import Record
from cdrmix.training.callbacks import Callback
from cdrmix.training.distributed import join
from cdrmix.training.engine import make_engine
from cdrmix.workflow import run_all

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
architectures: Any = importlib.import_module("hf_architectures")
sys.path.remove(str(BENCHMARKS))
tiny = architectures.tiny

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft, which is not installed"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks for it
    pytest.mark.usefixtures("own_settings"),  # of `join`
]

VOCABULARY = 300
RUN: dict[str, Any] = {
    "run": {"threads": 1, "device": "cpu"},
    "data": {"row_length": 24, "valid_fraction": 0.25, "source": {"kind": "text"}},
    "train": {
        "steps": 4,
        "batch_rows": 4,
        "micro_batch_rows": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "precision": "fp32",
        "evaluate_every": 2,
        "evaluate_rows": 4,
        "checkpoint_every": 2,
        "ema_decay": 0.5,
    },
    "export": {"checkpoint": "last"},
}


def make_base(folder: Path, architecture: str, seed: int = 0) -> Path:
    """A tiny model with random weights, as transformers saves it."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny(architecture, VOCABULARY), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models of several architectures."""
    root = tmp_path_factory.mktemp("bases")
    return {name: make_base(root / name, name) for name in ("llama", "nemotron_h", "qwen3_moe")}


def config_of(base: Path, folder: Path, *, lora: dict[str, Any] | None = None, **train: Any) -> Config:
    """The configuration of a run with adapters on `base`, with its runs, shards and text in `folder`."""
    texts = folder / "texts"
    if not texts.is_dir():
        texts.mkdir(parents=True)
        for number in range(24):
            (texts / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n\nprint(f{number}(2))\n")
    content = yaml.safe_load(yaml.safe_dump(RUN))
    content["model"] = {"kind": "huggingface", "path": str(base), "lora": {"rank": 4, "alpha": 8.0} | (lora or {})}
    content["run"]["root"] = str(folder / "runs")
    content["data"] |= {"cache": str(folder / "cache"), "source": {"kind": "text", "paths": [str(texts)]}}
    content["train"] |= train
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return Config.from_yaml(path)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def run(bases: dict[str, Path], workspace: Path) -> Path:
    """A finished run with adapters on a tiny llama."""
    return run_all(config_of(bases["llama"], workspace))


def randomize(model: Any, seed: int = 5) -> dict[str, Tensor]:
    """Gives every B random values, and returns a copy of the adapters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trained_parameters(model).items():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 0.05, generator=generator)
    return {name: parameter.detach().clone() for name, parameter in trained_parameters(model).items()}


def logits(model: Any) -> Tensor:
    ids = torch.arange(40).remainder(VOCABULARY).unsqueeze(0) * 7 % VOCABULARY
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits.float()


def distance(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, in standard deviations."""
    return float((found - expected).square().mean().sqrt() / expected.std())


def plain(folder: Path, **options: Any) -> Any:
    """The model that transformers alone reads."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize("architecture", ["llama", "nemotron_h", "qwen3_moe"])
def test_training_changes_the_adapters_alone(architecture: str, bases: dict[str, Path], tmp_path: Path) -> None:
    config = config_of(bases[architecture], tmp_path, lora={"experts": architecture == "qwen3_moe"})
    loss_model = build_foreign(config, join(config))
    model = loss_model.language_model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = make_engine(config, loss_model, join(config), base=loss_model.base)
    loss_model.prepare()
    ids = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, ids.roll(-1, 1), torch.ones(2, 24), torch.tensor([0, 10, 24, 48], dtype=torch.int32), 0, 48.0)
    engine.set_learning_rate(1e-2)
    for _ in range(2):
        engine.backward(engine.forward(batch, last=True).total)
        assert {name for name, each in model.named_parameters() if each.grad is not None} == {
            name for name in before if ".lora_" in name
        }
        engine.clip()
        assert engine.step()
        engine.zero()
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert engine.weights().keys() == changed


@pytest.mark.parametrize(("architecture", "experts"), [("llama", False), ("nemotron_h", False), ("qwen3_moe", True)])
def test_merged_weights_give_the_logits_of_the_adapters(
    architecture: str, experts: bool, bases: dict[str, Path]
) -> None:
    lora = Lora(rank=4, experts=experts)
    model = plain(bases[architecture])
    base = logits(model)
    add_adapters(model, lora, seed=1, base=None)
    assert torch.equal(logits(model), base)  # B is 0
    weights = randomize(model)
    adapted = logits(model)
    assert distance(adapted, base) > 0.1
    merged = merge_adapters(plain(bases[architecture]), lora, weights, origin=Path("here"))
    assert distance(logits(merged), adapted) < 1e-5
    assert merged.state_dict().keys() == plain(bases[architecture]).state_dict().keys()


def test_adapters_begin_with_the_seed_of_the_run(bases: dict[str, Path]) -> None:
    def begin(seed: int) -> dict[str, Tensor]:
        model = plain(bases["llama"])
        torch.rand(seed + 1)  # the global generator does not count
        state = torch.random.get_rng_state()
        add_adapters(model, Lora(rank=4), seed=seed, base=None)
        assert torch.equal(torch.random.get_rng_state(), state)
        return {name: parameter.detach() for name, parameter in trained_parameters(model).items()}

    first, again, other = begin(1), begin(1), begin(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if ".lora_A." in name)


def test_checkpoints_hold_the_adapters_and_the_hash_of_the_base(run: Path, bases: dict[str, Path]) -> None:
    checkpoint = run / "checkpoints" / "step-00000004"
    weights, average = load_file(checkpoint / "model.safetensors"), load_file(checkpoint / "ema.safetensors")
    assert len(weights) == 2 * 2 * 7  # A and B, layers, projections
    assert all(".lora_" in name for name in weights)
    assert weights.keys() == average.keys()
    lines = f"{hashlib.sha256((bases['llama'] / 'model.safetensors').read_bytes()).hexdigest()}  model.safetensors\n"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["base"] == hashlib.sha256(lines.encode()).hexdigest()
    loaded = load_trained(run)
    merged = merge_adapters(plain(bases["llama"]), Lora(rank=4, alpha=8.0), average, origin=run)
    assert torch.equal(logits(loaded.model.transformers_model), logits(merged))  # the average is used


def test_export_is_a_stock_folder_and_the_adapters_open_in_plain_peft(
    run: Path, bases: dict[str, Path], workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock, adapters = run / "export", workspace / "adapters-alone"
    assert main(["export", "--model", str(run), "--adapter", "--out", str(adapters)]) == 0
    expected = logits(plain(stock))
    import peft  # here: importing it takes two seconds

    assert distance(logits(peft.PeftModel.from_pretrained(plain(bases["llama"]), str(adapters))), expected) < 1e-5
    described = json.loads((adapters / "adapter_config.json").read_text())
    assert described["target_modules"] == sorted(f"{name}_proj" for name in ("down", "gate", "k", "o", "q", "up", "v"))
    assert (described["r"], described["lora_alpha"]) == (4, 8.0)
    assert described["base_model_name_or_path"] == str(bases["llama"])
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=adapters, check=False).returncode == 0

    # The adapter folder is a model too: evaluated, used, merged.
    assert main(["export", "--model", str(adapters), "--merge", "--out", str(workspace / "merged")]) == 0
    assert torch.equal(logits(plain(workspace / "merged")), expected)
    capsys.readouterr()
    outputs = []
    for folder in (stock, adapters):
        assert main(["eval", "--model", str(folder), "--json"]) == 0
        assert main(["generate", "--model", str(folder), "--prompt", "def ", "--temperature", "0"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("architecture", ["llama", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_adapters_of_a_quantized_base_are_merged_into_its_dequantized_weights(
    architecture: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    config = config_of(bases[architecture], tmp_path, lora={"quantize": "nf4"})
    model = make_model(config, join(config))
    assert any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())
    weights = randomize(model)
    trained = logits(model)
    lora = section_of(config).lora
    assert lora is not None
    merged = merge_adapters(base_model(config), lora, weights, origin=tmp_path)
    assert distance(logits(merged), trained) < 1e-4
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float32}
    into_original = merge_adapters(plain(bases[architecture]), lora, weights, origin=tmp_path)
    assert distance(logits(into_original), trained) > 0.01


class Stop(Callback):
    """Stops the run after a step."""

    def __init__(self, step: int) -> None:
        self._last = step

    def on_record(self, record: Record) -> bool:
        return record.step >= self._last


def test_a_stopped_run_continues_bit_for_bit_with_its_base_alone_and_exports_the_adapters(
    run: Path, bases: dict[str, Path], workspace: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(bases["llama"], workspace / "copy"))
    config = config_of(base, workspace)
    with pytest.raises(Preempted):
        run_all(config, callbacks=[Stop(2)])
    (stopped,) = (path for path in (workspace / "runs").iterdir() if not (path / "report.html").exists())
    whole = (base / "model.safetensors").read_bytes()

    make_base(base, "llama", seed=1)
    with pytest.raises(BaseModelError, match=r"base model with SHA-256 \w{12}, .* base model with SHA-256 \w{12}"):
        run_all(config, "auto")
    with pytest.raises(BaseModelError, match=r"another base: .* SHA-256 is \w{64}, and the files .* have \w{64}"):
        load_trained(stopped)
    shutil.move(base, tmp_path / "away")
    assert main(["generate", "--model", str(stopped)]) == BaseModelError.exit_code == 13
    shutil.move(tmp_path / "away", base)
    (base / "model.safetensors").write_bytes(whole)

    config = config.model_copy(update={"export": config.export.model_copy(update={"lora": "adapter"})})
    assert run_all(config, "auto") == stopped
    assert main(["compare", str(run), str(stopped)]) == 0
    assert not (stopped / "export" / "model.safetensors").exists()
    import peft

    adapted = peft.PeftModel.from_pretrained(plain(base), str(stopped / "export"))
    assert distance(logits(adapted), logits(plain(run / "export"))) < 1e-5
    cdrmix.load(stopped / "export")
    shutil.move(base, tmp_path / "away")
    _vocab_size.cache_clear()  # as in another process
    with pytest.raises(BaseModelError, match="which does not exist; restore that folder"):
        cdrmix.load(stopped / "export")


def work(config: Config, folder: Path, action: str, *overrides: str, processes: int = 1) -> list[int]:
    """Runs adapters_worker.py in several processes on a configuration. Returns their exit codes."""
    path = folder / "worker.yaml"
    path.write_text(config.to_yaml())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [Path(__file__).with_name("adapters_worker.py"), path, action, *overrides]
    workers = []
    for rank in range(processes):
        place = rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        workers.append(forked.start(command, os.environ | (place if processes > 1 else {})))
    try:
        return [worker.wait(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def final_adapters(root: Path) -> dict[str, Tensor]:
    """The weights of the last checkpoint of the only run in a folder."""
    (run,) = root.iterdir()
    return read_weights(run / "checkpoints" / "step-00000004")


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "stage", "quantize"),
    [("llama", 1, None), ("llama", 2, "nf4"), ("llama", 3, None), ("nemotron_h", 3, None)],
)
def test_two_processes_train_the_same_adapters_and_continue_after_a_kill(
    architecture: str, stage: int, quantize: str | None, bases: dict[str, Path], tmp_path: Path
) -> None:
    config = config_of(bases[architecture], tmp_path, lora={"quantize": quantize})
    places = {name: f"run.root={tmp_path / name}" for name in ("one", "two", "killed")}
    assert work(config, tmp_path, "kill=0", places["one"]) == [0]
    sharded = f"train.zero_stage={stage}"
    assert work(config, tmp_path, "kill=0", places["two"], sharded, processes=2) == [0, 0]
    assert work(config, tmp_path, "kill=3", places["killed"], sharded, processes=2) == [-signal.SIGKILL] * 2
    assert work(config, tmp_path, "resume", places["killed"], sharded, processes=2) == [0, 0]
    one, two, killed = (final_adapters(tmp_path / name) for name in places)
    assert one.keys() == two.keys() == killed.keys()
    assert all(torch.equal(two[name], killed[name]) for name in two)
    largest = max(float(tensor.abs().max()) for tensor in one.values())
    difference = max(float((one[name] - two[name]).abs().max()) for name in one)
    assert difference == 0.0 if stage < 3 else difference < 1e-3 * largest


@pytest.mark.parametrize(
    ("architecture", "lora", "message"),
    [
        (
            "llama",
            {"targets": ["q_proj", "query"]},
            r"query does not exist in llama; .* are down_proj, gate_proj, k_p",
        ),
        ("llama", {"targets": []}, "found no name; allowed: auto, or a list of "),
        ("llama", {"targets": ["lm_head"]}, "the layer lm_head cannot have an adapter"),
        ("llama", {"targets": ["embed_tokens"]}, "the layer embed_tokens cannot have an adapter"),
        ("nemotron_h", {"targets": ["out_proj"]}, "out_proj cannot have an adapter in nemotron_h"),
        ("llama", {"experts": True}, "llama has no experts"),
    ],
)
def test_layers_that_cannot_have_adapters_are_refused(
    architecture: str, lora: dict[str, Any], message: str, bases: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        add_adapters(plain(bases[architecture]), Lora(**lora), seed=1, base=None)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"path": None, "random": {"model_type": "llama", "vocab_size": 300}}, "adapters need a trained model"),
        ({"vocab": {"add_tokens": ["<a>"]}}, "whose vectors adapters do not train"),
        ({"lora": {"experts": True, "dropout": 0.1}}, "whose inputs peft cannot drop"),
    ],
)
def test_combinations_that_cannot_work_are_refused(
    model: dict[str, Any], message: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    config_of(bases["llama"], tmp_path)
    content = yaml.safe_load((tmp_path / "config.yaml").read_text())
    content["model"] |= model
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=message):
        Config.from_yaml(tmp_path / "config.yaml")


def test_options_and_folders_that_do_not_fit_are_refused(
    run: Path, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["train", "--config", str(workspace / "config.yaml"), f"model.path={tmp_path}"]) == 2
    assert "has adapters, not a model; merge them" in capsys.readouterr().err
    assert main(["export", "--model", str(run), "--adapter", "--rwkv", str(tmp_path / "a.pth")]) == 2
    assert main(["export", "--model", str(run / "export"), "--adapter", "--out", str(tmp_path / "a")]) == 5
    checkpoint = Path(shutil.copytree(run, tmp_path / "run")) / "checkpoints" / "step-00000004"
    weights = load_file(checkpoint / "model.safetensors")
    weights.popitem()
    model = plain(run / "export")
    with pytest.raises(CheckpointError, match=r"does not match the adapters of model.lora: it lacks 1 tensors"):
        merge_adapters(model, Lora(rank=4), weights, origin=checkpoint)


@pytest.mark.parametrize(
    ("architecture", "without"),
    [
        ("mamba", {"x_proj", "dt_proj", "out_proj"}),
        ("jamba", {"dt_proj"}),
        ("bloom", {"dense", "dense_4h_to_h"}),
        ("bamba", {"out_proj"}),
        ("gpt2", set()),
        ("deepseek_v3", {"gate_proj", "up_proj", "down_proj"}),  # peft takes these names for those of experts
    ],
)
def test_layers_whose_weight_is_read_without_a_call_get_no_adapters(architecture: str, without: set[str]) -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny(architecture, VOCABULARY), dtype=torch.float32)
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    layers = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, kinds)}
    add_adapters(model, Lora(rank=2), seed=1, base=None)
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in trained_parameters(model)}
    assert layers - adapted - {"lm_head"} == without
    assert uncalled(model) == []
