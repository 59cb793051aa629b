"""Public RWKV-7 weights as a model of cdrmix, against the PyPI package `rwkv` in float32 on the CPU; damaged files."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from in_process import main
from public_rwkv7 import HIDDEN, PACKAGE, VOCABULARY, WIDTH, logits_of_the_package, public_weights, text_of_the_package
from safetensors.torch import save_file
from torch import Tensor

import cdrmix
from cdrmix.errors import CheckpointError
from cdrmix.inference.load import load_model
from cdrmix.inference.rwkv_files import model_in, read_rwkv7
from cdrmix.model.language_model import LanguageModel


@pytest.fixture(scope="module")
def byte_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of single bytes and a few tokens more, for models of 300 ids."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"\xf0\x9f", b"\n\n"]
    path = tmp_path_factory.mktemp("vocabulary") / "rwkv_vocab_small.txt"
    path.write_text("".join(f"{number} {token!r} {len(token)}\n" for number, token in enumerate(tokens, 1)))
    return path


def logits_in_pieces(model: LanguageModel, ids: list[int]) -> Tensor:
    """Logits [T, V] of 17 tokens, then 14, then one at a time, each with the cache of those before."""
    cache, pieces = None, []
    for start, end in [(0, 17), (17, 31), *((t, t + 1) for t in range(31, len(ids)))]:
        output = model(torch.tensor([ids[start:end]]), cache=cache, return_cache=True)
        cache = output.cache
        pieces.append(model.logits(output.hidden_BTD)[0])
    return torch.cat(pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_rwkv_package(dtype: torch.dtype, byte_vocabulary: Path, tmp_path: Path) -> None:
    public = {name: tensor.to(dtype) for name, tensor in public_weights().items()}
    torch.save(public, tmp_path / "public.pth")
    folder = tmp_path / "imported"
    options = ["--tokenizer", str(byte_vocabulary), "--out", str(folder)]
    assert main(["import", str(tmp_path / "public.pth"), *options]) == 0
    ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    whole, split = logits_of_the_package(tmp_path / "public.pth", ids)
    model = cdrmix.load(folder, device="cpu").model
    assert isinstance(model, LanguageModel)
    with torch.no_grad():
        ours = model.logits(model(torch.tensor([ids])).hidden_BTD)[0]
        pieces = logits_in_pieces(model, ids)
    # Both compute in float32 from the same weights, so they differ by rounding: 3 blocks of sums over at most 320
    # products, of relative error 320 * 2^-24 = 2e-5 in the worst case. Measured: 1e-6.
    scale = whole.abs().max()
    assert (ours - whole).abs().max() / scale < 2e-5
    assert (pieces - split).abs().max() / scale < 2e-5
    assert (whole - whole.roll(1, 0)).abs().max() / scale > 0.1, "the logits differ from token to token"


def test_every_tensor_of_the_public_file_matters(tmp_path: Path) -> None:
    """So the comparison above would see a tensor in the wrong place; only block 0 has no use for v0, v1 and v2."""
    public = public_weights(100, layers=2, width=64, hidden=96)
    ids = torch.randint(0, 100, (1, 12), generator=torch.Generator().manual_seed(1))

    def logits(weights: dict[str, Tensor]) -> Tensor:
        torch.save(weights, tmp_path / "public.pth")
        model.load_state_dict(read_rwkv7(tmp_path / "public.pth"))
        with torch.no_grad():
            return model.logits(model(ids).hidden_BTD)

    torch.save(public, tmp_path / "public.pth")
    model = LanguageModel(model_in(tmp_path / "public.pth"))
    before = logits(public)
    unused = {f"blocks.0.att.v{number}" for number in range(3)}
    for name, tensor in public.items():
        # not by a factor, to which the norm of the keys is blind
        changed = logits(public | {name: tensor + 0.3 * torch.linspace(-1, 1, tensor.shape[-1])})
        assert torch.equal(before, changed) == (name in unused), name


@pytest.mark.parametrize("size", [300, pytest.param(65_536, marks=pytest.mark.slow)])
def test_text_is_continued_as_by_the_rwkv_package(size: int, byte_vocabulary: Path, tmp_path: Path) -> None:
    """Greedy, from text to text through both packages; with the World vocabulary too."""
    vocabulary = byte_vocabulary if size == 300 else VOCABULARY
    public = public_weights(size, layers=2, width=64)
    torch.save(public, tmp_path / "public.pth")
    folder = tmp_path / "imported"
    assert main(["import", str(tmp_path / "public.pth"), "--tokenizer", str(vocabulary), "--out", str(folder)]) == 0
    model = cdrmix.load(folder, device="cpu")
    prompt = "The quick brown 狐狸\n\n  x = 1"
    text = model.generate(prompt, temperature=0, max_new_tokens=12)
    wanted = text_of_the_package(tmp_path / "public.pth", vocabulary, prompt, 12)
    assert text == wanted.decode("utf-8", errors="replace")
    assert len(text) > 10
    assert model.config.model.vocab_size == size
    assert "has not trained it" in (folder / "README.md").read_text()


def test_safetensors_are_the_same_and_the_export_gives_the_file_back(byte_vocabulary: Path, tmp_path: Path) -> None:
    public = {name: tensor.bfloat16() for name, tensor in public_weights().items()}
    save_file(public, tmp_path / "public.safetensors")
    # vectors as some converters write them
    flat = {name: tensor.flatten() if tensor.ndim == 3 else tensor for name, tensor in public.items()}
    torch.save(flat, tmp_path / "flat.pth")
    one, two = (read_rwkv7(tmp_path / name) for name in ("public.safetensors", "flat.pth"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    folder, back = tmp_path / "imported", tmp_path / "back.pth"
    options = ["--tokenizer", str(byte_vocabulary), "--out", str(folder)]
    assert main(["import", str(tmp_path / "public.safetensors"), *options]) == 0
    assert main(["export", "--model", str(folder), "--rwkv", str(back)]) == 0
    again = torch.load(back)
    assert public.keys() - again.keys() == {f"blocks.0.att.v{number}" for number in range(3)}
    for name, tensor in again.items():
        assert tensor.shape == public[name].shape, name
        assert torch.equal(tensor, public[name].float()), name


def test_the_imported_folder_opens_in_transformers(byte_vocabulary: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    cdrmix.hf.auto.register()
    torch.save(public_weights(layers=2), tmp_path / "public.pth")
    folder = tmp_path / "imported"
    assert (
        main(["import", str(tmp_path / "public.pth"), "--tokenizer", str(byte_vocabulary), "--out", str(folder)]) == 0
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "the fish \U0001f642 is there\n\n"
    assert tokenizer(text)["input_ids"] == [0, *load_model(folder).tokenizer.encode(text)]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


Change = Callable[[dict[str, Tensor]], object]


def remove(*names: str) -> Change:
    return lambda weights: [weights.pop(name) for name in names]


def put(name: str, change: Callable[[Tensor], object]) -> Change:
    return lambda weights: weights.update({name: change(weights[name])})  # type: ignore[arg-type]


def broken_value(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[5] = torch.inf
    return tensor


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            [
                remove("ln_out.bias", "blocks.2.ffn.key.weight"),
                put("blocks.1.att.w1", lambda tensor: tensor.t().contiguous()),
                put("blocks.2.att.k_k", lambda tensor: tensor[..., :100].contiguous()),
                put("head.weight", broken_value),
                put("blocks.1.att.x_g", lambda tensor: tensor * torch.nan),
                lambda weights: weights.update({"blocks.1.att.gate.weight": torch.ones(3), "extra": torch.ones(1)}),
            ],
            [
                "missing tensors: ln_out.bias, blocks.2.ffn.key.weight\n",
                "tensors that RWKV-7 (x070) has not: blocks.1.att.gate.weight, extra\n",
                f"blocks.1.att.w1 has the shape [8, {WIDTH}]; the others need [{WIDTH}, 8]\n",
                f"blocks.2.att.k_k has the shape [1, 1, 100]; the others need [{WIDTH}]\n",
                "values that are NaN or infinite in blocks.1.att.x_g, head.weight",
            ],
        ),
        ([remove("blocks.0.att.r_k")], ["missing tensors: blocks.0.att.r_k"]),
        ([put("emb.weight", lambda tensor: tensor.to(torch.int8))], ["emb.weight has the type int8"]),
        (
            [put(f"blocks.{layer}.att.r_k", lambda tensor: tensor.reshape(8, 16)[:6]) for layer in range(3)],
            [f"att.r_k has 6 heads of 16 channels, which are not the width {WIDTH}"],
        ),
        (
            [put(f"blocks.{layer}.att.r_k", lambda tensor: tensor.reshape(16, 8)) for layer in range(3)],
            ["att.r_k has heads of 8 channels; allowed: 16, 32, 64, 128"],
        ),
        ([put("ln_out.bias", lambda _: "text")], ["dense tensors alone; it has something else as ln_out.bias"]),
        ([lambda weights: weights.update({"blocks.0.ffn.s_emb.weight": torch.ones(2)})], ["DeepEmbed"]),
        (
            [remove("blocks.0.att.r_k"), lambda w: w.update({"blocks.0.att.time_maa_x": torch.ones(2)})],
            ["is not an RWKV-7 model (x070): it is RWKV-6 (x060)"],
        ),
        (
            [remove("blocks.0.att.r_k"), lambda w: w.update({"blocks.0.att.time_faaaa": torch.ones(2)})],
            ["it is RWKV-5"],
        ),
        ([lambda w: w.clear(), lambda w: w.update({"blocks.0.att.time_first": torch.ones(2)})], ["it is RWKV-4"]),
        ([lambda w: w.clear(), lambda w: w.update({"lm_head.weight": torch.ones(2)})], ["such as lm_head.weight"]),
        (
            [lambda w: w.update({"blocks.999999.att.r_k": torch.ones(2, 64)})],
            ["blocks.3.ln1.weight, ", "tensors that RWKV-7 (x070) has not: blocks.999999.att.r_k\n"],
        ),
    ],
)
def test_one_error_names_everything_that_is_wrong(
    changes: list[Change],
    messages: list[str],
    byte_vocabulary: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = public_weights()
    for change in changes:
        change(weights)
    torch.save(weights, tmp_path / "public.pth")
    folder = tmp_path / "imported"
    options = ["--tokenizer", str(byte_vocabulary), "--out", str(folder)]
    assert main(["import", str(tmp_path / "public.pth"), *options]) == CheckpointError.exit_code
    error = capsys.readouterr().err
    assert str(tmp_path / "public.pth") in error
    for message in messages:
        assert message in error
    assert not folder.exists()


class Harmful:
    """Its pickle runs code when it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("import pathlib; pathlib.Path('harmed').touch()",)


