"""The average of the weights of a run's last checkpoints."""

from __future__ import annotations

from torch import Tensor

from cdrmix.inference.checkpoints import list_checkpoints, read_weights, step_of
from cdrmix.run_folder import RunFolder


def average_weights(run: RunFolder, step: int, number: int) -> tuple[dict[str, Tensor], list[int]]:
    """The mean of the weights of the last `number` checkpoints up to `step`, and their steps; fewer, if there are.

    The mean is computed in float64 and rounded once. What is no floating-point number is that of the newest.
    Raises CheckpointError if one of them is damaged.
    """
    chosen = [each for each in list_checkpoints(run.checkpoints) if step_of(each) <= step][-number:]
    newest = read_weights(chosen[-1])
    totals = {name: weight.double() for name, weight in newest.items() if weight.is_floating_point()}
    for checkpoint in chosen[:-1]:
        for name, weight in read_weights(checkpoint).items():
            if name in totals:
                totals[name] += weight
    means = {name: (total / len(chosen)).to(newest[name].dtype) for name, total in totals.items()}
    return newest | means, [step_of(checkpoint) for checkpoint in chosen]
