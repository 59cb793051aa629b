"""The checks of the machine before a ladder is trained: each a line with its result and its time.

They use the first rung, the text of the ladder and the functions that train it. A check that fails has a reason, and
the ladder does not begin.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet
from cdrmix.durable import disk_guard
from cdrmix.errors import ConfigError
from cdrmix.eval import sandbox
from cdrmix.inference.checkpoints import read_weights
from cdrmix.ladder.verdict import Outcome
from cdrmix.model.loss import LossModel
from cdrmix.plan.parameters import count_parameters
from cdrmix.run_folder import RunFolder, environment
from cdrmix.runtime import check_cpu, check_gpu, seed_everything, work_alone
from cdrmix.training.build import build_loss_model
from cdrmix.training.precision import AUTOCAST
from cdrmix.training.stage_a import train

PREFIX = "infrastructure-"  # of the folder for short runs
STEPS, CHECKPOINT = 4, 2  # steps of the short runs; the checkpoint from which one of them is continued
ROWS, TOKENS = 2, 64  # of the batch of random tokens
# Unit roundoff of products. The gradient passes about ten products a layer, whose errors are independent, so the
# relative error of the whole gradient is about u * sqrt(10 * layers). A kernel that drops one of the 128 tokens changes
# it by about 1 / 128. SAFETY: measured on micro-300k, float32: 0.7 of that estimate.
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
SAFETY = 8.0
# Of 16-bit products a router may choose another expert than float64 does, where two of them score nearly the same.
MOST_WITH_ROUTERS = 0.3


@dataclass(frozen=True)
class Check:
    """The result of one check. detail: what was found. seconds: wall-clock time."""

    name: str
    outcome: Outcome
    detail: str
    seconds: float

    def line(self) -> str:
        """The check as a line of text."""
        return f"{self.outcome:<12}  {self.seconds:6.1f} s  {self.name}: {self.detail}"


class _Failed(Exception):
    """A check that fails, with its reason."""


class _NotMeasured(Exception):
    """Something that is missing but that the training does not need, with its reason."""


@dataclass
class _Subject:
    """What the checks share. Later ones use what earlier ones made."""

    config: Config
    folder: Path
    say: Callable[[str], None]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shards: ShardSet | None = None
    model: LossModel | None = None


def validate_infrastructure(config: Config, folder: Path, say: Callable[[str], None] = print) -> list[Check]:
    """Checks device, text, model, forward and backward pass, gradients, checkpoints, repetition and sandbox.

    All of it in this process, without expert and sequence parallelism.

    Args:
        config: of the rung that is used, the smallest one.
        folder: for two short runs, which are removed again.
        say: receives a line for each check.

    Returns:
        The results. After a check that fails, those that need it are not measured.

    Raises:
        CorpusError, ShardError, DiskFullError, Preempted: as the training does.
    """
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder) as name:
        parallel = ("expert_parallel", "sequence_parallel", "tensor_parallel", "pipeline_parallel")
        alone = config.train.model_copy(update=dict.fromkeys(parallel, 1))
        subject = _Subject(config.model_copy(update={"train": alone}), Path(name), say)
        results: list[Check] = []
        for title, check in CHECKS.items():
            failed = next((each.name for each in results if each.outcome is Outcome.FAIL), None)
            began = time.monotonic()
            try:
                if failed is not None and title != "sandbox":
                    raise _NotMeasured(f"{failed} failed")
                outcome, detail = Outcome.PASS, check(subject)
            except _Failed as error:
                outcome, detail = Outcome.FAIL, str(error)
            except _NotMeasured as error:
                outcome, detail = Outcome.NOT_MEASURED, str(error)
            results.append(Check(title, outcome, detail, time.monotonic() - began))
            say(results[-1].line())
    return results


def machine(config: Config) -> dict[str, Any]:
    """What the checks depend on: Python, packages, platform, cores and the device."""
    device = work_alone(config)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {**environment(), "device": name}


def _device(subject: _Subject) -> str:
    config = subject.config
    try:
        subject.device = work_alone(config)
        if subject.device.type == "cuda":
            check_gpu(subject.device, config)
        else:
            check_cpu(config.train.precision)
    except ConfigError as error:
        raise _Failed(str(error)) from error
    if subject.device.type == "cuda":
        return f"{torch.cuda.get_device_name(subject.device)}, {config.train.precision}"
    return f"cpu, {config.train.precision}"


def _text(subject: _Subject) -> str:
    subject.shards = prepare(subject.config, say=subject.say)
    shards = subject.shards
    return f"{shards.train.tokens:,} tokens to train on, {shards.valid.tokens:,} held out"


def _model(subject: _Subject) -> str:
    config = subject.config
    seed_everything(config.run.seed)
    subject.model = build_loss_model(config)
    found = sum(parameter.numel() for parameter in subject.model.parameters())
    planned = count_parameters(config.cdrmix_model).total_stored
    if found != planned:
        raise _Failed(f"the model has {found:,} parameters, the plan says {planned:,}")
    return f"{found:,} parameters, as planned"


def _forward(subject: _Subject) -> str:
    model, config = _moved(subject), subject.config
    with torch.no_grad():
        loss = _loss(model, config, subject.device).item()
    if not math.isfinite(loss):
        raise _Failed(f"the loss of random tokens is {loss}")
    return f"loss of random tokens {loss:.3f}, ln of the vocabulary {math.log(config.model.vocab_size):.3f}"


def _backward(subject: _Subject) -> str:
    gradients = _gradients(_moved(subject), subject.config, subject.device)
    bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    if bad:
        raise _Failed(f"the gradient of {bad[0]} is not finite")
    still = [name for name, gradient in gradients.items() if not gradient.any()]
    if still:
        raise _Failed(f"the gradient of {still[0]} is zero")
    return f"{len(gradients)} gradients, all finite"


def _gradient_equality(subject: _Subject) -> str:
    """The kernels of this device against the formulas in PyTorch with float64 on the CPU, for the same weights."""
    config = subject.config
    model = _moved(subject)
    truth_model = copy.deepcopy(model).to("cpu", torch.float64)
    found = _gradients(model, config, subject.device)
    truth = _gradients(truth_model, config, torch.device("cpu"))
    if found.keys() != truth.keys():
        raise _Failed("other parameters have a gradient than in float64")
    error = math.sqrt(sum(float((found[name].cpu().double() - truth[name]).square().sum()) for name in truth))
    relative = error / math.sqrt(sum(float(gradient.square().sum()) for gradient in truth.values()))
    section = config.cdrmix_model
    bound = SAFETY * ROUNDOFF[config.train.precision] * math.sqrt(10 * section.layers)
    if section.routers and config.train.precision != "fp32":
        bound = max(bound, MOST_WITH_ROUTERS)
    detail = f"relative difference from float64 {relative:.1e}, at most {bound:.1e}"
    if not relative <= bound:
        worst = max(truth, key=lambda name: float((found[name].cpu().double() - truth[name]).norm()))
        raise _Failed(f"{detail}; it is largest in {worst}: a kernel computes something else on this machine")
    return detail


def _repeat(subject: _Subject) -> str:
    first = _short_run(subject, "first")
    again = _short_run(subject, "again")
    if difference := _difference(first, again):
        raise _Failed(f"two runs of {STEPS} steps differ: {difference}")
    return f"{STEPS} steps twice, the same weights bit for bit"


def _checkpoint(subject: _Subject) -> str:
    continued = _short_run(subject, "continued", begin=subject.folder / "first")
    if difference := _difference(subject.folder / "first", continued):
        raise _Failed(
            f"{STEPS} steps, and a continuation from the checkpoint of step {CHECKPOINT}, differ: {difference}"
        )
    return f"continued from the checkpoint of step {CHECKPOINT} of {STEPS}, the same weights bit for bit"


def _sandbox(subject: _Subject) -> str:
    try:
        layers = sandbox.probe()
    except ConfigError as error:
        raise _NotMeasured(str(error)) from error
    missing = [f"{name}: {reason}" for name, reason in layers.missing.items() if name in sandbox.NEEDED]
    if missing:
        raise _NotMeasured(f"generated code cannot be run here ({'; '.join(missing)})")
    working = [name for name in layers.reasons if name not in layers.missing]
    version = f"; version {layers.landlock_abi} of Landlock" if layers.landlock_abi else ""
    return f"as {layers.user}, with {', '.join(name.replace('_', ' ') for name in working)}{version}"


# In this order: the later ones use what the earlier ones made.
CHECKS: dict[str, Callable[[_Subject], str]] = {
    "device": _device,
    "text": _text,
    "model": _model,
    "forward": _forward,
    "backward": _backward,
    "gradient equality": _gradient_equality,
    "bitwise repeat": _repeat,
    "checkpoint round trip": _checkpoint,
    "sandbox": _sandbox,
}


def _moved(subject: _Subject) -> LossModel:
    """A copy of the model on the device, every parameter moved off its initial zeros so that all of them matter."""
    assert subject.model is not None
    model = copy.deepcopy(subject.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.to(subject.device)


def _loss(model: LossModel, config: Config, device: torch.device) -> Tensor:
    """The loss of ROWS rows of random tokens, each of two documents."""
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(config.model.vocab_size, (ROWS, TOKENS + 1), generator=generator).to(device)
    third = TOKENS // 3
    starts_N = [0, third, TOKENS, TOKENS + 2 * third, 2 * TOKENS]
    cu_seqlens_N = torch.tensor(starts_N, dtype=torch.int32, device=device)
    weights_BT = torch.ones(ROWS, TOKENS, device=device)
    dtype = None if next(model.parameters()).dtype == torch.float64 else AUTOCAST[config.train.precision]
    precision = contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)
    with precision:
        return model(ids_BT[:, :-1], ids_BT[:, 1:], weights_BT, cu_seqlens_N, float(ROWS * TOKENS)).total


def _gradients(model: LossModel, config: Config, device: torch.device) -> dict[str, Tensor]:
    model.zero_grad()
    _loss(model, config, device).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _short_run(subject: _Subject, name: str, begin: Path | None = None) -> Path:
    """Trains STEPS steps of two micro-batches in a folder. begin: a folder with the checkpoint to continue from."""
    config = subject.config
    rows = config.train.micro_batch_rows
    changed = {
        "steps": STEPS,
        "batch_rows": 2 * rows,
        "batch_warmup": None,
        "warmup_steps": 1,
        "checkpoint_every": CHECKPOINT,
        "keep_last": STEPS,
        "evaluate_every": STEPS,
        "evaluate_rows": rows,
        "profile": None,
    }
    short = config.model_copy(
        update={"train": config.train.model_copy(update=changed), "logging": type(config.logging)()}
    )
    run = RunFolder(subject.folder / name)
    assert subject.shards is not None
    with disk_guard(f"a short run under {subject.folder}", "Free some space there."):
        run.checkpoints.mkdir(parents=True)
        if begin is not None:
            step = f"step-{CHECKPOINT:08d}"
            shutil.copytree(begin / "checkpoints" / step, run.checkpoints / step)
            (run.checkpoints / "latest").write_text(f"{step}\n")
        with contextlib.redirect_stdout(io.StringIO()):
            train(short, run, subject.shards, resume=None if begin is None else "auto", console=False)
    return run.path


def _difference(one: Path, other: Path) -> str:
    """The first difference of the weights of two short runs; empty without one."""
    a, b = (read_weights(path / "checkpoints" / f"step-{STEPS:08d}") for path in (one, other))
    if a.keys() != b.keys():
        return "they have other parameters"
    different = [name for name in a if not torch.equal(a[name], b[name])]
    return f"{len(different)} of {len(a)} tensors, the first is {different[0]}" if different else ""


def failures(checks: list[Check]) -> list[str]:
    """The checks that failed, with their reasons."""
    return [f"{check.name}: {check.detail}" for check in checks if check.outcome is Outcome.FAIL]


def as_json(checks: list[Check]) -> list[dict[str, Any]]:
    """The checks as plain data."""
    return [dataclasses.asdict(check) | {"outcome": check.outcome.value} for check in checks]
