"""Models of transformers by whole runs: export, resume, the model that is made first, and folders that are refused."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from in_process import main
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import cdrmix
from cdrmix.compare import compare
from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import _vocab_size
from cdrmix.data.loader import EvalLoader
from cdrmix.data.prepare import prepare
from cdrmix.errors import CdrmixWarning, Preempted
from cdrmix.hf.export import write_sums
from cdrmix.hf.foreign import _Experts, base_model
from cdrmix.run_folder import RunFolder

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a configuration of a small model on a few texts, and returns its path."""
    root = tmp_path_factory.mktemp("foreign")
    texts = [
        {"text": f"def function_{number}(x):\n    return x * {number} + {number % 7}  # {'comment ' * (number % 9)}\n"}
        for number in range(120)
    ]
    (root / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))

    def make(name: str, model: dict[str, Any], tokenizer: str | None = None, **train: Any) -> Path:
        content = {
            "run": {"name": name, "root": str(root / "runs"), "device": "cpu", "threads": 1},
            "model": {"kind": "huggingface", **model},
            "data": {
                "source": {"kind": "jsonl", "paths": [str(root / "text.jsonl")]},
                "row_length": 64,
                "cache": str(root / "cache"),
                "valid_fraction": 0.1,
                "dedup": {"near_duplicates": False},
                **({} if tokenizer is None else {"tokenizer": {"path": tokenizer}}),
            },
            "train": {
                "steps": 4,
                "batch_rows": 4,
                "micro_batch_rows": 2,
                "learning_rate": 1e-2,
                "precision": "fp32",
                "evaluate_every": 2,
                "checkpoint_every": 2,
                **train,
            },
        }
        path = root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return make


@pytest.fixture(scope="module")
def finished(write: Write) -> RunFolder:
    """A run from random weights, with rows of the embedding that have no token."""
    return RunFolder(cdrmix.train(Config.from_yaml(write("first", {"random": LLAMA, "vocab": {"pad_to": 64}}))))


