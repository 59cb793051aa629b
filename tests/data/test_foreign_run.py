"""A run with the tokenizer of another model: training, generation, evaluation and export begin a document alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from in_process import main

import cdrmix
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.inference import generate as generate_module
from cdrmix.inference.sampling import Sampling
from cdrmix.run_folder import RunFolder

TINY = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"
TOY = (
    "run.threads=1",
    "model.vocab_size=600",
    "model.d_model=32",
    "model.layers=1",
    "model.attention_fraction=0",
    "model.attention.heads=1",
    "model.attention.kv_heads=1",
    "model.feed_forward.hidden=16",
    "data.row_length=32",
    "data.valid_fraction=0.25",
    "train.steps=2",
    "train.batch_rows=2",
    "train.micro_batch_rows=1",
    "train.warmup_steps=0",
    "data.tokenizer.lossless=false",
)


def test_generated_text_streams(foreign: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt begins with the first id of the tokenizer. The pieces of a continuation are the text, after a prompt and
    after an empty one."""
    tokenizer = TextTokenizer.load(foreign[kind].folder, lossless=False)
    text = "Anna reads 1 letters of naïve people"
    begun = tokenizer.encode(text)
    written = tokenizer.decode(begun)
    prompts: list[list[int]] = []

    def scripted(model: Any, rows: Any, vocabulary: int) -> Iterator[tuple[int, int]]:
        assert vocabulary == tokenizer.vocab_size
        for number, row in enumerate(rows):
            prompts.append([*row.ids])
            for token in [*begun[len(row.ids) - 1 :], tokenizer.end_of_text_id]:
                row.drawn += 1
                yield number, token

    monkeypatch.setattr(generate_module, "decode", scripted)
    for prompt in ("", "Anna", "Anna reads 1"):
        ids = tokenizer.encode(prompt)
        if begun[: len(ids)] != ids:
            continue  # the tokens of the text do not end where the prompt ends
        prompts.clear()
        pieces = generate_module.generate(cast(Any, None), tokenizer, [prompt], [Sampling(max_new_tokens=99)])
        continuation = "".join(piece for _, piece in pieces)
        assert prompts == [[tokenizer.first_id, *ids]]
        assert tokenizer.decode(ids) + continuation == written


@pytest.mark.parametrize(("end_of_text", "begin_of_text"), [(None, "auto"), ("</s>", "auto"), ("</s>", None)])
def test_a_run_folder_keeps_the_tokenizer(
    tmp_path: Path, foreign: Any, end_of_text: str | None, begin_of_text: str | None
) -> None:
    shards, folder = tmp_path / "shards", tmp_path / "run"
    shards.mkdir()
    folder.mkdir()
    (folder / "config_snapshot.yaml").write_text("")
    run = RunFolder.open(folder)
    tokenizer = TextTokenizer.load(foreign["llama2"].folder, end_of_text, begin_of_text=begin_of_text, lossless=False)
    (shards / "tokenizer.json").write_bytes(tokenizer.json_bytes)
    settings = tokenizer.settings(end_of_text)
    assert (settings is None) == (begin_of_text is None)
    if settings is not None:
        (shards / "tokenizer_settings.json").write_bytes(settings)
    run.keep_tokenizer(shards / "tokenizer.json")
    again = TextTokenizer.load_stored(run.tokenizer, end_of_text, begin_of_text, lossless=False)
    assert (again.begin_of_text, again.end_of_text) == (tokenizer.begin_of_text, "</s>")
    # An older run has no tokenizer_settings.json. Its documents begin with end-of-text, whatever the tokenizer adds.
    (run.path / "tokenizer_settings.json").unlink(missing_ok=True)
    assert TextTokenizer.load_stored(run.tokenizer, "</s>", lossless=False).begin_of_text is None


@pytest.mark.slow
def test_a_run_keeps_what_begins_a_document(
    tmp_path: Path, foreign: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(24):
        (text / f"{number}.txt").write_text(f"Anna reads {number} letters of naïve people\n" * 2 + "e\u0301\n")
    folder = tmp_path / "model"
    shutil.copytree(foreign["llama2"].folder, folder)
    where = [f"run.root={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}", f"data.tokenizer.path={folder}"]
    source = ["data.source.kind=text", f"data.source.paths=[{text}]"]
    assert main(["train", "--config", str(TINY), *TOY, *where, *source]) == 0
    shutil.rmtree(folder)  # the run has its own copy
    (run,) = (tmp_path / "runs").iterdir()
    settings = json.loads((run / "tokenizer_settings.json").read_text())
    assert settings == {"end_of_text": "</s>", "begin_of_text": "<s>"}
    held_out = json.loads((run / "metrics.json").read_text())["held_out"]
    prompts: list[list[int]] = []
    decode = generate_module.decode

    def spy(model: Any, rows: Any, *arguments: Any) -> Any:
        prompts.extend([*row.ids] for row in rows)
        return decode(model, rows, *arguments)

    monkeypatch.setattr(generate_module, "decode", spy)
    for path in (run, run / "export"):
        model = cdrmix.load(path)
        begin = model.tokenizer.special_id("<s>")
        assert (model.tokenizer.first_id, model.tokenizer.end_of_text) == (begin, "</s>")
        prompts.clear()
        assert isinstance(model.generate("Anna", max_new_tokens=3), str)
        assert prompts == [[begin, *model.encode("Anna")]]
        assert model.decode(model.encode("Anna reads")) == "Anna reads"
        capsys.readouterr()
        assert main(["eval", "--model", str(path), "--json", "--config", str(run / "config_snapshot.yaml")]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["text_bytes"] == held_out["text_bytes"]
        assert again["bits_per_byte"] == pytest.approx(held_out["bits_per_byte"], rel=1e-6)
