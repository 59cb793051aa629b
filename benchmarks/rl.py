"""Stage B's rollouts: tokens a second compared with TRL's, and the cost of the memory agent's reading by length.

rollouts_*: equal prompts x groups and new tokens, temperature 1, equal numbers of parameters and layers; TRL's
GRPOTrainer generates with transformers (its vLLM needs a GPU). reading: time of a token at 4,096 tokens over that at
256, for the same rows. memory: bytes for reading 65,536 tokens, and how many more than for 4,096, in fresh processes.
plastic, plastic_all: rollouts of cdrmix-reason-tiny with plastic adapters, with chunks of 512 tokens; TRL's; and the
time over that of the same model without adapters, of 64 rows and of one.
adapters: one pass over rows of chunks of 512 tokens, forward and with the gradients of all weights, with the adapters
of cdrmix-reason-1b and with adapters on all its projections; time over that of the same model without adapters.
graphs: rollouts of cdrmix-reason-1b, of one prompt in 1 and in 64 rows, with CUDA graphs and without.
decoding: tokens a second of core-tiny, with random weights, that continues one prompt in 1, 8, 32 and 128 rows.
As a program, `python rl.py TOKENS` prints the bytes by which reading so many tokens raises this process's memory.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from cases import Case, Options, Result, quantiles
from comparison import one_thread, peak_in_fresh_process
from measure import peak_of_process
from torch import nn

from cdrmix.config.schema import Config
from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Model, Rwkv
from cdrmix.inference.generate import Row, decode
from cdrmix.inference.sampling import Sampling
from cdrmix.model import graphs
from cdrmix.model.fast_weights import FastWeightOptions
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.agent.agent import Window, read_episodes
from cdrmix.reason.episodes import Episodes, TokenSource
from cdrmix.reason.rl.rollout import generate
from cdrmix.runtime import be_deterministic
from cdrmix.training.precision import AUTOCAST, Autocast, attach_copies

CPU = torch.device("cpu")
PROMPTS, GROUP = 16, 8
# Layers of attention, tokens of a prompt, new tokens: the ablations' model and window; a window of text with RWKV-7
# only, and with attention, which keeps its keys.
SHAPES = {"cell": (1, 26, 4), "long": (0, 200, 64), "long_hybrid": (1, 200, 64)}
ROWS = 8  # documents read at once for times; one for memory
SHORT, LONG, LONGEST = 256, 4096, 65536  # tokens of a document
CHUNK = 16
RELEASED = Path(__file__).parents[1] / "configs" / "cdrmix-reason-1b.yaml"
# Of its 24 layers 8, two of attention: three models with 32,768 tokens fit one GPU of 141 GB.
RELEASED_PART = ("model.layers=8", "train.micro_batch_rows=8", "train.activation_checkpointing=false")
ADAPTED_CHUNKS = 8  # of a row, as many as the released phase plasticity trains on
GRAPHS_ROWS, GRAPHS_TOKENS = (1, 64), (512, 64)  # tokens of the prompt, and new ones of each row
DECODED = (64, 32)  # tokens of the prompt, and new ones of each row
DECODED_ROWS = (1, 8, 32, 128)
ADAPTED = Path(__file__).parents[1] / "configs" / "cdrmix-reason-tiny.yaml"
ADAPTED_CHUNK = 512  # of cdrmix-reason-1b; more than a rollout has
ADAPTED_ROLLOUTS = (8, 8, 200, 64)  # prompts, rows of each, tokens of a prompt, new tokens
ALL_PROJECTIONS: dict[str, list[str]] = {  # as in cdrmix-reason-1b
    "attention": ["query", "key", "value", "output"],
    "rwkv7": ["receptance", "key", "value"],
}


def cell(attention: int = 1) -> LanguageModel:
    """The model of the ablations of the token memory; attention: how many of its two layers have it, the last ones."""
    config = Model(
        vocab_size=208,
        d_model=64,
        layers=2,
        init_std_scale=4.0,
        attention_fraction=attention / 2,
        attention=Attention(heads=2, kv_heads=2),
        rwkv=Rwkv(head_size=32, decay_rank=8, iclr_rank=8, value_rank=8, gate_rank=16),
        feed_forward=FeedForward(kind="channel_mix", hidden=128),
    )
    torch.manual_seed(1)
    return LanguageModel(config)


def rollouts(attention: int, length: int, new_tokens: int, options: Options) -> Result:
    """Tokens a second of ours and of TRL's, in turns; the tokens of both count, and nothing else of the update."""
    import rl_peers

    model = cell(attention)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    prompts = torch.randint(1, 200, (PROMPTS, length), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)

    def ours() -> int:
        made = generate(model, prompts, new_tokens, temperature=1.0, generator=generator, group=GROUP)
        return int(made.mask_BN.sum())

    with one_thread(CPU), tempfile.TemporaryDirectory() as folder:
        peer = rl_peers.llama(208, parameters, d_model=64, layers=2, heads=2, positions=length + new_tokens)
        theirs = rl_peers.trl_rollouts(peer, prompts, GROUP, new_tokens, folder)
        ours(), theirs()
        rates = [(_rate(ours), _rate(theirs)) for _ in range(options.blocks)]
    mine, other = ([pair[which] for pair in rates] for which in (0, 1))
    settings = {"attention_layers": attention, **_settings((PROMPTS, GROUP, length, new_tokens), model, peer)}
    return Result(unit="tokens/s", peer_name="TRL GRPOTrainer, transformers", ours=mine, peer=other, settings=settings)


