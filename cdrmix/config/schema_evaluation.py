"""The schema of the section `evaluation`: suites that are measured on checkpoints while the training goes on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdrmix.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Text


class Evaluation(Section):
    """Suites that `cdrmix eval watch` measures on the checkpoints of the run, in a process of low priority. The
    training starts this process and never waits for it between steps. No key changes the weights."""

    suites: list[Text] = []
    """Suites, such as code. []: none, and no process is started."""
    start: bool = True
    """Start the process with the training. false: it is started by hand, perhaps on another machine."""
    every: PositiveInt | None = None
    """Steps between two evaluated checkpoints; a multiple of train.checkpoint_every. The last checkpoint is evaluated
    too. null: every periodic checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Device of the evaluated model. On the GPU of the training it takes memory and time from the training."""
    threads: PositiveInt = 1
    """CPU cores of the process and of the programs that it runs."""
    niceness: Annotated[int, Field(ge=0, le=19)] = 19
    """Priority of the process, as of the command nice. 19: the lowest; while other processes use all processors, the
    evaluation hardly goes on. 10: about a tenth of a busy processor."""
    seed: NonNegativeInt = 1
    """Seed of the generated texts."""
    samples: PositiveInt = 1
    """Texts for each problem."""
    limit: PositiveInt | None = None
    """Problems of each set, at most. null: all."""
    temperature: NonNegativeFloat = 0.2
    """Sampling temperature. Above 0 if samples is above 1."""
    max_new_tokens: PositiveInt = 256
    """Tokens of a text, at most."""
    sets: Text | None = None
    """Folder with wheels of data sets, in addition to installed packages."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Time limit of a generated program."""
    megabytes: Annotated[int, Field(ge=64, le=1 << 20)] = 512
    """Memory of a generated program in MiB."""
    allow_unsafe: bool = False
    """Run generated programs even where this machine cannot confine them."""
    canaries: Text | None = None
    """File of canaries of the suite leak: one JSON object on each line."""
    policy: Text | None = None
    """File of forbidden texts of the suite leak: one JSON object on each line."""
    verbatim_tokens: PositiveInt = 32
    """Tokens that count as a verbatim continuation in the suite leak."""
    max_tokens: PositiveInt | None = None
    """Tokens of held-out text, at most, of the evaluations of a run at its start and end and of `cdrmix eval`, in rows
    that are spread evenly. null: all."""
    timeout: PositiveFloat = 14400.0
    """Seconds after which the evaluation of a suite on a checkpoint is ended and recorded as failed."""
    wait: NonNegativeFloat = 600.0
    """Seconds that the end of the run waits for the evaluation of the last checkpoint."""
