"""The Python API as a notebook uses it: import, load, encode, logits, generate, stream."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from short_endings import short_endings as short_endings_of_runs

import cdrmix
from cdrmix.errors import CheckpointError, NonFiniteLogitsError
from cdrmix.eval import leak
from cdrmix.hf import harness_model
from cdrmix.hf.harness_model import Continuation, HarnessModel
from cdrmix.inference import generate as generate_module
from cdrmix.inference import load as load_module
from cdrmix.inference.generate import Row, TextStream, decode
from cdrmix.inference.load import backbone_weights, load_model, load_start
from cdrmix.inference.sampling import Sampling, draw
from cdrmix.kernels.common.products import multiplies_on_one_thread
from cdrmix.model.mixers.base import MIXERS

ROOT = Path(__file__).parents[1]
TOY = [
    *("data.row_length=64", "train.steps=2", "train.batch_rows=2", "train.micro_batch_rows=2", "run.device=cpu"),
    *("model.layers=4", "model.d_model=32", "model.attention={heads: 2, kv_heads: 2}", "model.vocab_size=512"),
    *("model.rwkv={head_size: 16, gate_rank: 8}", "model.feed_forward.hidden=32", "run.threads=1"),
    *("train.checkpoint_every=2", "train.evaluate_every=2", "train.evaluate_rows=2", "train.warmup_steps=0"),
]


@pytest.fixture(scope="module", autouse=True)
def short_endings() -> Iterator[None]:
    with short_endings_of_runs():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> cdrmix.Config:
    """A configuration of a few steps on a small text."""
    folder = tmp_path_factory.mktemp("api")
    text = folder / "text.jsonl"
    lines = [{"text": f"def function_{n}(x):\n    return x + {n}\n" * 3} for n in range(60)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    where = [f"run.root={folder / 'runs'}", f"data.cache={folder / 'cache'}"]
    source = f"data.source={{kind: jsonl, paths: [{text}]}}"
    return cdrmix.Config.from_yaml(ROOT / "configs" / "cdrmix-core-tiny.yaml", [*TOY, *where, source])


class Listener(cdrmix.Callback):
    """Keeps what it is told, and stops the run after a record of step `stop`."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.told = stop, []  # type: tuple[int | None, list[object]]

    def on_step(self, step: int) -> None:
        self.told.append(step)

    def on_record(self, record: Any) -> bool:
        self.told.append(record)
        return record.step == self.stop

    def on_checkpoint(self, checkpoint: Path) -> None:
        self.told.append(checkpoint.name)


@pytest.fixture(scope="module")
def run(config: cdrmix.Config) -> Path:
    """A finished run of a few steps, by the API alone."""
    assert isinstance(config, cdrmix.Config)
    assert cdrmix.prepare(config).train.tokens > 0
    return cdrmix.train(config)


def settings() -> tuple[object, ...]:
    """The settings of this process that a computation of this package changes."""
    flags = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    random_states = random.getstate(), torch.get_rng_state().tolist()
    return torch.get_num_threads(), multiplies_on_one_thread(), *flags, *random_states, dict(os.environ)


@pytest.mark.usefixtures("own_settings")
def test_a_notebook_keeps_its_settings(run: Path) -> None:
    """Also between two pieces of a stream. The configuration gives one thread."""
    torch.set_num_threads(2)
    before = settings()
    model = cdrmix.load(run, device="cpu")
    within: list[tuple[object, ...]] = []
    model.model.register_forward_hook(lambda *_: within.append(settings()[:3]))
    assert settings() == before
    model.logits([1, 2])
    assert settings() == before
    model.generate("def ", max_new_tokens=2)
    for _ in model.stream("def ", cdrmix.Sampling(max_new_tokens=3)):
        assert settings() == before
    assert settings() == before
    assert set(within) == {(1, True, 2)}


