"""Tests of exporting a model, reading models back, comparing them and letting them write."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from in_process import main
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cdrmix import runtime
from cdrmix.compare import compare
from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import Phases
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import CheckpointError, ConfigError, ExportMismatchError, VocabularyError
from cdrmix.hf import export, load
from cdrmix.hf.card import STAGE_A_ONLY, model_card
from cdrmix.hf.export import export_model, exported_step
from cdrmix.inference.checkpoints import FORMAT
from cdrmix.inference.generate import Row, decode, generate
from cdrmix.inference.load import load_exported, load_model, verify
from cdrmix.inference.sampling import Sampling, draw
from cdrmix.inference.text_model import TextModel
from cdrmix.model.language_model import LanguageModel
from cdrmix.records import StepRecord
from cdrmix.run_folder import RunFolder

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = CONFIGS / "base" / "tiny.yaml"
TOY = (
    "model.vocab_size=300",
    "model.d_model=32",
    "model.layers=2",
    "model.attention_fraction=0.5",
    "model.attention.heads=1",
    "model.attention.kv_heads=1",
    "model.feed_forward.hidden=16",
    "data.row_length=32",
)
EVERY_MIXER = ("model.layers=4", "model.mixer_layers={mamba2: [0], routing_mamba: [3]}", "model.mamba.head_dim=32")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.from_yaml(TINY, [f"run.root={tmp_path / 'experiments'}", *TOY])


def save_checkpoint(
    folder: Path, step: int, weights: dict[str, torch.Tensor], average: dict[str, torch.Tensor] | None = None
) -> Path:
    """A checkpoint as training leaves it, of weights alone, and their running average if there is one."""
    checkpoint = folder / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    entries = {}
    for name, tensors in (("model.safetensors", weights), ("ema.safetensors", average)):
        if tensors is not None:
            file = checkpoint / name
            save_file(tensors, file)
            entries[name] = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    manifest = {"format": FORMAT, "step": step, "periodic": True, "files": entries}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


def make_run(config: Config, *, seed: int = 1, step: int = 20) -> RunFolder:
    run = RunFolder.create(config)
    text = ["def f(x):\n    return x\n", "für größere Öfen, naïve café 🐍\n"] * 20
    tokenizer = TextTokenizer.train(text, vocab_size=config.model.vocab_size, end_of_text="<|endoftext|>")
    run.tokenizer.write_bytes(tokenizer.json_bytes)
    torch.manual_seed(seed)
    save_checkpoint(run.checkpoints, step, dict(LanguageModel(config.model).state_dict()))
    return run


@pytest.fixture
def run(config: Config) -> RunFolder:
    return make_run(config)


def test_an_export_is_whole_read_only_and_removable(run: RunFolder, tmp_path: Path) -> None:
    loaded = load_model(run.path)
    figures = {"tokens": 10, "text_bytes": 30, "bits_per_byte": 1.5, "perplexity": 9.0}
    figures |= {"unigram_bits_per_byte": 3.0, "gzip9_bits_per_byte": 2.5, "zstd19_bits_per_byte": 2.25}
    summary = {"held_out": figures, "held_out_step": 20}
    target = export_model(loaded, tmp_path / "export", summary=summary, held_out_row=[5, 6, 7])
    files = {path.name for path in target.iterdir()}
    assert files == {
        "model.safetensors",
        "tokenizer_cdrmix.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
        "configuration_cdrmix.py",
        "modeling_cdrmix.py",
        "config_snapshot.yaml",
        "README.md",
        "SHA256SUMS",
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in target.iterdir())
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=target, check=False).returncode == 0
    card = (target / "README.md").read_text()
    for figure in ("1.5000", "3.0000", "2.5000", "2.2500"):
        assert figure in card
    assert "1.5000" not in model_card(loaded.config, 10, 1000, summary)  # of another step than the model's
    again = load_exported(target)
    assert (again.step, again.config) == (20, loaded.config)
    assert compare(run.path, target).identical
    assert [path.name for path in tmp_path.glob(".export*")] == []
    with pytest.raises(ConfigError, match="never overwritten"):
        export_model(loaded, target)
    shutil.rmtree(target)


def test_a_large_export_is_cut_into_shards_with_an_index(run: RunFolder, tmp_path: Path) -> None:
    loaded = load_model(run.path)
    target = export_model(loaded, tmp_path / "export", shard_bytes=40_000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    weights = loaded.model.state_dict()
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(target / file)[name], weights[name])
    assert compare(run.path, target).identical


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config_snapshot.yaml", "SHA256SUMS"])
def test_an_altered_or_missing_file_is_refused(run: RunFolder, tmp_path: Path, name: str) -> None:
    target = export_model(load_model(run.path), tmp_path / "export")
    (target / name).chmod(0o644)
    content = bytearray((target / name).read_bytes())
    content[len(content) // 2] ^= 1
    (target / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"altered|malformed|missing") as caught:
        load_model(target)
    assert caught.value.exit_code == 5
    (target / name).unlink()
    with pytest.raises(CheckpointError):
        load_exported(target)


def test_a_sum_file_cannot_point_outside_its_folder(run: RunFolder, tmp_path: Path) -> None:
    target = export_model(load_model(run.path), tmp_path / "export")
    sums = target / "SHA256SUMS"
    sums.chmod(0o644)
    sums.write_text(sums.read_text() + f"{'0' * 64}  ../other\n")
    with pytest.raises(CheckpointError, match="malformed"):
        verify(target)


def test_an_export_that_reads_back_differently_leaves_nothing(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(path: Path) -> export.Loaded:
        loaded = load_exported(path)
        with torch.no_grad():
            loaded.model.embedding.weight[7, 3] += 1e-3
        return loaded

    monkeypatch.setattr(export, "load_exported", forgetful)
    with pytest.raises(ExportMismatchError, match="other logits"):
        export_model(load_model(run.path), tmp_path / "export")
    assert not (tmp_path / "export").exists()
    assert list(tmp_path.glob(".export*")) == []


def test_an_export_is_replaced_only_on_demand(run: RunFolder, tmp_path: Path) -> None:
    target = export_model(load_model(run.path), tmp_path / "export")
    assert exported_step(target) == 20
    save_checkpoint(run.checkpoints, 30, dict(load_model(run.path).model.state_dict()))
    with pytest.raises(ConfigError, match="never overwritten"):
        export_model(load_model(run.path), target)
    export_model(load_model(run.path), target, replace=True)
    assert (exported_step(target), load_exported(target).step) == (30, 30)
    (target / "config.json").unlink()
    assert exported_step(target) is None


@pytest.mark.parametrize(
    "full", [SafetensorError("I/O error: No space left on device (os error 28)"), OSError(errno.ENOSPC, "full")]
)
def test_a_full_disk_leaves_nothing_and_has_its_exit_code(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(tensors: object, path: Path, metadata: object = None) -> None:
        path.write_bytes(b"the beginning")
        raise full

    monkeypatch.setattr(export, "save_file", save)
    assert main(["export", "--model", str(run.path), "--out", str(tmp_path / "export")]) == 6
    error = capsys.readouterr().err
    assert f"the export {tmp_path / 'export'} could not be written" in error
    assert "Traceback" not in error
    assert list(tmp_path.glob("*export*")) == []


def test_only_what_is_read_of_a_checkpoint_is_verified(run: RunFolder) -> None:
    checkpoint = run.checkpoints / "step-00000020"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["optimizer-rank0.safetensors"] = {"bytes": 1, "sha256": "0" * 64}  # and is not there at all
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert load_model(run.path).step == 20
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"no complete checkpoint.*is corrupt"):
        load_model(run.path)


def test_a_model_is_put_where_it_is_to_run(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(run.path, torch.device("meta"))
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"meta"}
    monkeypatch.setattr(load, "work_alone", lambda config, wanted: torch.device({"cuda": "meta"}[wanted]))
    assert next(load.load_alone(run.path, "cuda").model.parameters()).is_meta


def test_commands_run_where_and_as_the_configuration_says(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(config.model_copy(update={"run": config.run.model_copy(update={"threads": 3, "device": "cuda"})}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["generate", "--model", str(run.path), "--max-new-tokens", "1"]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "run.device is cuda, but PyTorch finds no GPU on this machine" in message
    assert "or set run.device (or the option --device) to auto or cpu" in message
    threads: list[int] = []
    monkeypatch.setattr(runtime, "set_num_threads", threads.append)
    assert main([*arguments, "--device", "cpu"]) == 0
    assert set(threads) == {3}


@pytest.mark.parametrize(
    "command",
    [["eval"], ["eval", "--tasks", "recall"], ["generate"], ["reason", "demo"]],
    ids=["eval", "eval-tasks", "generate", "demo"],
)
def test_the_message_about_a_missing_gpu_names_what_the_user_set(
    command: list[str], run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*command, "--model", str(run.path), "--device", "cuda"]) == 2
    message = capsys.readouterr().err
    assert "--device is cuda, but PyTorch finds no GPU on this machine" in message
    assert "or set --device to auto or cpu" in message
    assert "run.device" not in message
    with pytest.raises(ConfigError, match=r"device is cuda, .*or set device to auto or cpu") as error:
        load.load_alone(run.path, "cuda")
    assert "run.device" not in str(error.value)


def test_the_card_of_a_reasoning_model_says_what_was_trained(config: Config) -> None:
    reasoning = CONFIGS / "cdrmix-reason-1b.yaml"
    without_phases = Config.from_yaml(reasoning, [f"reasoning.phases.{name}.steps=0" for name, _ in Phases()])
    assert STAGE_A_ONLY in model_card(without_phases, 1, 1, {})
    assert STAGE_A_ONLY not in model_card(Config.from_yaml(reasoning), 1, 1, {})
    assert STAGE_A_ONLY not in model_card(config, 1, 1, {})


def test_a_pure_rwkv7_is_exported_for_the_rwkv_package(
    tmp_path: Path, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    pure = ["model.attention_fraction=0.0", "model.feed_forward.kind=channel_mix", "model.tie_embeddings=false"]
    other = make_run(Config.from_yaml(TINY, [f"run.root={tmp_path / 'pure'}", *TOY, *pure]))
    out = tmp_path / "model.pth"
    assert main(["export", "--model", str(other.path), "--rwkv", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    official = torch.load(out, weights_only=True)
    assert torch.equal(official["emb.weight"], load_model(other.path).model.embedding.weight)
    assert official["blocks.0.att.x_r"].shape == (1, 1, 32)
    for arguments, status, reasons in (
        ([str(run.path), "--rwkv", str(tmp_path / "a.pth")], 2, ("attention_fraction", "feed_forward.kind")),
        ([str(other.path), "--rwkv", str(out)], 2, ("exists",)),
        ([str(other.path), "--rwkv", str(tmp_path / "a.pt")], 2, (".pth",)),
    ):
        assert main(["export", "--model", *arguments]) == status
        error = capsys.readouterr().err
        for reason in reasons:
            assert reason in error
    assert list(tmp_path.glob("*.pt*")) == [out]


def test_what_is_no_model_is_refused_with_a_reason(config: Config, run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        load_model(tmp_path)
    empty = RunFolder.create(config)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_model(empty.path)
    weights = dict(LanguageModel(config.model).state_dict())
    del weights["final_norm.weight"]
    save_checkpoint(run.checkpoints, 30, weights)
    with pytest.raises(CheckpointError, match=r"does not match the configuration.*final_norm\.weight"):
        load_model(run.path)


def test_a_tokenizer_larger_than_the_model_is_refused(config: Config, run: RunFolder) -> None:
    text = ["abc def ghi jkl mno pqr " + chr(200 + number) * 3 for number in range(200)]
    run.tokenizer.write_bytes(TextTokenizer.train(text, vocab_size=400, end_of_text="<|endoftext|>").json_bytes)
    with pytest.raises(VocabularyError, match="300"):
        load_model(run.path)


def test_compare_says_where_runs_first_differ(config: Config) -> None:
    run_a, run_b = make_run(config), make_run(config)
    verdict = compare(run_a.path, run_b.path)
    assert verdict.identical
    assert verdict.lines[0].startswith("identical: ")
    assert verdict.lines[0].endswith("step 20")
    weights = dict(LanguageModel(config.model).state_dict())
    weights |= load_model(run_a.path).model.state_dict()
    changed = weights["blocks.1.feed_forward.w_up"].clone()
    changed[2, 3, 5] += 0.25
    shutil.rmtree(run_b.checkpoints)
    save_checkpoint(run_b.checkpoints, 20, weights | {"blocks.1.feed_forward.w_up": changed})
    for run, loss in ((run_a, 2.5), (run_b, 2.75)):
        figures = {field.name: 1 for field in dataclasses.fields(StepRecord)[:12]}
        rows = [figures | {"step": 1, "loss": 6.0}, figures | {"step": 10, "loss": loss}]
        run.metrics_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = compare(run_a.path, run_b.path)
    assert not verdict.identical
    text = "\n".join(verdict.lines)
    for part in ("blocks.1.feed_forward.w_up", "[2, 3, 5]", "1 of its", "0.25", "step 10"):
        assert part in text


def test_compare_takes_the_average_for_what_a_run_exports(config: Config, tmp_path: Path) -> None:
    config = config.model_copy(update={"train": config.train.model_copy(update={"ema_decay": 0.9})})
    run_a, run_b = make_run(config), make_run(config)
    weights = dict(LanguageModel(config.model).state_dict())
    average = {name: tensor + 1 for name, tensor in weights.items()}
    for run in (run_a, run_b):
        save_checkpoint(run.checkpoints, 30, weights, average)
    exported = export_model(load_model(run_a.path), tmp_path / "export")
    assert compare(run_a.path, exported).identical
    assert compare(exported, run_b.path).identical
    assert compare(run_a.path, run_b.path).identical
    shutil.rmtree(run_b.checkpoints)
    save_checkpoint(run_b.checkpoints, 30, weights, average | {"final_norm.bias": average["final_norm.bias"] + 1})
    assert not compare(exported, run_b.path).identical
    verdict = compare(run_a.path, run_b.path)
    assert not verdict.identical
    assert "of the running averages, 1 of" in "\n".join(verdict.lines)
    shutil.rmtree(run_b.checkpoints)
    save_checkpoint(run_b.checkpoints, 30, weights | {"final_norm.bias": weights["final_norm.bias"] + 1}, average)
    assert compare(exported, run_b.path).identical
    assert not compare(run_a.path, run_b.path).identical


def test_compare_is_about_bits_not_values(config: Config) -> None:
    run_a, run_b = make_run(config), make_run(config)
    weights = load_model(run_a.path).model.state_dict()
    name = "final_norm.weight"
    for run, value in ((run_a, 0.0), (run_b, -0.0)):
        shutil.rmtree(run.checkpoints)
        altered = weights[name].clone()
        altered[4] = value
        save_checkpoint(run.checkpoints, 20, dict(weights) | {name: altered})
    assert not compare(run_a.path, run_b.path).identical
    nan = weights[name].clone()
    nan[4] = float("nan")
    for run in (run_a, run_b):
        shutil.rmtree(run.checkpoints)
        save_checkpoint(run.checkpoints, 20, dict(weights) | {name: nan})
    assert compare(run_a.path, run_b.path).identical
    save_checkpoint(run_b.checkpoints, 21, dict(weights) | {name: nan})
    assert "steps differ" in "\n".join(compare(run_a.path, run_b.path).lines)


@pytest.mark.parametrize("overrides", [(), EVERY_MIXER])
def test_generation_repeats_for_a_seed_and_equals_the_full_forward_pass(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run = make_run(Config.from_yaml(TINY, [f"run.root={tmp_path / 'experiments'}", *TOY, *overrides]))
    loaded = load_exported(export_model(load_model(run.path), tmp_path / "export"))
    card = (tmp_path / "export" / "README.md").read_text()
    assert ("1 RWKV-7, 1 attention, 1 Mamba-2, 1 Routing-Mamba" in card) == bool(overrides)
    assert ("tags: [cdrmix, custom_code, rwkv7, attention, mamba2, routing-mamba, mixture-of-experts]" in card) == bool(
        overrides
    )
    model = TextModel(loaded)
    texts = [model.generate("def ", temperature=0.9, max_new_tokens=20, seed=seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    # Greedy decoding on the carried state takes the tokens that whole forward passes would take.
    ids = loaded.tokenizer.encode("def f")
    for _, token in decode(loaded.model, [Row(list(ids), Sampling(temperature=0, max_new_tokens=12))]):
        hidden = loaded.model(torch.tensor([ids])).hidden_BTD
        assert token == int(loaded.model.logits(hidden[:, -1]).argmax())
        ids = [*ids, token]


class Scripted:
    """A tokenizer of single bytes, 256 being end of text."""

    end_of_text_id = first_id = 256
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int, *, begins: bool = False) -> bytes:
        return bytes([token] if token < 256 else [])


def test_characters_that_span_tokens_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def scripted(model: object, rows: list[Row], vocabulary: int) -> Iterator[tuple[int, int]]:
        seen.append(rows[0].ids)
        for token in [*"é🐍".encode(), 0xC3, ord("x"), 0xE2, 256, ord("n")]:
            if not rows[0].ended:
                yield 0, token

    monkeypatch.setattr("cdrmix.inference.generate.decode", scripted)
    pieces = [piece for _, piece in generate(None, Scripted(), [""], [Sampling()])]  # type: ignore[arg-type]
    assert pieces == ["é", "🐍", "\ufffdx", "\ufffd"]  # it stops at end of text, and closes the cut character
    assert seen == [[256]]  # an empty prompt begins a new document


def test_the_prompt_s_last_space_is_left_to_the_first_token(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are tokens that begin with their space; after a lone space token a model has seen next to nothing."""
    loaded = load_model(run.path)
    for allowed in ([5, 9], [7]):
        assert next(decode(loaded.model, [Row([1, 2], Sampling(seed=2), allowed)]))[1] in allowed
    seen = []

    def scripted(model: object, rows: list[Row], vocabulary: int) -> Iterator[tuple[int, int]]:
        seen.append((bytes(rows[0].ids[1:]), list(rows[0].first)))
        for rows[0].drawn, token in enumerate([ord(" "), ord("f"), 256], 1):
            yield 0, token

    monkeypatch.setattr("cdrmix.inference.generate.decode", scripted)
    pieces = {
        text: "".join(piece for _, piece in generate(None, Scripted(), [text], [Sampling()]))  # type: ignore[arg-type]
        for text in ("def ", "def", " ")
    }
    assert pieces == {"def ": "f", "def": " f", " ": " f"}  # the prompt itself is printed with its space
    assert seen == [(b"def", [ord(" ")]), (b"def", []), (b" ", [])]


