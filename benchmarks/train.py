"""Training end to end as a test: on a CPU compared with other ways to train on the same batches, on a GPU with targets.

The GPU cases are those of train_gpu.py, each in a process of its own, with every GPU of the machine.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import torch
import train_gpu
from cases import Case, NotMeasured, Options, Result

from cdrmix.config.schema import Config
from cdrmix.errors import CdrmixError, OutOfMemoryError
from cdrmix.plan.parameters import count_parameters

PROGRAM = Path(__file__).with_name("train_gpu.py")
HYBRID = train_gpu.CONFIGS / "cdrmix-hybrid-tiny.yaml"
STATE_BYTES = 16  # of a stored parameter: float32 weight, gradient and two moments, however they are sharded
MOST_SHARE = 0.9  # of a GPU's memory for such state; a case that needs more is not tried


def on_cpu(config: Path | None, options: Options) -> Result:
    """A configuration, --config or else the case's, compared with others: see train_cpu.py."""
    import train_cpu  # only here: it needs all dependencies of the package and transformers, which GPU cases do not

    return train_cpu.in_turns_with_peers(config or options.config, options)


def on_gpu(name: str, options: Options) -> Result:
    """A case of train_gpu.py on every GPU of this machine, in processes of its own.

    Raises NotMeasured where the machine's GPUs do not hold it.
    """
    gpus = torch.cuda.device_count()
    _check_room(name, gpus)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), "--case", name, "--device", options.device, "--json"],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode == OutOfMemoryError.exit_code:
        raise NotMeasured("the GPU's memory does not hold the step")
    if done.returncode != 0:
        raise CdrmixError(f"train_gpu.py --case {name} ended with {done.returncode}; what it said stands above")
    return Result(**json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))))


def _check_room(name: str, gpus: int) -> None:
    case = train_gpu.CASES[name]
    config = Config.from_yaml(train_gpu.CONFIGS / case.config, case.overrides)
    least = STATE_BYTES * count_parameters(config.model).total_stored / gpus
    memory = torch.cuda.mem_get_info()[1]
    if least > MOST_SHARE * memory:
        raise NotMeasured(
            f"weights, gradients and moments alone take {least / 1e9:,.0f} GB of each of this machine's {gpus} GPUs, "
            f"which have {memory / 1e9:,.0f} GB"
        )


def gate(name: str) -> Case:
    """A case of train_gpu.py."""
    return Case(functools.partial(on_gpu, name), f"tokens/s of {train_gpu.CASES[name].about}", ("cuda",), told_of=True)


CASES = {
    "tiny": Case(
        functools.partial(on_cpu, None),
        "tokens/s of stage A's loop, of its model in plain and in compiled PyTorch, and of an equal Llama",
        ("cpu",),
    ),
    "hybrid_tiny": Case(
        functools.partial(on_cpu, HYBRID),
        "the same with Mamba-2 blocks (cdrmix-hybrid-tiny)",
        ("cpu",),
    ),
    **{name.replace("-", "_"): gate(name) for name in train_gpu.CASES},
}