def adapted(projections: dict[str, list[str]], options: Options) -> Result:
    """Tokens a second with adapters on these projections ({}: the configuration's) and of TRL; the time over without.

    The time is of whole rollouts, the reading of the prompt included.
    """
    import rl_peers

    config, (count, group, length, new_tokens) = Config.from_yaml(ADAPTED), ADAPTED_ROLLOUTS
    base, models = config.reasoning, {}
    assert base is not None
    for enabled in (True, False):
        lora = base.plastic_lora.model_copy(update={**projections, "enabled": enabled})
        reasoning = base.model_copy(update={"chunk": ADAPTED_CHUNK, "plastic_lora": lora})
        torch.manual_seed(1)
        models[enabled] = LanguageModel(config.cdrmix_model, reasoning=reasoning).eval().requires_grad_(False)
        with torch.no_grad():
            for name, parameter in models[enabled].named_parameters():
                if name.endswith(".up"):  # initially zeros
                    parameter.normal_(std=0.05)
    vocabulary = config.cdrmix_model.vocab_size
    prompts = torch.randint(1, vocabulary, (count, length), generator=torch.Generator().manual_seed(1))
    parameters = sum(parameter.numel() for parameter in models[True].parameters())
    be_deterministic()  # as `cdrmix.load` sets it

    def ours(enabled: bool, rows: int) -> int:
        made = generate(
            models[enabled],
            prompts if rows > 1 else prompts[:1],
            new_tokens,
            temperature=1.0,
            generator=torch.Generator().manual_seed(2),
            group=group if rows > 1 else 1,
        )
        return int(made.mask_BN.sum())

    names = [(enabled, rows) for rows in (count * group, 1) for enabled in (True, False)]
    rates: dict[tuple[bool, int], list[float]] = {name: [] for name in names}
    peer_rates = []
    with one_thread(CPU), tempfile.TemporaryDirectory() as folder:
        peer = rl_peers.llama(
            vocabulary,
            parameters,
            d_model=config.cdrmix_model.d_model,
            layers=4,
            heads=2,
            positions=length + new_tokens,
        )
        theirs = rl_peers.trl_rollouts(peer, prompts, group, new_tokens, folder)
        for number in range(options.blocks + 1):
            for name in names:
                found = _rate(functools.partial(ours, *name))
                if number:
                    rates[name].append(found)
            found = _rate(theirs)
            if number:
                peer_rates.append(found)
    figures = {}
    for rows in (count * group, 1):
        over = [plain / mine for plain, mine in zip(rates[False, rows], rates[True, rows], strict=True)]
        figures[f"time_over_without_{rows}"] = quantiles(over)["p50"]
    return Result(
        unit="tokens/s",
        peer_name="TRL GRPOTrainer, transformers",
        ours=rates[True, count * group],
        peer=peer_rates,
        figures=figures,
        settings={
            "config": ADAPTED.name,
            "chunk": ADAPTED_CHUNK,
            "adapters": models[True].adapters,
            **_settings(ADAPTED_ROLLOUTS, models[True], peer),
        },
    )