def test_drawing_obeys_temperature_top_k_and_top_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))

    def counts(sampling: Sampling, draws: int = 4000) -> list[float]:
        found = torch.tensor(
            draw(logits.expand(draws, -1), [Row([0], replace(sampling, seed=n)) for n in range(draws)])
        )
        return (torch.bincount(found, minlength=4) / draws).tolist()

    sigma = (0.25 / 4000) ** 0.5  # of a frequency, at most
    assert counts(Sampling(temperature=0, top_p=1.0), 10) == [1, 0, 0, 0]
    assert counts(Sampling(temperature=1, top_p=1.0)) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=4 * sigma)
    assert counts(Sampling(temperature=1, top_p=1.0, top_k=2)) == pytest.approx([0.625, 0.375, 0, 0], abs=4 * sigma)
    assert counts(Sampling(temperature=1, top_p=0.6)) == pytest.approx([0.625, 0.375, 0, 0], abs=4 * sigma)
    assert counts(Sampling(temperature=1, top_p=1e-9), 10) == [1, 0, 0, 0]
    assert counts(Sampling(temperature=1e-320, top_p=1.0), 10) == [1, 0, 0, 0]
    sharp = [0.25, 0.09, 0.0225, 0.0025]
    expected = [weight / sum(sharp) for weight in sharp]
    assert counts(Sampling(temperature=0.5, top_p=1.0)) == pytest.approx(expected, abs=4 * sigma)
    assert counts(Sampling(temperature=1, top_p=1.0, min_p=0.5)) == pytest.approx([0.625, 0.375, 0, 0], abs=4 * sigma)


def test_rows_with_other_sampling_do_not_change_what_a_row_draws() -> None:
    logits_BV = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    kinds = [{}, {"temperature": 0.0}, {"top_k": 3}, {"min_p": 0.1}, {"repetition_penalty": 1.5}, {"top_p": 0.4}]
    samplings = [Sampling(**{"temperature": 1.0, "top_p": 1.0, "seed": 3} | kind) for kind in kinds]  # type: ignore[arg-type]
    rows = lambda: [Row([7, 9], sampling) for sampling in samplings]  # noqa: E731
    together = draw(logits_BV, rows())
    assert together == [draw(logits_BV[n : n + 1], [row])[0] for n, row in enumerate(rows())]
    assert draw(logits_BV, [Row([7], sampling, first=[41]) for sampling in samplings]) == [41] * 6


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": 0}],
)
def test_sampling_out_of_range_is_a_configuration_error(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Sampling(**wrong)  # type: ignore[arg-type]