def test_transformers_alone_gives_the_held_out_figures_of_the_export(finished: RunFolder) -> None:
    config = Config.from_yaml(finished.config_snapshot)
    model, report = AutoModelForCausalLM.from_pretrained(
        finished.export, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.get_input_embeddings().num_embeddings == 300  # without padding
    shards = prepare(config, say=lambda line: None)
    nats, text_bytes = 0.0, shards.valid.text_bytes
    for batch in EvalLoader(shards.valid, config.data.row_length, 2):
        ids, targets, weights = (x.flatten() for x in (batch.ids_BT, batch.targets_BT, batch.weights_BT))
        for start, end in pairwise(batch.cu_seqlens_N.tolist()):  # each document alone
            with torch.no_grad():
                log_probs = model(input_ids=ids[None, start:end]).logits[0].double().log_softmax(-1)
            chosen = log_probs.gather(-1, targets[start:end, None]).squeeze(-1)
            nats -= float((chosen * weights[start:end]).sum())
    ours = finished.summary()["held_out"]["bits_per_byte"]
    assert nats / math.log(2) / text_bytes == pytest.approx(ours, rel=1e-5)


def test_an_export_knows_the_tokens_of_its_tokenizer(finished: RunFolder) -> None:
    loaded = cdrmix.load(finished.export, device="cpu")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((finished.export / name).read_text())["eos_token_id"] == loaded.tokenizer.end_of_text_id
    assert loaded.generate("def ", max_new_tokens=8, temperature=0.0) == cdrmix.load(finished.path).generate(
        "def ", max_new_tokens=8, temperature=0.0
    )
    assert compare(finished.path, finished.path).identical


class StopAt(cdrmix.Callback):
    """Stops the training after a step, as a signal does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_record(self, record: Any) -> bool:
        return bool(record.step == self._step)


@pytest.fixture(scope="module")
def continued(finished: RunFolder, write: Write) -> Callable[[str, str], Config]:
    """The configuration that continues the run in a mode, with its own runs in a folder of this name."""

    def configure(mode: str, runs: str) -> Config:
        model: dict[str, Any] = {"path": str(finished.export)}
        model |= {"lora": {"rank": 2, "dropout": 0.1}} if mode == "lora" else {}
        options = {"activation_checkpointing": mode == "recomputed", "log_every": 1}
        path = write(f"continued-{mode}", model, "model", **options)
        return Config.from_yaml(path, ["run.root=" + str(finished.path.parent / runs)])

    return configure


@pytest.fixture(scope="module")
def whole(continued: Callable[[str, str], Config]) -> Callable[[str], Path]:
    """The run of a mode that was not stopped; the same each time."""
    return functools.cache(lambda mode: cdrmix.train(continued(mode, f"whole-{mode}")))


@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.slow), "recomputed", "lora"])
def test_a_stopped_run_continues_bit_for_bit(
    mode: str, finished: RunFolder, whole: Callable[[str], Path], continued: Callable[[str, str], Config]
) -> None:
    config = continued(mode, f"parts-{mode}")
    with pytest.raises(Preempted):
        cdrmix.train(config, callbacks=[StopAt(3)])
    parts = cdrmix.train(config, resume="auto")
    assert compare(whole(mode), parts).lines[0].startswith("identical")
    before = RunFolder(parts).summary()["held_out_before"]["bits_per_byte"]
    assert before == pytest.approx(finished.summary()["held_out"]["bits_per_byte"], rel=1e-6)


def test_recomputed_activations_change_no_weight(whole: Callable[[str], Path]) -> None:
    checkpoints = [whole(mode) / "checkpoints" / "step-00000004" for mode in ("full", "recomputed")]
    weights = [load_file(checkpoint / "model.safetensors") for checkpoint in checkpoints]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_model_is_made_first_if_its_folder_does_not_exist(finished: RunFolder, write: Write, tmp_path: Path) -> None:
    base = write("base", {"random": LLAMA}, steps=1)
    model = {"path": str(tmp_path / "made"), "made_by": str(base)}
    path = write("on-base", model, "model", steps=1)
    assert main(["validate", "--config", str(path)]) == 0
    (tmp_path / ".made.999999999.tmp").mkdir()  # of a process that was killed
    assert main(["train", "--config", str(path)]) == 0
    assert (tmp_path / "made" / "model.safetensors").is_file()
    assert not list(tmp_path.glob(".made.*"))
    before = (tmp_path / "made" / "model.safetensors").stat().st_mtime_ns
    assert main(["train", "--config", str(path)]) == 0  # it is not made again
    assert (tmp_path / "made" / "model.safetensors").stat().st_mtime_ns == before


def test_a_trained_model_does_not_need_the_folder_that_it_was_continued_from(
    finished: RunFolder, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Path(shutil.copytree(finished.export, tmp_path / "base"))
    run = RunFolder(cdrmix.train(Config.from_yaml(write("continued", {"path": str(base)}, "model", steps=1))))
    shutil.rmtree(base)
    _vocab_size.cache_clear()  # as in another process
    wanted = run.summary()["held_out"]
    capsys.readouterr()
    for model in (run.path, shutil.copytree(run.export, tmp_path / "moved")):
        assert main(["eval", "--json", "--model", str(model)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["bits_per_byte"] == pytest.approx(wanted["bits_per_byte"], rel=1e-6)


def copied(run: RunFolder, folder: Path) -> Path:
    """A copy of the export of a run, whose files may be changed."""
    export = Path(shutil.copytree(run.export, folder / "model"))
    for path in export.iterdir():
        path.chmod(0o644)
    return export


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def unknown_architecture(folder: Path) -> None:
    described = json.loads((folder / "config.json").read_text())
    described |= {"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "modeling_novel.Novel"}}
    (folder / "config.json").write_text(json.dumps(described))


def missing_part(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def wrong_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"nowhere": "part.safetensors"}}))


def index_without_metadata(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(names, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def wider(folder: Path) -> None:
    described = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 96}
    (folder / "config.json").write_text(json.dumps(described))


def described(folder: Path, **sizes: object) -> None:
    """A description of another model than that of the files."""
    content = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(content))


def of_integers(folder: Path) -> None:
    """Integers without their scales, and no description of a quantization."""
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# Sizes that no file of this length holds: they are compared before memory is allocated, and before layers are made.
NOT_HELD: dict[str, tuple[Callable[[Path], None], str]] = {
    "layers": (
        functools.partial(described, num_hidden_layers=500_000),
        "describes 500,000 layers, and the weights are",
    ),
    "width": (functools.partial(described, hidden_size=1 << 20), "32]"),
    "overflow": (functools.partial(described, intermediate_size=1 << 62), "describes no model that can be made"),
    "no heads": (functools.partial(described, num_attention_heads=0), "integer modulo by zero"),
    "types": (of_integers, "has model.norm.weight with the type"),
}


def lacks_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def not_a_number(folder: Path) -> None:
    """In one row of the embedding, whose token may be rare."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][299, 3] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def own_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_off(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def smaller_vocabulary(folder: Path) -> None:
    described = json.loads((folder / "config.json").read_text()) | {"vocab_size": 280}
    (folder / "config.json").write_text(json.dumps(described))


def list_of_nothing(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "message", "code"),
    [
        (only_pickled, "has only pickled weights (pytorch_model.bin), which can run code", 2),
        (unknown_architecture, "has no architecture 'novel'. It has code of its own (auto_map), which is never run", 2),
        (missing_part, "lacks 1 of 1 files of its index, the first is model-00001-of-00002.safetensors", 2),
        (wrong_index, "says that part.safetensors has nowhere, but it has not: the index is wrong", 2),
        (index_without_metadata, 'lacks what transformers reads: add the key "metadata": {}', 2),
        (wider, "and config.json describes one with [", 2),
        *((*NOT_HELD[name], 2) for name in ("layers", "no heads", "types")),
        (lacks_a_tensor, "lacks 1 tensors of its architecture, the first is model.norm.weight", 2),
        (not_a_number, "tensors with values that are NaN or infinite, the first is model.embed_tokens.weight", 2),
        (own_head, "is not the embedding, and config.json says that it is (tie_word_embeddings: true)", 2),
        (cut_off, "is not a whole safetensors file", 2),
        (list_of_nothing, "config.json is not a JSON object: it does not describe a model", 2),
        (smaller_vocabulary, "has 300 ids, more than the 280 of the model", 7),
    ],
)
def test_folders_that_are_refused(
    damage: Callable[[Path], None],
    message: str,
    code: int,
    finished: RunFolder,
    write: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copied(finished, tmp_path)
    damage(folder)
    path = write("refused", {"path": str(folder)}, "model")
    assert main(["train", "--config", str(path)]) == code
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", NOT_HELD)
def test_exports_whose_description_is_of_another_model_are_refused(
    name: str, finished: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With hashes that agree, as one who sends such an export writes them."""
    folder = copied(finished, tmp_path)
    (folder / "SHA256SUMS").unlink()
    NOT_HELD[name][0](folder)
    write_sums(folder)
    assert main(["generate", "--model", str(folder)]) == 5
    assert NOT_HELD[name][1] in " ".join(capsys.readouterr().err.split())


def test_tensors_that_the_architecture_has_not_are_told(finished: RunFolder, write: Write, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"model.surplus.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    config = Config.from_yaml(write("surplus", {"path": str(folder)}, "model"))
    with pytest.warns(CdrmixWarning, match="1 tensors of .*, the first is model.surplus.weight"):
        base_model(config)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"path": "models/not-there"}, "there is no folder models/not-there"),
        (
            {"path": __file__, "made_by": str(Path(__file__).parents[2] / "configs" / "cpt-tiny-base.yaml")},
            "is a file; name a folder",
        ),
        ({"random": {"hidden_size": 32, "vocab_size": 300}}, "name the architecture as model_type"),
        ({"random": {**LLAMA, "model_type": "lama"}}, "transformers cannot make lama of these keys"),
        ({"random": {**LLAMA, "hidden_size": "wide"}}, "expected int, got str"),
        ({"random": {**LLAMA, "model_type": "bert"}}, "bert"),
        ({"random": LLAMA, "path": "models/both"}, "one of the two"),
    ],
)
def test_sections_that_are_refused(
    model: dict[str, Any], message: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", str(write("refused", model))]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_commands_of_cdrmix_models_name_the_kind(finished: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reason", "demo", "--model", str(finished.path)]) == 2
    assert "works only with models of cdrmix" in capsys.readouterr().err
    assert main(["export", "--model", str(finished.path), "--rwkv", "model.pth"]) == 2
    assert "works only with model.kind: cdrmix" in capsys.readouterr().err


def test_the_balancing_loss_of_a_router_is_that_of_transformers() -> None:
    """Even probabilities give top_k: each of the experts has the share top_k / experts of the tokens."""
    logits = [torch.randn(24, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    found = _Experts(top_k=2, weight=0.1).statistics([*logits, torch.zeros(24, 5)])
    assert found is not None
    assert found.tokens_per_expert_LE.sum(1).tolist() == [48] * 3
    expected = [load_balancing_loss_func((each,), num_experts=5, top_k=2) for each in logits]
    # float32: means of 24 values and a sum of 5
    torch.testing.assert_close(found.load_balance_L, torch.stack([*expected, torch.tensor(2.0)]), rtol=1e-5, atol=0)


def test_a_router_of_transformers_does_not_count_filling() -> None:
    generator, experts = torch.Generator().manual_seed(0), _Experts(top_k=2, weight=0.1)
    logits, tokens = torch.randn(2, 24, 5, generator=generator), torch.tensor([0, 1, 2, 12, 13, 14, 15])
    found, alone = experts.statistics([*logits], tokens), experts.statistics([*logits[:, tokens]])
    assert found is not None
    assert alone is not None
    assert all(map(torch.equal, found, alone))
    assert found.tokens_per_expert_LE.sum(1).tolist() == [14, 14]
    assert experts.statistics([*logits], tokens[:0]) is None
