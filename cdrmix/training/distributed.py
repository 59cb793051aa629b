"""The processes of a run, seen from one of them: rank, device, threads, and collectives."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cdrmix.code_caches import check_code_caches
from cdrmix.config.schema import Config
from cdrmix.durable import wait_until
from cdrmix.errors import CdrmixError, ConfigError
from cdrmix.kernels.common.products import multiplies_on_one_thread, set_num_threads
from cdrmix.runtime import be_deterministic, check_cpu, check_gpu, device_type, keep_freed_memory, threads
from cdrmix.training import messages
from cdrmix.training.launch import lost_peer
from cdrmix.training.rendezvous import TIMEOUT, place, rendezvous_store, tell, wait_for_all
from cdrmix.training.threads import candidates

Item = TypeVar("Item")

SHARED_FOLDER_WAIT = 60.0  # seconds; a network file system may hide a new folder for as long (acdirmax, nfs(5))


@dataclass(frozen=True)
class DistributedContext:
    """One process among `size`. Every method is a collective: all processes call it."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def data_size(self) -> int:
        """How many groups of processes there are that have rows of their own."""
        return self.replicas // self.sequence_parallel

    @property
    def stage_size(self) -> int:
        """How many processes there are for each stage of the pipeline, neighbouring ones."""
        return self.size // self.pipeline_parallel

    @property
    def pipeline_stage(self) -> int:
        """The stage of the pipeline that this process has."""
        return self.rank // self.stage_size

    @property
    def leads(self) -> bool:
        """Whether this is the first process of its stage."""
        return self.rank % self.stage_size == 0

    @property
    def replicas(self) -> int:
        """How many processes there are for each share of the weights."""
        return self.stage_size // self.tensor_parallel

    @property
    def replica(self) -> int:
        """The number of this process among those with the same share of the weights."""
        return self.rank % self.stage_size // self.tensor_parallel

    @property
    def generator(self) -> int:
        """The number of this process's random generators: neighbours that divide the layers have the same."""
        return self.rank // self.tensor_parallel

    @property
    def loader_ranks(self) -> tuple[int, int, int, int]:
        """What loaders take: this process's group, the number of groups, its slice of a row, the number of slices.

        train.tensor_parallel neighbouring processes have the same tokens, and train.sequence_parallel such neighbours
        the slices of the same rows.
        """
        row, token = divmod(self.replica, self.sequence_parallel)
        return row, self.data_size, token, self.sequence_parallel

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes the files that a run has once."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits until every process calls."""
        if self.size > 1:
            dist.barrier()

    def total(self, values: Tensor) -> Tensor:
        """The sum of `values` over the processes, the same bits in each of them; in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def total_of_rows(self, values: Tensor) -> Tensor:
        """The sum over the processes of what each has of its own rows, float64; in place.

        Processes that divide the layers have the same sums, and count once. Stages of a pipeline have parts of them.
        """
        return self.total(values).div_(self.tensor_parallel)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return bool(self.total(torch.tensor([float(flag)], device=self.device)).item())

    def gather(self, item: Item, what: str) -> list[Item]:
        """Every process's item, by rank. Items are what messages.py can say.

        what: what the processes tell each other, for the lines about a long wait. It is long where the first process
        prepares text or writes a checkpoint meanwhile, so a collective, which has a short limit, would not do. A signal
        ends it, and so does the launcher when a process dies. Raises HangError, CdrmixError for a damaged message.
        """
        if self.size == 1:
            return [item]
        store = rendezvous_store(self.rank, self.size)
        turn = store.add(f"turns of {self.rank}", 1)
        keys = [f"item {turn} of {rank}" for rank in range(self.size)]
        store.set(keys[self.rank], messages.encode(item))
        wait_for_all(store, keys, self.rank, what)
        items = [messages.read(store.get(key), f"process {rank}", what) for rank, key in enumerate(keys)]
        readers = [f"reader {turn} is {rank}" for rank in range(self.size)]
        store.set(readers[self.rank], "")
        if self.rank == 0:  # it may hold the store, so it waits until all have read
            wait_for_all(store, readers, self.rank, what)
            for key in (*keys, *readers):
                store.delete_key(key)
        return items


def join(config: Config) -> DistributedContext:
    """Joins the run's processes; sets the device, the threads and determinism.

    May be called again: the process group is created once and destroyed at exit.
    Raises ConfigError when the configured device is missing or cannot run the precision, or the processes cannot meet.
    """
    rank, size, local_rank, local_size = place()
    device = _device(config, local_rank)
    check_code_caches()
    set_num_threads(threads(config, local_size))
    be_deterministic(any_threads=config.model.kind == "cdrmix")
    keep_freed_memory()
    _join_process_group(rank, size, local_rank, device)
    train = config.train
    parallel = train.sequence_parallel, train.tensor_parallel, train.pipeline_parallel
    return DistributedContext(rank, size, local_rank, device, *parallel)


def check_shared(world: DistributedContext, path: Path, key: str) -> None:
    """Raises ConfigError in every process if one of them does not see a folder that the first process made.

    key: the one that names the folder.
    """
    found = wait_until(path.exists, SHARED_FOLDER_WAIT, lambda seconds: tell(seconds, f"{path} to be there"))
    names = world.gather("" if found else platform.node(), f"whether {path} exists")
    if machines := {name for name in names if name}:
        raise ConfigError(
            f"{key}: {path} of the first process does not exist on {', '.join(sorted(machines))}; all machines of a "
            "run must share this folder, under the same path"
        )


def any_threads(config: Config, device: torch.device) -> bool:
    """Whether the bits are independent of the number of CPU threads: on a GPU; for models of this package in float32
    with one-thread products. Reductions in models of transformers are split among the threads."""
    if device.type != "cpu":
        return True
    return config.model.kind == "cdrmix" and config.train.precision == "fp32" and multiplies_on_one_thread()


def thread_numbers(config: Config, world: DistributedContext) -> list[int]:
    """The numbers of CPU threads to choose from by measurement.

    One number where `run.threads` gives it, on a GPU, with several processes, which would slow one another, and where
    bits depend on the number.
    """
    most = threads(config, place().local_size)
    if config.run.threads or world.size > 1 or world.device.type != "cpu" or not any_threads(config, world.device):
        return [most]
    return candidates(most)


def _device(config: Config, local_rank: int) -> torch.device:
    if device_type(config.run.device) == "cpu":
        check_cpu(config.train.precision)
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--nproc: more processes than the {torch.cuda.device_count()} GPUs of this machine; "
            "each process needs one GPU"
        )
    device = torch.device("cuda", local_rank)
    check_gpu(device, config)
    torch.cuda.set_device(local_rank)
    return device


def _join_process_group(rank: int, size: int, local_rank: int, device: torch.device) -> None:
    # DeepSpeed calls PyTorch functions that are deprecated, at every step. A user cannot change that.
    warnings.filterwarnings("ignore", message=r"`torch\.(distributed|jit)\.\w+` is deprecated")
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # deepspeed reads it when first imported
    os.environ.setdefault("LOCAL_RANK", str(local_rank))  # deepspeed requires it
    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_initialized():
        if dist.get_backend() != backend:
            raise ConfigError(f"run.device: {device.type}, but this process already runs over {dist.get_backend()}")
        return
    import deepspeed  # imported here: it reads DS_ACCELERATOR, and its import takes a second

    # Its functions keep the process group that exists at its import as their default, so none may exist: see _leave.
    import torch.distributed.nn.functional  # noqa: F401
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # Otherwise DeepSpeed compiles a shared-memory operator at the first start, which takes 40 s; gloo is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        store = rendezvous_store(rank, size)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        except (RuntimeError, ValueError, MemoryError) as error:  # the last for a length that gloo read there
            if isinstance(error, RuntimeError) and lost_peer(error):
                raise
            raise CdrmixError(
                f"process {rank} could not connect to the others by the addresses in the store of the run "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). Another program may have written "
                "there: see docs/security.md for the network that a run over several machines needs"
            ) from error
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    atexit.register(_leave)


def reduce_over_processes(values: Tensor, processes: int, operation: Literal["sum", "max"]) -> Tensor:
    """The sum or the maximum of `values` over the processes of a run, on the CPU. Every process must call it.

    A group that has NCCL alone reduces no CPU tensors: there the values travel through the process's GPU.
    """
    if processes > 1:
        values = values.to(collective_device())
        dist.all_reduce(values, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
    return values.cpu()


def collective_device() -> torch.device:
    """The device on which this run's process group reduces tensors: the current GPU under NCCL, else the CPU."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _leave() -> None:
    """Destroys the process groups, and waits for the threads of gloo.

    A thread may still hold the tensors of the last collective. To free them it needs the interpreter's lock. CPython
    ends a thread that asks for it while the interpreter is ending, and in C++ code that aborts the process (SIGABRT).
    A group joins its threads when it is freed, so nothing may refer to one: neither deepspeed.utils.groups, nor an
    engine, which is part of reference cycles. The hooks of ZeRO keep theirs alive: see launch.exit_worker.
    """
    from deepspeed import comm
    from deepspeed.utils import groups

    groups.mpu = None
    # A peer may have ended already. This process is ending too, so the error does not matter.
    with contextlib.suppress(RuntimeError, ValueError):
        if dist.is_initialized():
            comm.destroy_process_group()
    gc.collect()
