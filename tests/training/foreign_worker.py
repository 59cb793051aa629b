"""One process that trains tiny models of transformers in the engine's memory modes, told by a JSON argument."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cdrmix import ops
from cdrmix.config.schema import Config
from cdrmix.errors import CheckpointError
from cdrmix.runtime import seed_everything
from cdrmix.training import deepspeed_config
from cdrmix.training.checkpoint import Fingerprints, Progress, load_checkpoint, save_checkpoint
from cdrmix.training.distributed import join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.launch import exit_worker
from cdrmix.training.optim import parameter_groups
from cdrmix.training.rendezvous import place

# The models here are so small that ZeRO-3 would keep every parameter whole, and prove nothing about released ones.
deepspeed_config.PERSISTENCE_THRESHOLD = 0
FINGERPRINTS = Fingerprints("tokenizer", "text")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ROWS, LENGTH, VOCABULARY = 4, 12, 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@dataclasses.dataclass(frozen=True)
class Mode:
    """A combination of train.zero_stage, weights, offload, offload_folder and construction by deepspeed.zero.Init."""

    stage: int
    weights: str = "fp32"
    offload: str = "none"
    folder: bool = False
    sharded: bool = False

    def __str__(self) -> str:
        parts = [str(self.stage), self.weights, self.offload]
        return " ".join(parts + ["folder"] * self.folder + ["sharded"] * self.sharded)


class NextToken(nn.Module):
    """Next-token loss of a model of transformers, over the token count of the global batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.language_model = model
        self.used = nn.Linear(8, 1, bias=False)  # in some steps

    def forward(self, ids_BT: Tensor, token_count: Tensor, used: bool) -> Tensor:
        hidden = self.language_model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
        losses = ops.linear_cross_entropy(
            hidden.flatten(0, 1), self.language_model.get_output_embeddings().weight, ids_BT[:, 1:].flatten()
        )
        extra = self.used(torch.ones(1, 8, device=ids_BT.device)).sum() if used else 0.0
        return losses.sum() / token_count + extra


def make_model(kind: str, config: Config, mode: Mode, folder: Path) -> NextToken:
    """A model of transformers with weights of its own seed. sharded: read from a folder, partitioned while it is."""
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    transformers.logging.set_verbosity_error()
    described = transformers.AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=kind == "llama")
    seed_everything(3)
    if mode.sharded:
        world = join(config)
        alive = HfDeepSpeedConfig(deepspeed_config.deepspeed_config(config, world))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / kind, dtype=getattr(torch, DTYPES[mode.weights])
        )
        del alive
        assert all(parameter.numel() == 0 for parameter in model.parameters())
    else:
        model = transformers.AutoModelForCausalLM.from_config(described)
        if place().rank == 0 and not (folder / kind).exists():
            model.save_pretrained(folder / kind)
    loss_model = NextToken(model)
    with torch.no_grad():
        loss_model.used.weight.copy_(torch.linspace(-1, 1, 8))
    return loss_model


def configured(order: dict[str, Any], mode: Mode, *overrides: str) -> Config:
    """The configuration of a mode. bf16 weights are set last: the rule against them is about the model in the file."""
    precision = "bf16" if mode.weights == "bf16" else "fp32"
    rows = [f"train.batch_rows={ROWS}", f"train.micro_batch_rows={order.get('micro', ROWS // 2)}"]
    rows.append(f"train.gradient_clip={order.get('clip', 1000)}")
    settings = [f"train.zero_stage={mode.stage}", f"train.offload={mode.offload}", f"train.precision={precision}"]
    config = Config.from_yaml(order["config"], [*rows, *settings, *overrides])
    folder = str(Path(order["where"]).parent / "files") if mode.folder else None
    train = config.train.model_copy(update={"weights": mode.weights, "offload_folder": folder})
    return config.model_copy(update={"train": train})


def micro_batches(config: Config, step: int) -> Iterator[tuple[Tensor, bool]]:
    """This process's rows of a step, in micro-batches of the same rows for every number of processes; which is last."""
    rank, size, *_ = place()
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    rows = ids.view(-1, config.train.micro_batch_rows, LENGTH)[rank::size]
    for number, row in enumerate(rows):
        yield row, number == len(rows) - 1


def train(engine: Engine, config: Config, first: int, steps: int, *, partly: bool = False) -> list[float]:
    """Steps of AdamW. Returns the loss of each.

    partly: every second step does not use the layer `used`.
    """
    losses = []
    for step in range(first, first + steps):
        engine.set_learning_rate(1e-3)
        count = torch.tensor(float(ROWS * (LENGTH - 1)))
        total = 0.0
        for ids, last in micro_batches(config, step):
            used = not partly or step % 2 == 0
            loss = engine.evaluate(ids.to(engine.world.device), count, used, last=last)
            engine.backward(loss)
            total += loss.item()
        engine.clip()
        assert engine.step()
        assert math.isfinite(engine.gradient_norm)
        engine.zero()
        losses.append(engine.world.total(torch.tensor([total], dtype=torch.float64, device=engine.world.device)).item())
    return losses