def test_no_code_of_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"emb.weight": Harmful()}, "zipped.pth")
    torch.save({"emb.weight": Harmful()}, "old.pth", _use_new_zipfile_serialization=False)
    Path("plain.pth").write_bytes(pickle.dumps({"emb.weight": Harmful()}, protocol=2))
    for name in ("zipped.pth", "old.pth", "plain.pth"):
        with pytest.raises(CheckpointError, match=rf"{name} is damaged, or is not a file of tensors") as raised:
            read_rwkv7(Path(name))
        assert "weights_only" not in str(raised.value), "no advice to run the code"
        assert "option" not in str(raised.value)
        if name != "plain.pth":
            assert "it asks for exec, and no code of a file is ever run" in str(raised.value)
    assert not Path("harmed").exists()


def test_a_small_file_takes_no_large_memory(tmp_path: Path) -> None:
    """One number as a tensor of any shape, and a compressed part, which torch.save writes never."""
    large, packed = tmp_path / "large.pth", tmp_path / "packed.pth"
    torch.save({name: tensor[:1].flatten()[:1].expand(1 << 40) for name, tensor in public_weights().items()}, large)
    with pytest.raises(CheckpointError, match=r"large\.pth has tensors of [0-9,]+ bytes in [0-9,]+ bytes"):
        read_rwkv7(large)
    torch.save(public_weights(layers=1), large)
    with zipfile.ZipFile(large) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in whole.namelist():
            archive.writestr(part, whole.read(part))
    with pytest.raises(CheckpointError, match=r"packed\.pth is damaged.*is compressed"):
        read_rwkv7(packed)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_damaged_file_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"public{suffix}"
    weights = public_weights(layers=1)
    torch.save(weights, path) if suffix == ".pth" else save_file(weights, path)
    whole = path.read_bytes()
    for length in (0, 10, 1000, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="public"):
            read_rwkv7(path)
    path.write_bytes(b"id: not weights\n" * 100)
    with pytest.raises(CheckpointError, match="public"):
        read_rwkv7(path)


