"""Multi-token prediction: the cost of a step of every kind, and speculative decoding beside plain decoding.

Processor time on one thread is measured, which waiting for a core does not enter. `step` trains core-tiny on the same
batches with every kind in turns: forward and backward pass, clipping and AdamW. `speculative` continues prompts with a
trained model, each prompt by itself, plainly and with drafts. The texts must be equal.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import torch
from cases import Case, NotMeasured, Options, Result, quantiles

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.inference.generate import Row, decode
from cdrmix.inference.load import load_model
from cdrmix.inference.sampling import Sampling
from cdrmix.inference.speculative import DraftStatistics, decode_speculatively
from cdrmix.model.loss import LossModel
from cdrmix.model.prediction import Depths
from cdrmix.plan.parameters import count_parameters
from cdrmix.runtime import be_deterministic
from cdrmix.training.build import build_loss_model
from cdrmix.training.optim import make_optimizer, parameter_groups

TOKENS = 4
KINDS = ("shared", "maps", "heads", "chain", "sequential")
VARIANTS = [*((kind, 4) for kind in KINDS), ("maps", 1), ("chain", 1), ("sequential", 1), ("chain", 8)]
RECOMMENDED = "chain, every 8"
DOCUMENT = 128  # tokens of a document of the random text
WARMUP = 2
PROMPTS, TEXTS, NEW_TOKENS = 1000, 20, 12  # prompts in all, of one timing, and tokens of each


def step(options: Options) -> Result:
    """Processor seconds of a step with four tokens, of every kind, over those of the plain step."""
    torch.set_num_threads(1)
    be_deterministic()
    plain = Config.from_yaml(options.config)
    trainers = {"plain": _trainer(plain)}
    parameters: dict[str, float | None] = {}
    for kind, every in VARIANTS:
        section = f"model.prediction={{tokens: {TOKENS}, kind: {kind}, every: {every}}}"
        config = Config.from_yaml(options.config, [section])
        trainers[f"{kind}, every {every}"] = _trainer(config)
        parameters[f"parameters_{kind}"] = count_parameters(config.cdrmix_model).stored["prediction"]
    samples: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(WARMUP + options.blocks):
        batch = _batch(plain, number)
        names = list(trainers)
        for name in names[number % len(names) :] + names[: number % len(names)]:  # another one first in each round
            begun = time.process_time()
            trainers[name](batch)
            if number >= WARMUP:
                samples[name].append(time.process_time() - begun)
    figures = {}
    for name in samples:
        ratios = [mine / theirs for mine, theirs in zip(samples[name], samples["plain"], strict=True)]
        figures[f"time_over_plain: {name}"] = quantiles(ratios)["p50"]
    settings = {"tokens": TOKENS, "config": options.config.name, "clock": "processor time, one thread"}
    return Result(
        "processor seconds a step",
        "plain",
        samples[RECOMMENDED],
        samples["plain"],
        figures=figures | parameters,
        settings=settings,
    )


def _trainer(config: Config) -> Callable[[Batch], None]:
    """A function that trains on one batch."""
    torch.manual_seed(config.run.seed)
    model: LossModel = build_loss_model(config)
    optimizer = make_optimizer(parameter_groups(model, config.train), config.train)
    section = config.cdrmix_model.prediction

    def train(batch: Batch) -> None:
        depths = None if section is None else Depths.of(section, batch.step, config.train.steps)
        arguments = batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.documents, batch.token_count
        model(*arguments, 1.0, depths).total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return train


def _batch(config: Config, number: int) -> Batch:
    """A batch of random tokens in documents of DOCUMENT tokens."""
    shape = config.train.micro_batch_rows, config.data.row_length
    ids = torch.from_numpy(np.random.default_rng(number).integers(config.model.vocab_size, size=shape))
    bounds = torch.arange(0, ids.numel() + 1, DOCUMENT, dtype=torch.int32)
    return Batch(ids, ids.roll(-1, 1), torch.ones(shape), bounds, number, float(ids.numel()))


def speculative(options: Options) -> Result:
    """Processor seconds of 20 texts, speculative over plain, greedy and sampled; identical texts are counted.

    options.model: a run or export folder of a model with further depths. The prompts are pieces of its tokenizer's own
    vocabulary, so that no text is needed.
    """
    if options.model is None:
        raise NotMeasured("give the folder of a trained model with model.prediction: --model FOLDER")
    torch.set_num_threads(1)
    be_deterministic()
    loaded = load_model(options.model)
    vocabulary = loaded.tokenizer.vocab_size
    ours, peer, identical, statistics = [], [], 0, DraftStatistics()
    rng = np.random.default_rng(1)
    for number in range(PROMPTS // TEXTS):
        prompts = [[loaded.tokenizer.first_id, *rng.integers(vocabulary, size=3).tolist()] for _ in range(TEXTS)]
        temperature = float(number % 2)  # greedy and sampled by turns

        def rows(prompts: list[list[int]] = prompts, temperature: float = temperature) -> list[Row]:
            sampling = Sampling(temperature=temperature, max_new_tokens=NEW_TOKENS)
            return [Row([*ids], dataclasses.replace(sampling, seed=seed)) for seed, ids in enumerate(prompts)]

        plain, drafted = rows(), rows()
        begun = time.process_time()
        for _ in decode(loaded.model, plain, vocabulary, rows_at_once=1):
            pass
        between = time.process_time()
        for _ in decode_speculatively(loaded.model, drafted, vocabulary, statistics):
            pass
        ours.append(time.process_time() - between)
        peer.append(between - begun)
        identical += sum(one.ids == other.ids for one, other in zip(plain, drafted, strict=True))
    figures: dict[str, float | None] = {
        "identical_texts": identical,
        "different_texts": PROMPTS - identical,
        "acceptance": statistics.acceptance,
        "tokens_per_pass": statistics.tokens_per_pass,
    }
    settings = {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "clock": "processor time, one thread"}
    return Result("processor seconds of 20 texts", "plain decoding", ours, peer, figures=figures, settings=settings)


CASES = {
    "step": Case(step, "a step of core-tiny with four tokens, of every kind, over the plain step", ("cpu",)),
    "speculative": Case(speculative, "speculative decoding over plain decoding, with a trained model", ("cpu",)),
}