def decayed(model: nn.Module, config: Config) -> list[str]:
    """The names with weight decay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, config.train)
    return sorted(names[parameter] for group in groups if group["weight_decay"] for parameter in group["params"])


def modes(order: dict[str, Any]) -> dict[str, Any]:
    """Trains each kind of model in each mode. Rank 0 writes the weights to the folder `where`.

    Result: of each mode the losses, the names with decay, and whether bf16 weights are the rounded float32 ones.
    """
    where = Path(order["where"])
    results: dict[str, Any] = {}
    for kind in order["kinds"]:
        for fields in order["modes"]:
            mode = Mode(**fields)
            config = configured(order, mode)
            model = make_model(kind, config, mode, where)
            names = decayed(model, config)
            frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
            engine = make_engine(config, model, join(config))
            results[f"{kind} {mode}"] = {
                "losses": train(engine, config, 0, 3, partly="partly" in order),
                "decayed": names,
            }
            assert all(buffer.dtype == torch.float32 for buffer in frequencies)
            weights = engine.weights()
            rounded = engine_weights(engine)
            if engine.world.rank == 0:
                assert not any("inv_freq" in name for name in weights)
                assert {weight.dtype for weight in weights.values()} == {torch.float32}
                if mode.weights == "bf16":
                    assert all(torch.equal(weights[name].bfloat16(), rounded[name]) for name in weights)
                    assert not all(torch.equal(weights[name], rounded[name].float()) for name in weights)
                save_file(weights, where / f"{kind} {mode}.safetensors")
    return results


def engine_weights(engine: Engine) -> dict[str, Tensor]:
    """The weights that the products read, whole."""
    import deepspeed

    found = {}
    for name, parameter in engine.parameters.items():
        if engine.stage < 3:
            found[name] = parameter.detach().cpu().clone()
            continue
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().cpu().clone()
    return found


def resume(order: dict[str, Any]) -> dict[str, Any]:
    """For each mode: four steps, and two steps, a checkpoint, another engine, two steps. Result: what is not equal; and
    which weights are not those of the average while it is shown, or changed by it."""
    where = Path(order["where"])
    results = {}
    for fields in order["modes"]:
        mode = Mode(**fields)
        config = configured(order, mode, "train.ema_decay=0.5")

        def start() -> Engine:
            return make_engine(config, make_model("llama", config, mode, where), join(config))  # noqa: B023

        engine = start()
        train(engine, config, 0, 2)
        saved = save_checkpoint(engine, where / f"checkpoints {mode}", Progress(step=2), config, FINGERPRINTS).finish()
        before, average = engine_weights(engine), engine.average_weights()
        with engine.averaged():
            shown = engine_weights(engine)
        after = engine_weights(engine)
        results[f"{mode} averaged"] = [
            name
            for name, tensor in average.items()
            if not torch.equal(shown[name], tensor.to(shown[name].dtype)) or not torch.equal(after[name], before[name])
        ]
        assert not average or not all(torch.equal(shown[name], before[name]) for name in average)
        train(engine, config, 2, 2)
        expected = state(engine)
        del engine
        engine = start()
        assert load_checkpoint(engine, saved, config, FINGERPRINTS).step == 2
        train(engine, config, 2, 2)
        found = state(engine)
        assert found.keys() == expected.keys()
        results[str(mode)] = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
        results[f"{mode} files"] = (
            all(
                value.untyped_storage().filename is not None
                for flat, slots in engine.optimizer.state.items()
                for value in (flat, flat.grad, slots["exp_avg"], slots["exp_avg_sq"])
            )
            if mode.folder
            else True
        )
    return results


def state(engine: Engine) -> dict[str, Tensor]:
    """A copy of all state of an engine."""
    parts = {"weight": engine.weights(), "average": engine.average_weights(), "adamw": engine.optimizer_state()}
    return {f"{part} {name}": tensor.clone() for part, tensors in parts.items() for name, tensor in tensors.items()}


def frozen(order: dict[str, Any]) -> dict[str, Any]:
    """For each mode: trains the attention alone, on a base; saves, and loads in another engine and on another base."""
    where = Path(order["where"])
    results: dict[str, Any] = {}
    for fields in order["modes"]:
        mode = Mode(**fields)
        config = configured(order, mode)

        def start(base: str) -> Engine:
            model = make_model("llama", config, mode, where)  # noqa: B023
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("self_attn" in name)
            return make_engine(config, model, join(config), base=base)  # noqa: B023

        engine = start("first")
        before = engine_weights(engine)
        train_frozen(engine, config, 0)
        after = engine_weights(engine)
        changed = sorted(name for name in before if not torch.equal(before[name], after[name]))
        saved = save_checkpoint(engine, where / f"frozen {mode}", Progress(step=1), config, FINGERPRINTS).finish()
        expected = engine.weights()
        kept = {name: weight.clone() for name, weight in expected.items()}
        engine = start("first")
        load_checkpoint(engine, saved, config, FINGERPRINTS)
        loaded = engine.weights()
        try:
            load_checkpoint(start("other"), saved, config, FINGERPRINTS)
            refused = ""
        except CheckpointError as error:
            refused = str(error)
        results[str(mode)] = {
            "changed": changed,
            "saved": sorted(kept),
            "equal": all(torch.equal(kept[name], loaded[name]) for name in kept),
            "refused": refused,
            "base": json.loads((saved / "state.json").read_text())["base"],
        }
    return results


def train_frozen(engine: Engine, config: Config, step: int) -> None:
    """One step without the linear layer `used`, which is frozen."""
    engine.set_learning_rate(1e-3)
    count = torch.tensor(float(ROWS * (LENGTH - 1)))
    for ids, last in micro_batches(config, step):
        engine.backward(engine.evaluate(ids.to(engine.world.device), count, False, last=last))
    engine.clip()
    assert engine.step()
    engine.zero()


JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"modes": modes, "resume": resume, "frozen": frozen}


def main(order: dict[str, Any]) -> int:
    """Does the jobs, each in a folder of its own below `where`; rank 0 writes the list of their results."""
    where = Path(order["where"])
    results = []
    for number, job in enumerate(json.loads(order["jobs"])):
        folder = where / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        results.append(JOBS[job["job"]](order | job | {"where": str(folder)}))
    if place().rank == 0:
        (where / "results.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    exit_worker(main(json.loads(sys.argv[1])))