def test_what_the_command_refuses(byte_vocabulary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, folder, larger = tmp_path / "public.pth", tmp_path / "imported", tmp_path / "larger.txt"
    torch.save(public_weights(layers=1), weights)
    pairs = "".join(f"{number} {bytes([97, number - 257])!r} 2\n" for number in range(262, 512))
    larger.write_text(byte_vocabulary.read_text() + pairs)
    for arguments, status, message in (
        ([str(tmp_path / "none.pth"), "--tokenizer", str(byte_vocabulary)], 5, "none.pth does not exist"),
        ([str(PACKAGE), "--tokenizer", str(byte_vocabulary)], 5, "is not a file of weights, .pth or .safetensors"),
        ([str(weights), "--tokenizer", str(larger)], 7, "has 512 tokens, but the vocabulary of"),
        ([str(weights), "--tokenizer", str(tmp_path / "none.txt")], 2, "cannot read"),
    ):
        assert main(["import", *arguments, "--out", str(folder)]) == status
        assert message in capsys.readouterr().err
    assert main(["generate", "--model", str(weights)]) == 5
    assert f"`cdrmix import {weights} --tokenizer FILE --out FOLDER` makes a model" in capsys.readouterr().err
    assert main(["import", str(weights), "--tokenizer", str(byte_vocabulary), "--out", str(folder)]) == 0
    assert main(["import", str(weights), "--tokenizer", str(byte_vocabulary), "--out", str(folder)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert json.loads((folder / "config.json").read_text())["model"]["feed_forward"]["hidden"] == HIDDEN