def adapters(path: Path, overrides: tuple[str, ...], options: Options) -> Result:
    """Tokens a second of training with the configuration's adapters, and times over those without, in turns."""
    config = Config.from_yaml(path, [*overrides, f"run.device={options.device}"])
    device, reasoning = torch.device(options.device), config.reasoning
    assert reasoning is not None
    chunk, lora = reasoning.chunk, reasoning.plastic_lora
    sets = {
        "none": lora.model_copy(update={"enabled": False}),
        "released": lora,
        "all": lora.model_copy(update=ALL_PROJECTIONS),
    }
    models, precision = {}, AUTOCAST[config.train.precision]
    for name, chosen in sets.items():
        torch.manual_seed(1)
        with device:  # a GPU fills large weights sooner
            models[name] = LanguageModel(
                config.cdrmix_model, reasoning=reasoning.model_copy(update={"plastic_lora": chosen})
            )
        attach_copies(models[name].parameters(), precision, 0)
    rows, chunks = config.train.micro_batch_rows, ADAPTED_CHUNKS
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, config.cdrmix_model.vocab_size, (rows, chunks * chunk), generator=generator).to(device)
    # As in phase plasticity with `carry: fast`: mixers begin anew at every chunk, the fast weights at every row.
    starts, episodes = (
        torch.arange(0, rows * chunks * chunk + 1, step, dtype=torch.int32) for step in (chunk, chunks * chunk)
    )
    borders = starts.to(device), FastWeightOptions(episodes.to(device))
    be_deterministic()

    def step(name: str, train: bool) -> int:
        with torch.set_grad_enabled(train), Autocast(models[name], device.type, precision).precision():
            hidden = models[name](ids, cu_seqlens=borders[0], fast_weights=borders[1]).hidden_BTD
        if train:
            hidden.float().square().mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return ids.numel()

    names = [(name, train) for train in (True, False) for name in sets]
    rates: dict[tuple[str, bool], list[float]] = {each: [] for each in names}
    for number in range(options.blocks + 2):
        for each in names:
            found = _rate(functools.partial(step, *each))
            if number > 1:  # the first passes compile kernels and allocate memory
                rates[each].append(found)
    figures: dict[str, float | None] = {}
    for name in ("released", "all"):
        for train in (True, False):
            over = [plain / mine for plain, mine in zip(rates["none", train], rates[name, train], strict=True)]
            figures[f"{name}_{'training' if train else 'forward'}_over_without"] = quantiles(over)["p50"]
    return Result(
        unit="tokens/s",
        peer_name="the same without adapters",
        ours=rates["released", True],
        peer=rates["none", True],
        figures=figures | {"tokens_per_second_all": quantiles(rates["all", True])["p50"]},
        settings={
            "config": path.name,
            "overrides": list(overrides),
            "precision": config.train.precision,
            "rows": rows,
            "chunks": chunks,
            "chunk": chunk,
            "adapters": {name: models[name].adapters for name in sets},
            "device": options.device,
        },
    )


