"""One of several processes that share the tokens of each row: their gradients against those of whole rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parent))  # conftest.py keeps it off the path of child processes

from worker import relative

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import TrainLoader, train_loader
from cdrmix.data.shards import open_shards
from cdrmix.eval.perplexity import loss_model_nats
from cdrmix.model.sequence import SequenceGroup, SequenceSlice
from cdrmix.runtime import seed_everything
from cdrmix.training import deepspeed_config
from cdrmix.training.build import build_loss_model
from cdrmix.training.digests import digest
from cdrmix.training.distributed import join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.launch import exit_worker
from cdrmix.training.optim import make_optimizer, parameter_groups

# The model here is so small that ZeRO-3 would keep every parameter whole, and prove nothing about released ones.
deepspeed_config.PERSISTENCE_THRESHOLD = 0


def starts(rows: int, length: int, size: int) -> dict[str, list[int]]:
    """Places in flattened rows where documents start inside them, around the borders of the slices."""
    border, end = length // size, rows * length
    generator = torch.Generator().manual_seed(2)
    return {
        "one document a row": [],
        "at borders": [place for place in range(0, end, border) if place % length],
        "one token before a border, and one in the last slice": [border - 1, length + border - 1, end - 1],
        "one token after a border": [border + 1, end - border + 1],
        "many": sorted(set(torch.randint(1, end, (end // 3,), generator=generator).tolist())),
    }


def perturbed(config: Config, dtype: torch.dtype) -> Any:
    """The model with no weight at zero: outputs start there, which would hide half of the gradients."""
    seed_everything(3)
    model = build_loss_model(config).to(dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype), alpha=0.1)
    return model


def run(model: Any, batch: Batch, share: float) -> dict[str, torch.Tensor]:
    """The loss and the gradients of a micro-batch, summed over the processes."""
    model.zero_grad()
    losses = model(batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.documents, batch.token_count, share)
    losses.total.backward()
    found = {"loss": losses.total.detach().clone()} | {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    found["counts"] = losses.router.tokens_per_expert_LE.double() if losses.router is not None else torch.zeros(1)
    if losses.depth is not None:
        slices = 1 if model.sequence is None else model.sequence.size
        found |= {"kept": losses.depth.kept_G.double(), "threshold": losses.depth.threshold_G.double() / slices}
    if model.sequence is not None:
        for each in found.values():
            dist.all_reduce(each)
    return found


def without_halo(self: SequenceSlice, x: torch.Tensor, count: int) -> torch.Tensor:
    return x[:, :count] * 0


def without_states(self: SequenceSlice, final: torch.Tensor, transition: torch.Tensor, apply: Any) -> torch.Tensor:
    return torch.zeros_like(final)


def without_transitions(
    self: SequenceSlice,
    final: torch.Tensor,
    transition: torch.Tensor,
    apply: Any,
    states: Callable[..., torch.Tensor] = SequenceSlice.states_before,
) -> torch.Tensor:
    return states(self, final, torch.zeros_like(transition), apply)


def of_this_slice(self: SequenceGroup, x: torch.Tensor) -> torch.Tensor:
    return x.detach() * self.size


GUARDS: dict[str | None, tuple[type, str, Callable[..., Any]]] = {
    "halo": (SequenceSlice, "before", without_halo),
    "states": (SequenceSlice, "states_before", without_states),
    "transitions": (SequenceSlice, "states_before", without_transitions),
    "balance": (SequenceGroup, "total", of_this_slice),
}


@contextmanager
def dropped(guard: tuple[type, str, Callable[..., Any]] | None) -> Iterator[None]:
    """With another function in place of one that makes several processes equal to one: (class, its name, the other)."""
    if guard is None:
        yield
        return
    owner, name, instead = guard
    with patch.object(owner, name, instead):
        yield


def packed(config: Config, layout: list[int], tokens: tuple[int, int] | None = None) -> Batch:
    """Two random rows with documents that start at these places, for a model in float64. tokens: how many tokens are
    before the filling of each row; None: there is none."""
    rows, length = 2, config.data.row_length
    generator = torch.Generator().manual_seed(11)
    ids, targets = torch.randint(0, config.cdrmix_model.vocab_size, (2, rows, length), generator=generator)
    weights = torch.rand(rows, length, generator=generator).double()
    bounds, places = {0, *layout, *range(0, rows * length + 1, length)}, None
    if tokens is not None:
        is_token = torch.arange(length) < torch.tensor(tokens).unsqueeze(1)
        weights, places = weights * is_token, is_token.flatten().nonzero().squeeze(1)
        bounds |= {row * length + count for row, count in enumerate(tokens)}
    starts_N = torch.tensor(sorted(bounds), dtype=torch.int32)
    return Batch(ids, targets, weights, starts_N, 0, float(weights.sum()), tokens_N=places)


def slices(order: dict[str, Any]) -> int:
    """Writes to `where` the largest relative error of the loss, the counts and the gradients in float64, for each
    layout of documents. All processes find the same sums; the first compares them."""
    return compared(order, without=False)


def guards(order: dict[str, Any]) -> int:
    """As `slices`, of one layout with each guard dropped."""
    return compared(order, without=True)


def compared(order: dict[str, Any], *, without: bool) -> int:
    config, whole = configured(order), configured(order, "train.sequence_parallel=1")
    world = join(config)
    size, length = config.train.sequence_parallel, config.data.row_length
    results = {}

    def compare(layout: list[int], guards: dict[str, str | None], tokens: tuple[int, int] | None = None) -> None:
        batch = packed(config, layout, tokens)
        expected = run(perturbed(whole, torch.float64), batch, 1.0) if world.is_main_process else {}
        for name, guard in guards.items():
            with dropped(GUARDS.get(guard)):
                found = run(perturbed(config, torch.float64), batch.of_slice(world.rank, size), 1 / size)
            results[name] = max((relative(found[each], expected[each]) for each in expected), default=0.0)

    if without:
        # Two slices need no transition: the second one's state is that after the first.
        compare([length - 1], {f"without {guard}": guard for guard in GUARDS if size > 2 or guard != "transitions"})
    else:
        for name, layout in starts(2, length, size).items():
            compare(layout, {name: None})
        compare([3], {"filling, also of a whole slice": None}, (length - 3, length // size - 1))
    if world.is_main_process:
        Path(order["where"]).write_text(json.dumps(results))
    return 0


def averaged(engine: Engine, mine: TrainLoader, everyone: TrainLoader, plain: Any) -> dict[str, float]:
    """The error of the nats of a step's rows under the averaged weights, and of those under the weights afterwards; how
    many tensors have other bits than before. plain: a whole model, whose weights this replaces."""

    def nats() -> float:
        with torch.no_grad():
            found = [loss_model_nats(engine.evaluated, engine.placed(batch)) for batch in mine.micro_batches(0)]
        world = engine.world
        return float(world.total(torch.stack(found).double().sum())) / (world.tensor_parallel * world.pipeline_parallel)

    def expected(weights: dict[str, torch.Tensor]) -> float:
        plain.language_model.load_state_dict(weights)
        with torch.no_grad():
            return float(sum(loss_model_nats(plain, batch) for batch in everyone.micro_batches(0)))

    assert engine.average is not None
    before, average = engine.weights(), engine.average_weights()
    apart = [tensor.clone() for tensor in engine.average.tensors]
    with engine.averaged():
        shown = nats()
    after = nats()
    changed = sum(not torch.equal(*pair) for pair in zip(engine.average.tensors, apart, strict=True))
    weights = engine.weights()
    if not engine.world.is_main_process:
        return {}
    assert abs(expected(average) - expected(before)) > 1e-3 * shown, "the two models are hard to tell apart"
    return {
        "averaged": abs(shown / expected(average) - 1),
        "restored": abs(after / expected(before) - 1),
        "changed": changed + sum(not torch.equal(weights[name], tensor) for name, tensor in before.items()),
    }


def configured(order: dict[str, Any], *overrides: str) -> Config:
    return Config.from_yaml(order["config"], [*order["overrides"], *overrides])


def engines(order: dict[str, Any]) -> int:
    """Writes to `where` the largest errors of losses and weights in steps of the engine at each of the ZeRO `stages`,
    and how many digests are not those of the whole weights. The first process alone makes the steps without engine."""
    results = {}
    for stage in map(int, order["stages"]):
        fixed = (
            f"train.zero_stage={stage}",
            f"train.activation_checkpointing={str(stage in (1, 3)).lower()}",
            "train.micro_batch_rows=2",
            "train.gradient_clip=0.3",  # below the norm, so that clipping acts
            "train.epsilon=0.01",  # with AdamW's usual one an update of elements near zero magnifies rounding
            "train.ema_decay=0.5",
        )
        config = configured(order, *fixed)
        alone = (
            "train.zero_stage=0",
            *(f"train.{kind}_parallel=1" for kind in ("sequence", "tensor", "expert", "pipeline")),
        )
        whole = configured(order, *fixed, *alone)
        world = join(config)
        split = open_shards(Path(order["shards"])).train
        plain = perturbed(whole, torch.float32)
        start = {name: value.clone() for name, value in plain.language_model.state_dict().items()}
        optimizer = make_optimizer(parameter_groups(plain, whole.train), whole.train)
        engine = make_engine(config, build_loss_model(config), world)
        engine.load_weights(start if world.leads else {})
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * group["multiplier"]
        engine.set_learning_rate(1e-2)
        mine = train_loader(config, split, *world.loader_ranks)
        everyone = train_loader(whole, split)
        losses = 0.0
        for step in range(int(order["steps"])):
            expected, found = 0.0, torch.zeros((), dtype=torch.float64)
            optimizer.zero_grad()
            batches = everyone.micro_batches(step) if world.is_main_process else []
            for each in batches:
                arguments = each.ids_BT, each.targets_BT, each.weights_BT, each.documents, each.token_count
                total = plain(*arguments, 1 / len(batches)).total
                total.backward()
                expected += total.item()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            optimizer.step()
            batches = mine.micro_batches(step)
            engine.set_micro_batches(len(batches))
            for outcome in engine.passes(batches, Engine.forward):
                found += outcome.total.detach().double()
            engine.clip()
            assert engine.step()
            engine.zero()
            total_found = world.total_of_rows(found).item()
            losses = max(losses, abs(total_found / expected - 1) if world.is_main_process else 0.0)
        results[f"losses {stage}"] = losses
        weights, digests = engine.weights(), engine.digests().weights.tolist()
        if world.is_main_process:
            pairs = zip(engine.trained, digests, strict=True)
            results[f"digests {stage}"] = float(sum(int(digest(weights[name])) != found for name, found in pairs))
        for name, value in plain.language_model.named_parameters() if world.is_main_process else ():
            error = relative(weights[name], value.detach())
            results[f"weights {stage}"] = max(results.get(f"weights {stage}", 0.0), error)
        results |= {f"{name} {stage}": error for name, error in averaged(engine, mine, everyone, plain).items()}
    if world.is_main_process:
        Path(order["where"]).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    exit_worker({"slices": slices, "guards": guards, "engines": engines}[order["job"]](order))