@pytest.mark.usefixtures("own_settings")
def test_callbacks_are_told_of_a_run_and_may_stop_it(config: cdrmix.Config) -> None:
    torch.set_num_threads(2)
    before = settings()
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 3})})
    first, second = Listener(stop=1), Listener()
    with pytest.raises(cdrmix.errors.Preempted, match="a callback after step 2 of 3"):
        cdrmix.train(config, callbacks=[first])
    one, record, two, *rest = first.told
    assert (one, two) == (1, 2)
    assert record.step == 1  # type: ignore[attr-defined]
    assert rest[-1] == "step-00000002"
    folder = cdrmix.train(config, resume="auto", callbacks=[second])
    assert [told for told in second.told if isinstance(told, int)] == [3]
    assert second.told[-1] == "step-00000003"
    bits = [told.valid_bits_per_byte for told in second.told if not isinstance(told, int | str)]  # type: ignore[attr-defined]
    assert bits[-1] == json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["valid_bits_per_byte"]
    assert settings() == before
    with pytest.raises(ValueError, match=r"subclasses of cdrmix\.Callback; found \[<function"):
        cdrmix.train(config, callbacks=[python])  # type: ignore[list-item]


def python(code: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_importing_loads_nothing_heavy() -> None:
    found = python(
        "import sys, cdrmix; cdrmix.__version__; dir(cdrmix)\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'yaml', 'deepspeed') if name in sys.modules])"
    )
    assert found.strip() == "[]"


@pytest.mark.slow  # a new interpreter
def test_loading_an_export_needs_no_trainer_and_an_abandoned_stream_leaves_nothing_behind(run: Path) -> None:
    found = python(
        f"import sys, cdrmix; model = cdrmix.load({str(run / 'export')!r}, device='cpu')\n"
        "stream = model.stream('def '); next(stream)\n"
        "print([name for name in sys.modules if name == 'deepspeed' or name.startswith('cdrmix.training')])\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert found.split() == ["[]", "False"]  # importing torch.compile would take 1 s of the first token's time


def test_logits_and_text_of_a_loaded_model(run: Path) -> None:
    model = cdrmix.load(run, device="cpu")
    assert repr(model).startswith("TextModel(cdrmix-core-tiny, step 2")
    ids = model.encode("def function_1(x):")
    assert model.decode(ids) == "def function_1(x):"
    logits = model.logits(ids)
    assert logits.shape == (len(ids), model.config.model.vocab_size)
    assert logits.dtype == torch.float32
    assert torch.equal(model.logits([ids, ids])[1], model.logits(torch.tensor([ids, ids]))[0])
    # The export, the checkpoint and what points to it are the same model.
    assert torch.equal(cdrmix.load(run / "checkpoints" / "latest", device="cpu").logits(ids), logits)
    assert torch.equal(cdrmix.load(run / "export", device="cpu").logits(ids), logits)
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 512\); found 0 to 512"):
        model.logits([0, 512])
    with pytest.raises(ValueError, match=r"rows of the same length"):
        model.logits([[1, 2], [3]])
    with pytest.raises(ValueError, match=r"found torch.float32"):
        model.logits([0.5])
    with pytest.raises(ValueError, match="ids are empty"):
        model.logits(model.encode(""))
    assert torch.equal(model.logits(np.array(ids, np.uint32)), logits)
    with pytest.raises(ValueError, match=r"found -1 to -1"):
        model.decode([-1])
    assert model.decode([]) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": 3}, "prompts must be a string or a list of strings; found 3"),
        ({"prompts": [3]}, "a prompt must be a string; found 3"),
        ({"prompts": "\udcff"}, "a prompt must be UTF-8 text"),
        ({"seed": 1.5}, "seed must be an integer; found 1.5"),
        ({"seed": [1.5]}, "seed must be an integer; found 1.5"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer; found 2.5"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1; found 0"),
        ({"temperature": "0"}, "temperature must be a number; found '0'"),
        ({"stop": [3]}, "stop must be one or several strings that are not empty"),
        ({"stop": ""}, "stop must be one or several strings that are not empty"),
        ({"stop": None}, "stop must be one or several strings that are not empty; found None"),
        ({"temperature": float("inf")}, "temperature must be finite and at least 0; found inf"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_drawn(run: Path, arguments: dict[str, Any], message: str) -> None:
    model = cdrmix.load(run, device="cpu")
    with pytest.raises(ValueError, match=re.escape(message)):
        model.generate(**{"prompts": "def "} | arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.encode(["a"]), "text must be a string; found ['a']"),
        (lambda model: model.decode([1.5]), "ids must be a sequence of integers; found [1.5]"),
        (lambda model: model.decode(5), "ids must be a sequence of integers; found 5"),
        (lambda model: model.stream("a", {"top_k": 3}), "sampling must be a cdrmix.Sampling"),
        (lambda model: model.to("xyz"), "device must be one of auto, cpu, cuda; found 'xyz'"),
        (lambda model: model.to(torch.bfloat16), "device must be one of auto, cpu, cuda; found torch.bfloat16"),
        (lambda model: model.model(torch.zeros(3)), "ids must be an int64 or int32 tensor [B, T]; found torch."),
        (lambda model: model.model([[1]]), "ids must be an int64 or int32 tensor [B, T]; found list"),
        (lambda model: cdrmix.LanguageModel(model.config), "config must be the model section of a Config"),
        (lambda model: cdrmix.prepare(model.config.data), "config must be a cdrmix.Config; found Data"),
        (lambda model: cdrmix.train(model.config, callbacks=Listener()), "callbacks must be a list of objects"),
        (lambda model: cdrmix.load(None), "path must be a string or a Path; found None"),
        (lambda model: cdrmix.Config.from_yaml(None), "path must be a string or a Path; found None"),
        (lambda model: cdrmix.Config.from_yaml("a.yaml", [3]), "overrides must be a list of key.path=value; found [3]"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(run: Path, call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(cdrmix.load(run, device="cpu"))


def test_a_device_without_a_gpu_is_refused_in_plain_words(run: Path) -> None:
    model = cdrmix.load(run, device="cpu")
    assert model.to("cpu").device.type == model.to(torch.device("cpu")).device.type == "cpu"
    if not torch.cuda.is_available():
        for device in ("cuda", torch.device("cuda", 0)):
            with pytest.raises(ValueError, match="device is cuda, but PyTorch finds no GPU"):
                model.to(device)


def test_numbers_of_numpy_are_seeds(run: Path) -> None:
    model = cdrmix.load(run, device="cpu")
    plain = model.generate("def ", max_new_tokens=3, seed=5)
    assert model.generate("def ", max_new_tokens=np.int64(3), seed=np.int64(5)) == plain  # type: ignore[arg-type]
    assert model.generate(["def "], max_new_tokens=3, seed=np.array([5])) == [plain]  # type: ignore[arg-type]


def test_only_tokens_that_the_tokenizer_has_are_drawn(run: Path) -> None:
    model = cdrmix.load(run, device="cpu")
    known = model.tokenizer.vocab_size
    assert known < model.config.model.vocab_size
    rows = [Row([1], Sampling(temperature=50.0, top_p=1.0, max_new_tokens=60))]
    assert max(token for _, token in decode(model.model, rows, known)) < known
    assert max(token for _, token in decode(model.model, [Row([1], rows[0].sampling)])) >= known


def test_names_and_wrong_values_of_the_module(run: Path) -> None:
    assert set(cdrmix.__all__) <= set(dir(cdrmix))
    assert python("import cdrmix; print(cdrmix.errors.ConfigError.__name__)").strip() == "ConfigError"
    with pytest.raises(AttributeError, match="it has Callback, Config, LanguageModel"):
        _ = cdrmix.nothing  # type: ignore[attr-defined]
    for device in ("gpu", "cuda:1", ""):
        with pytest.raises(cdrmix.errors.ConfigError, match="device must be one of auto, cpu, cuda"):
            cdrmix.load(run, device=device)
    with pytest.raises(ValueError, match="overrides must be a list"):
        cdrmix.Config.from_yaml(ROOT / "configs" / "cdrmix-core-tiny.yaml", "train.steps=5")
    with pytest.raises(ValueError, match=r"config must be a cdrmix.Config"):
        cdrmix.train("configs/cdrmix-core-tiny.yaml")  # type: ignore[arg-type]


def test_prompts_of_any_lengths_are_continued_as_each_alone(run: Path) -> None:
    model = cdrmix.load(run, device="cpu")
    prompts = ["def ", "def function", "x", "", "def ", "return x"]
    alone = [model.generate(prompt, max_new_tokens=12, seed=5 + n) for n, prompt in enumerate(prompts)]
    together = model.generate(prompts, max_new_tokens=12, seed=range(5, 11))
    assert together == alone
    assert len(set(alone)) == len(alone)  # seeds are of each row: two prompts are the same
    streamed = ["" for _ in prompts]
    for number, piece in model.stream(prompts, cdrmix.Sampling(max_new_tokens=12), seed=range(5, 11)):
        streamed[number] += piece
    assert streamed == alone
    assert model.generate([]) == []
    samples = model.sample(prompts, 3, cdrmix.Sampling(max_new_tokens=12, seed=5))
    assert [texts[0] for texts in samples] == model.generate(prompts, max_new_tokens=12, seed=5)
    assert samples[1][1] == alone[1]  # its seed is 6
    assert all(len(texts) == 3 for texts in samples)
    (healed,) = model.sample(["def fun"], 20, cdrmix.Sampling(max_new_tokens=1, temperature=5.0, top_p=1.0), heal=True)
    last = model.tokenizer.token_bytes(model.encode("def fun")[-1])
    for text in healed:  # the last token, or one that begins with it
        assert any(model.decode([each]) == last.decode() + text for each in range(model.tokenizer.vocab_size))
    assert "" in healed
    for count in (0, 1.5, True):
        with pytest.raises(ValueError, match="count must be an integer of at least 1"):
            model.sample(prompts, count)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed has 2 numbers for 6 prompts"):
        model.generate(prompts, seed=[1, 2])


def test_rows_end_one_by_one(run: Path) -> None:
    """A row that has ended is computed no more, and the others go on as if it had never been."""
    model = cdrmix.load(run, device="cpu").model
    wanted = [Row([1, 2, 3], Sampling(seed=n, max_new_tokens=9)) for n in range(3)]
    found: list[list[int]] = [[], [], []]
    for number, token in decode(model, wanted):
        found[number].append(token)
    rows = [Row([1, 2, 3], Sampling(seed=n, max_new_tokens=(9, 2, 9)[n])) for n in range(3)]
    got: list[list[int]] = [[], [], []]
    for number, token in decode(model, rows):
        got[number].append(token)
        rows[0].ended = len(got[0]) == 4
    assert got == [found[0][:4], found[1][:2], found[2]]


@pytest.mark.parametrize("cut", range(1, 9))
def test_text_ends_before_a_stop_string_wherever_tokens_are_cut(cut: int) -> None:
    text = b"one\n\ntwo\n\n\nthree"
    stream, pieces = TextStream(("\n\n\n", "never")), []
    for start in range(0, len(text), cut):
        pieces.append(stream.push(text[start : start + cut]))
        if stream.stopped:
            break
    assert "".join(pieces) == "one\n\ntwo"
    assert stream.push(b"more") == ""
    # The match that ends first, though another begins before it.
    stream, text = TextStream(("abcd", "bc")), b"xabcd"
    assert "".join(stream.push(text[start : start + cut]) for start in range(0, len(text), cut)) == "xa"
    stream = TextStream(("\n\n\n",))
    assert [stream.push(b"a\n\n"), stream.push(b"b"), stream.push(b"\n", last=True)] == ["a", "\n\nb", "\n"]


SHORT = {  # the texts of the examples are long and many
    'generate("def ")': 'generate("def ", max_new_tokens=4)',
    'seed=[1, 2], stop="\\n\\n")': 'seed=[1, 2], stop="\\n\\n", max_new_tokens=4)',
    "max_new_tokens=64": "max_new_tokens=4",
    "20, cdrmix.Sampling(seed=1)": "2, cdrmix.Sampling(seed=1, max_new_tokens=4)",
    'stream(["def ", "import "])': 'stream(["def ", "import "], cdrmix.Sampling(max_new_tokens=4))',
}


def test_the_examples_of_the_documentation_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "api.md").read_text()
    snapshot = run / "config_snapshot.yaml"
    # The examples train on the standard library; here on the text of the toy, and its steps.
    text = text.replace("experiments/RUN", str(run)).replace("configs/cdrmix-core-tiny.yaml", str(snapshot))
    text = text.replace("train.steps=100", "train.steps=1").replace("configs/ladder/", f"{ROOT}/configs/ladder/")
    for call, short in SHORT.items():
        assert call in text
        text = text.replace(call, short)
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 8
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MIXERS, "_entries", dict(MIXERS._entries))  # an example registers a mixer
    names: dict[str, Any] = {}  # the examples of a page continue each other
    for example in examples:
        exec(example, names)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_stop_strings_of_a_model(run: Path) -> None:
    model = cdrmix.load(run, device="cpu")
    text = model.generate("def ", max_new_tokens=30, seed=2)
    stop = text[len(text) // 2 :][:2]
    assert model.generate("def ", max_new_tokens=30, seed=2, stop=stop) == text[: text.index(stop)]


def test_drawing_obeys_min_p_and_the_repetition_penalty() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))

    def drawn(sampling: Sampling, seen: list[int]) -> set[int]:
        return set(draw(logits.repeat(400, 1), [Row(seen, replace(sampling, seed=n)) for n in range(400)]))

    assert drawn(Sampling(temperature=1, top_p=1, min_p=0.5), []) == {0, 1}
    assert drawn(Sampling(temperature=1, top_p=1, min_p=0.0), []) == {0, 1, 2, 3}
    # Logits here are negative: tokens that were there are multiplied by the penalty.
    assert drawn(Sampling(temperature=0, repetition_penalty=5.0), [0, 0]) == {1}
    assert draw(torch.tensor([[2.0, 1.5]]), [Row([0], Sampling(temperature=0, repetition_penalty=2.0))]) == [1]


def test_the_token_before_a_prompt_has_no_repetition_penalty(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that ends a text. Where it occurs again, it is of the prompt."""
    penalised = Sampling(temperature=0, repetition_penalty=2.0)
    logits = torch.tensor([[2.0, 1.5]])
    assert draw(logits, [Row([0], penalised, added=1)]) == [0]
    assert draw(logits, [Row([0, 0], penalised, added=1)]) == [1]
    rows: list[Row] = []
    monkeypatch.setattr(generate_module, "decode", lambda model, some, vocabulary: iter(rows.extend(some) or ()))
    model = cdrmix.load(run, device="cpu")
    model.generate("def f", repetition_penalty=2.0)
    harness = HarnessModel(model.model, model.tokenizer, begins=True, max_length=12, batch_size=2, say=print)
    monkeypatch.setattr(harness_model, "decode", generate_module.decode)
    harness.continuations([Continuation(text, Sampling(max_new_tokens=4)) for text in ("def f", "def f(x)" * 20)])
    of_prompt = model.tokenizer.encode("def f")
    assert [row.ids[row.added :] for row in rows[::2]] == [of_prompt, of_prompt]
    assert (len(rows[1].ids), rows[1].added) == (8, 0)  # the beginning was cut off


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"top_p": 1.0}, {"top_k": 2}, {"repetition_penalty": 2.0}]
)
def test_logits_that_are_not_finite_are_an_error(value: float, options: dict[str, Any]) -> None:
    """Minus infinity is a token that cannot be, unless all are."""
    logits = torch.zeros(2, 5)
    logits[1, 3] = value
    rows = [Row([0], Sampling(**options)) for _ in range(2)]
    if value < 0:
        assert draw(logits, rows)[1] != 3
        logits[1] = value
    with pytest.raises(NonFiniteLogitsError, match="gives logits that are NaN or infinite") as caught:
        draw(logits, rows)
    assert caught.value.exit_code == 9


def test_a_model_with_nan_generates_no_text(run: Path) -> None:
    model = cdrmix.load(run, device="cpu")
    with torch.no_grad():
        for parameter in model.model.final_norm.parameters():  # after all routers
            parameter.fill_(float("nan"))
    for options in ({"temperature": 0.0}, {}):
        with pytest.raises(NonFiniteLogitsError):
            model.generate("def f", max_new_tokens=2, **options)
    harness = HarnessModel(model.model, model.tokenizer, begins=True, max_length=64, batch_size=2, say=print)
    with pytest.raises(NonFiniteLogitsError, match="no text can be scored"):
        harness.likelihoods([harness.pair("def f", "(x)")])
    with pytest.raises(NonFiniteLogitsError, match="no text can be scored"):
        leak._matched(model, [[1] * 50])  # type: ignore[arg-type]  # it reads the model and the tokenizer alone


def test_a_training_does_not_start_from_nan(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = load_model(run)
    with torch.no_grad():
        trained.model.embedding.weight[5, 0] = float("inf")
    monkeypatch.setattr(load_module, "load_model", lambda path: trained)
    for start in (load_start, backbone_weights):
        given = trained.tokenizer if start is load_start else run / "tokenizer.json"
        with pytest.raises(CheckpointError, match=r"values that are NaN or infinite, the first is embedding\.weight"):
            start(run, trained.config, given)  # type: ignore[operator]


@pytest.mark.parametrize("vocabulary", [50, 4000])
@pytest.mark.parametrize("options", [{}, {"top_k": 30}, {"min_p": 0.02}, {"top_p": 1.0}, {"top_p": 0.3}])
def test_draws_are_those_of_the_whole_order(vocabulary: int, options: dict[str, Any]) -> None:
    """The token at the point of the row's generator in the distribution, computed here by NumPy for each row alone.

    Peaked and flat rows, so that the nucleus is both smaller and larger than the part that is put in order at first.
    """
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(60, vocabulary, generator=generator) * torch.linspace(0.1, 8, 60).unsqueeze(1)
    logits[:, 7] = logits[:, 3]  # equal ones: the lower id first
    rows = [Row([0], Sampling(temperature=0.9, seed=n, **options)) for n in range(60)]
    found = draw(logits, rows)
    for logits_V, row, token in zip(logits.double().numpy(), rows, found, strict=True):
        sampling, point = row.sampling, torch.Generator().manual_seed(row.sampling.seed)
        kept = np.ones(vocabulary, bool)
        if sampling.top_k:
            kept &= logits_V >= np.sort(logits_V)[-sampling.top_k]
        weights = np.where(kept, np.exp((logits_V - logits_V.max()) / sampling.temperature), 0.0)
        weights /= weights.sum()
        weights[weights < sampling.min_p * weights.max()] = 0.0
        weights /= weights.sum()
        order = np.argsort(-weights, kind="stable") if sampling.top_p < 1 else np.arange(vocabulary)
        cumulative = np.cumsum(weights[order])
        nucleus = np.where(cumulative - weights[order] < sampling.top_p, weights[order], 0.0)
        place = np.searchsorted(
            np.cumsum(nucleus), torch.rand(1, generator=point, dtype=torch.float64).item() * nucleus.sum(), "right"
        )
        assert token == order[place]