def with_graphs(path: Path, overrides: tuple[str, ...], options: Options) -> Result:
    """Tokens a second of rollouts with CUDA graphs and without, in turns, of the largest number of rows."""
    config = Config.from_yaml(path, [*overrides, f"run.device={options.device}"])
    device, precision = torch.device(options.device), AUTOCAST[config.train.precision]
    torch.manual_seed(1)
    with device:
        model = LanguageModel(config.cdrmix_model, reasoning=config.reasoning).eval()
    attach_copies(model.parameters(), precision, 0)
    length, new_tokens = GRAPHS_TOKENS
    prompt = torch.randint(1, config.cdrmix_model.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    prompt, generator = prompt.to(device), torch.Generator().manual_seed(2)
    be_deterministic()

    def tokens(rows: int, switch: str) -> int:
        switched = mock.patch.dict(os.environ, {graphs.SWITCH: switch})
        with switched, Autocast(model, device.type, precision).precision():
            made = generate(model, prompt, new_tokens, temperature=1.0, generator=generator, group=rows)
        return int(made.mask_BN.sum())  # waits for the device

    names = [(rows, switch) for rows in GRAPHS_ROWS for switch in "01"]
    rates: dict[tuple[int, str], list[float]] = {each: [] for each in names}
    for number in range(options.blocks + 2):
        for each in names:
            found = _rate(functools.partial(tokens, *each))
            if number > 1:  # the first ones compile kernels and allocate memory
                rates[each].append(found)
    figures: dict[str, float | None] = {}
    for rows in GRAPHS_ROWS:
        pairs = zip(rates[rows, "1"], rates[rows, "0"], strict=True)
        figures[f"ratio_{rows}"] = quantiles([mine / plain for mine, plain in pairs])["p50"]
        figures[f"tokens_per_second_{rows}"] = quantiles(rates[rows, "1"])["p50"]
    settings = {"config": path.name, "overrides": list(overrides), "precision": config.train.precision}
    settings |= {"rows": list(GRAPHS_ROWS), "prompt_tokens": length, "new_tokens": new_tokens, "device": options.device}
    most = GRAPHS_ROWS[-1]
    return Result(
        unit="tokens/s",
        peer_name="the same without graphs",
        ours=rates[most, "1"],
        peer=rates[most, "0"],
        figures=figures,
        settings=settings,
    )


def _settings(sizes: tuple[int, int, int, int], model: nn.Module, peer: nn.Module) -> dict[str, object]:
    """sizes: prompts, rows of each, tokens of a prompt, new tokens."""
    names = ("prompts", "group", "prompt_tokens", "new_tokens")
    counted = {
        name: sum(parameter.numel() for parameter in each.parameters())
        for name, each in (("parameters", model), ("peer_parameters", peer))
    }
    return {**dict(zip(names, sizes, strict=True)), **counted, "device": "cpu", "threads": 1}


def _rate(call: Callable[[], int]) -> float:
    begun = time.perf_counter()
    tokens = call()
    return tokens / (time.perf_counter() - begun)


def reading(options: Options) -> Result:
    """Microseconds a token of a document, with the answer, at 4,096 tokens; and the ratio to 256 tokens."""
    model, window = cell(), None
    with one_thread(CPU):
        documents = {tokens: _documents(tokens) for tokens in (SHORT, LONG)}
        source = _source()
        window = _window(source)
        samples: dict[int, list[float]] = {SHORT: [], LONG: []}
        for number in range(options.blocks + 1):
            for tokens, episodes in documents.items():
                begun = time.perf_counter()
                _read(model, window, episodes)
                elapsed = (time.perf_counter() - begun) / (tokens * ROWS) * 1e6
                if number:
                    samples[tokens].append(elapsed)
    ratios = [long / short for long, short in zip(samples[LONG], samples[SHORT], strict=True)]
    return Result(
        unit="us/token",
        peer_name=None,
        ours=samples[LONG],
        peer=[],
        figures={"cost_4096_over_256": quantiles(ratios)["p50"], "us_a_token_at_256": quantiles(samples[SHORT])["p50"]},
        settings={"rows": ROWS, "chunk": CHUNK, "memory": window.memory, "device": "cpu", "threads": 1},
    )


def decoding(options: Options) -> Result:
    """Tokens a second at 128 rows; those at 1, 8 and 32 rows; and the ratios to one row, in turns."""
    config = Config.from_yaml(options.config)
    torch.manual_seed(1)
    model = LanguageModel(config.cdrmix_model).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)  # so that the distributions are not uniform
    prompt = torch.randint(1, config.cdrmix_model.vocab_size, (DECODED[0],)).tolist()

    def rate(rows: int) -> float:
        made = [Row(list(prompt), Sampling(seed=n, max_new_tokens=DECODED[1], top_k=64)) for n in range(rows)]
        return _rate(lambda: sum(1 for _ in decode(model, made)))

    be_deterministic()  # as `cdrmix.load` sets it
    samples: dict[int, list[float]] = {rows: [] for rows in DECODED_ROWS}
    with one_thread(CPU):
        for number in range(options.blocks + 1):
            for rows, rates in samples.items():
                found = rate(rows)
                if number:
                    rates.append(found)
    alone = samples[1]
    ratios = {rows: [x / y for x, y in zip(samples[rows], alone, strict=True)] for rows in DECODED_ROWS[1:]}
    return Result(
        unit="tokens/s",
        peer_name=None,
        ours=samples[DECODED_ROWS[-1]],
        peer=[],
        figures={f"tokens_per_second_{rows}": quantiles(rates)["p50"] for rows, rates in samples.items()}
        | {f"rows_{rows}_over_1": quantiles(each)["p50"] for rows, each in ratios.items()},
        settings={
            "config": options.config.name,
            "prompt_tokens": DECODED[0],
            "new_tokens": DECODED[1],
            "top_k": 64,
            "device": "cpu",
            "threads": 1,
        },
    )


def memory(options: Options) -> Result:
    """Megabytes that reading a long document takes, without the document itself."""
    del options
    peaks = {tokens: peak_in_fresh_process(__file__, str(tokens)) for tokens in (LONG, LONGEST)}
    long, longest = (peaks[tokens] for tokens in (LONG, LONGEST))
    known = long is not None and longest is not None
    figures = {"megabytes_more_than_at_4096": ((longest or 0) - (long or 0)) / 1e6} if known else {}
    return Result(
        unit="MB",
        peer_name=None,
        ours=[(longest or 0) / 1e6],
        peer=[],
        figures=figures,
        settings={"rows": 1, "chunk": CHUNK, "tokens": LONGEST, "device": "cpu", "threads": 1},
    )


def peak(tokens: int) -> int | None:
    """Bytes by which reading documents of so many tokens raises this process's memory, after a short one."""
    with one_thread(CPU):
        model, window, episodes = cell(), _window(_source()), _documents(tokens, rows=1)
        _read(model, window, _documents(SHORT, rows=1))
        return peak_of_process(lambda: _read(model, window, episodes))


def _source() -> TokenSource:
    return TokenSource("agent", 1, CHUNK, {})


def _window(source: TokenSource) -> Window:
    return Window(source.question, 4, 1, CHUNK, source.answer, source.pad, source.marks)


def _documents(tokens: int, rows: int = ROWS) -> Episodes:
    return _source().batch(range(rows), tokens // CHUNK)


def _read(model: LanguageModel, window: Window, episodes: Episodes) -> None:
    generator, chunks = torch.Generator().manual_seed(1), episodes.chunks_BNC.shape[1]
    read_episodes(model, window, episodes, temperature=1.0, generator=generator, step_budget=chunks)


CASES = {
    f"rollouts_{name}": Case(
        functools.partial(rollouts, *shape),
        f"rollouts, tokens/s: {PROMPTS} prompts of {shape[1]} x {GROUP}, {shape[2]} new tokens each",
        ("cpu",),
    )
    for name, shape in SHAPES.items()
} | {
    "reading": Case(reading, "the memory agent's time a token, 4,096 tokens over 256", ("cpu",)),
    "plastic": Case(
        functools.partial(adapted, {}), "rollouts with plastic adapters, and the time over without", ("cpu",)
    ),
    "plastic_all": Case(
        functools.partial(adapted, ALL_PROJECTIONS),
        "the same with adapters on all projections of cdrmix-reason-1b",
        ("cpu",),
    ),
    "adapters": Case(
        functools.partial(adapters, RELEASED, RELEASED_PART),
        "passes over chunks of 512 tokens with the adapters of cdrmix-reason-1b, and the time over without",
        ("cuda",),
    ),
    "graphs": Case(
        functools.partial(with_graphs, RELEASED, RELEASED_PART),
        "rollouts of cdrmix-reason-1b with CUDA graphs and without, one row and 64",
        ("cuda",),
    ),
    "decoding": Case(decoding, "generated tokens/s at 1, 8, 32 and 128 rows; ratios to one row", ("cpu",)),
    "memory": Case(memory, "the memory agent's peak memory at 65,536 tokens, and over that at 4,096", ("cpu",)),
}

if __name__ == "__main__":
    print(json.dumps(peak(int(sys.argv[1]))))
