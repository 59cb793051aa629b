"""Evaluates models with lm-eval, the evaluation harness of EleutherAI, on its tasks: `cdrmix eval --harness`.

The network is not used unless it is asked for. The tasks, their prompts and metrics are those of lm-eval. The model
answers by `HarnessModel`, so a run needs no export. The results are those of lm-eval's own class for the export.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdrmix.durable import write_atomically
from cdrmix.errors import ConfigError, CorpusError
from cdrmix.hf import harness_tasks
from cdrmix.hf.harness_model import Continuation, HarnessModel
from cdrmix.inference.sampling import Sampling
from cdrmix.registry import nearest
from cdrmix.run_folder import environment, finite

MISSING = "--harness needs the package lm-eval: pip install 'cdrmix[harness]'"
SEED = 1234  # of few-shot examples, NumPy and PyTorch, as in lm-eval; that of `random` is 0
NEW_TOKENS = 256  # of a continuation, if the task does not say
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of the same limit
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Names of tasks, groups and tags in the YAML files of lm-eval; entries of lists too, so there are more.
# White space within a line: \s would read the empty lines after it again from each of them.
_BLANK = r"[^\S\r\n]*"
NAMED = re.compile(
    rf"^{_BLANK}(?:-{_BLANK})?[\"']?(?:(?:task|group|tag)[\"']?:{_BLANK})?[\"']?([\w.+/-]+)[\"']?{_BLANK}\r?$",
    re.MULTILINE,
)

_BETTER: dict[bool | None, str] = {True: "higher", False: "lower"}


@dataclass(frozen=True)
class HarnessScore:
    """A result of a task or group, as lm-eval gives it.

    filter: how the answers were made comparable. standard_error: None if lm-eval has none for the metric. better:
    higher or lower. few_shot: examples in the prompt. documents: evaluated ones; None for a group.
    """

    task: str
    metric: str
    filter: str
    value: float
    standard_error: float | None
    better: str | None
    few_shot: int | None
    documents: int | None
    version: float | str | None


@dataclass(frozen=True)
class HarnessScores:
    """The scores of a model. full: the results as lm-eval returns them, with every document and answer."""

    model: str
    step: int
    scores: tuple[HarnessScore, ...]
    full: dict[str, Any] = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """The scores as JSON data."""
        scores = [finite(asdict(score)) for score in self.scores]
        return {"model": self.model, "step": self.step, "scores": scores}

    def table(self) -> str:
        """The scores as aligned lines; an arrow tells whether higher or lower is better."""
        header = ("task", "metric", "value", "standard error", "few-shot", "documents")
        arrows = {"higher": " ↑", "lower": " ↓", None: ""}
        rows: list[tuple[str, ...]] = [header]
        for score in self.scores:
            metric = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
            error = "-" if score.standard_error is None else f"{score.standard_error:.4f}"
            counts = ["-" if number is None else f"{number:,}" for number in (score.few_shot, score.documents)]
            rows.append((score.task, metric + arrows[score.better], f"{score.value:.4f}", error, *counts))
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = [
            "  ".join(
                text.ljust(width) if column < 2 else text.rjust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)

    def write(self, path: Path) -> None:
        """Writes the full results of lm-eval as JSON."""
        from lm_eval.utils import handle_non_serializable

        write_atomically(path, json.dumps(self.full, indent=2, default=handle_non_serializable) + "\n")


def check_installed() -> None:
    """Raises ConfigError with the remedy if lm-eval cannot be imported."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{MISSING} ({error})") from error


def evaluate_with_harness(
    model: HarnessModel,
    tasks: Sequence[str],
    *,
    name: str,
    step: int,
    held_out: Callable[[], Iterable[str]],
    include: Path | None = None,
    limit: int | None = None,
    few_shot: int | None = None,
    online: bool = False,
    say: Callable[[str], None],
) -> HarnessScores:
    """The scores of a model in tasks, groups or tags of lm-eval, of a folder, and of cdrmix (`harness_tasks.NAMES`).

    name, step: of the model, for the results. held_out: gives the held-out texts, for the task cdrmix_held_out.
    include: a folder with task files; they may name Python functions, which are run. limit: documents of each task.
    few_shot: examples in the prompt of tasks that do not fix their number. online: data may be downloaded.
    Raises ConfigError for an unknown task and one that cannot be used, CorpusError if data are not on this machine.
    """
    check_installed()
    from lm_eval.evaluator import evaluate

    if include is not None and not include.is_dir():
        raise ConfigError(f"--include {include}: there is no such folder; name a folder with task files (YAML)")
    with tempfile.TemporaryDirectory(prefix="cdrmix-harness-") as temporary, _quiet(online):
        random.seed(0)  # tasks may shuffle the choices of a question
        np.random.seed(SEED)  # noqa: NPY002
        torch.manual_seed(SEED)
        of_cdrmix = [each for each in dict.fromkeys(tasks) if each in harness_tasks.NAMES]
        harness_tasks.write_tasks(of_cdrmix, Path(temporary), held_out)
        folders = [Path(temporary), *([] if include is None else [include])]
        loaded = _load(tasks, folders, online, say)
        _set_few_shot(loaded["tasks"], few_shot)
        full = dict(evaluate(language_model(model), loaded, limit=limit))
    full["config"] = {
        "model": name,
        "model_step": step,
        "max_length": model.max_length,
        "batch_size": model.batch_size,
        "limit": limit,
        "random_seed": 0,
        "numpy_seed": SEED,
        "torch_seed": SEED,
        "fewshot_seed": SEED,
    }
    full["environment"] = environment(("cdrmix", "torch", "transformers", "datasets", "lm_eval"))
    return HarnessScores(name, step, tuple(_scores(full)), full)


def _load(tasks: Sequence[str], folders: Sequence[Path], online: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """The tasks and groups, as lm-eval's TaskManager.load returns them."""
    manager = _index(tasks, folders, say)
    for task in tasks:
        if task not in manager.all_tasks:
            known = {*manager.all_tasks, *harness_tasks.NAMES}
            close = nearest(task, known) or nearest(task, _shipped_names())
            hint = f"; did you mean {close!r}?" if close else ""
            raise ConfigError(
                f"--harness: there is no task {task!r}{hint}. A task is one of lm-eval, of the files in --include, or "
                f"of cdrmix: {', '.join(harness_tasks.NAMES)}"
            )
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for task in tasks:
        try:
            parts = manager.load([task])
        except OSError as error:
            remedy = "" if online else "; copy them to this machine, or allow the download with --online"
            raise CorpusError(f"--harness: no data for the task {task}: {_first(error)}{remedy}") from error
        except Exception as error:  # task files name any Python function, so anything can be raised
            raise ConfigError(
                f"--harness: lm-eval cannot make the task {task}: {type(error).__name__}: {_first(error)}"
            ) from error
        for part, entries in parts.items():
            loaded[part] |= entries
    for task, made in loaded["tasks"].items():
        if getattr(made, "UNSAFE_CODE", False):
            raise ConfigError(f"--harness: the task {task} runs code that the model writes; cdrmix does not")
        if getattr(made, "MULTIMODAL", False):
            raise ConfigError(f"--harness: the task {task} has images or sounds; the model reads text only")
    return loaded


def _index(tasks: Sequence[str], folders: Sequence[Path], say: Callable[[str], None]) -> Any:
    """A TaskManager that knows the tasks, if the folders or lm-eval have them.

    lm-eval's own index of all its tasks takes most of a minute. So only the folders are read that have these names and
    those of the members of groups.
    """
    from lm_eval.tasks import TaskManager

    shipped: set[Path] = set()
    while True:
        manager = TaskManager(include_path=[*sorted(shipped), *folders], include_defaults=False)
        missing = _members(manager.task_index, tasks) - set(manager.all_tasks)
        if not missing:
            return manager
        if not shipped:
            say("reading the names of the tasks of lm-eval")
        found = {folder for name in missing for folder in _shipped_names().get(name, ())}
        if found <= shipped:
            return manager
        shipped |= found


def _members(index: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """The names, and those of the members of their groups, and so on. index: entries of lm-eval by name."""
    found: set[str] = set()
    left = [*names]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            described = index[name].cfg if name in index else None
            members = (described or {}).get("task")
            if isinstance(members, list):  # of a group: names, or mappings that change a task or group
                named = (each if isinstance(each, str) else each.get("task", each.get("group")) for each in members)
                left.extend(each for each in named if isinstance(each, str))
    return found


@cache
def _shipped_names() -> dict[str, set[Path]]:
    """Names in the YAML files of lm-eval, and the folders of tasks that have them."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    names: dict[str, set[Path]] = {}
    for path in root.rglob("*.yaml"):
        folder = root / path.relative_to(root).parts[0]
        for name in NAMED.findall(path.read_text(encoding="utf-8", errors="replace")):
            names.setdefault(name, set()).add(folder)
    return names


def _set_few_shot(tasks: dict[str, Any], few_shot: int | None) -> None:
    """The rule of lm-eval: a task that says 0 keeps it; 0 is also the default."""
    for task in tasks.values():
        own = task.get_config("num_fewshot")
        if few_shot is not None and own != 0:
            task.set_config(key="num_fewshot", value=few_shot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)


def language_model(model: HarnessModel) -> Any:
    """The model with the interface of lm-eval."""
    made = language_model_class()
    return made(model)


@cache
def language_model_class() -> Any:
    """The class of the interface of lm-eval; an object is made of a HarnessModel. Here, because lm-eval is optional."""
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class CdrmixLM(LM):
        """Answers the requests of lm-eval; `args` of a request are texts."""

        def __init__(self, model: HarnessModel) -> None:
            super().__init__()
            self._model = model

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            found = self._model.likelihoods([self._model.pair(*request.args) for request in requests])
            return [(likelihood.nats, likelihood.greedy) for likelihood in found]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            model, pairs, owners = self._model, [], []
            for number, request in enumerate(requests):
                ids = model.tokenizer.encode(request.args[0])
                for window in get_rolling_token_windows(ids, model.first_id, model.max_length, context_len=1):
                    pairs.append(make_disjoint_window(window))
                    owners.append(number)
            sums = [0.0] * len(requests)
            for number, likelihood in zip(owners, model.likelihoods(pairs), strict=True):
                sums[number] += likelihood.nats
            return sums

        def generate_until(self, requests: list[Any]) -> list[str]:
            asked = [Continuation(request.args[0], _sampling(request.args[1], n)) for n, request in enumerate(requests)]
            return self._model.continuations(asked)

    return CdrmixLM


def _sampling(arguments: dict[str, Any], number: int) -> Sampling:
    """The generation_kwargs of a task as Sampling. Greedy unless do_sample, or a temperature without do_sample.

    Raises ConfigError for a key that cdrmix does not know, and for a value that it cannot use.
    """
    known = {"until", "do_sample", *LENGTHS, *SAMPLING}
    if unknown := sorted(arguments.keys() - known):
        raise ConfigError(
            f"--harness: generation_kwargs of a task have {unknown[0]!r}; cdrmix knows {', '.join(sorted(known))}"
        )
    until = arguments.get("until") or []
    if not isinstance(until, str | list | tuple):
        raise _unusable("until", until, "a string or a list of strings")
    name, length = next(
        ((name, arguments[name]) for name in LENGTHS if arguments.get(name) is not None), ("", NEW_TOKENS)
    )
    try:
        tokens = int(length)
    except (ValueError, TypeError, OverflowError) as error:
        raise _unusable(name, length, "a number of tokens") from error
    values = {name: arguments[name] for name in SAMPLING if arguments.get(name) is not None}
    values.setdefault("temperature", 1.0 if arguments.get("do_sample") else 0.0)
    if not arguments.get("do_sample", values["temperature"] > 0):
        values["temperature"] = 0.0
    stop = [until] if isinstance(until, str) else until
    return Sampling(
        **{"top_p": 1.0, **values}, max_new_tokens=tokens, stop=[text for text in stop if text], seed=SEED + number
    )


def _unusable(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"--harness: generation_kwargs of a task have {name}: {value!r}; allowed: {allowed}")


def _scores(full: dict[str, Any]) -> Iterator[HarnessScore]:
    """The metrics in lm-eval's results, whose keys are `metric,filter` and `metric_stderr,filter`."""
    results = full["results"] | full.get("groups", {})
    for task, values in results.items():
        higher = full["higher_is_better"].get(task) or {}
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            yield HarnessScore(
                task=task,
                metric=metric,
                filter=filtered,
                value=float(value),
                standard_error=float(error) if isinstance(error, int | float) else None,
                better=_BETTER.get(higher.get(metric)),
                few_shot=full["n-shot"].get(task),
                documents=full["n-samples"].get(task, {}).get("effective"),
                version=full["versions"].get(task),
            )


@contextlib.contextmanager
def _quiet(online: bool) -> Iterator[None]:
    """Without progress bars and advice of lm-eval; without the network unless `online`."""
    import datasets
    import huggingface_hub.constants

    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    variables = {name: os.environ.get(name) for name in names}
    modules = ((datasets.config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE"))
    settings = [getattr(module, name) for module, name in modules]
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    if not online:
        os.environ.update(dict.fromkeys(names, "1"))
        for module, name in modules:
            setattr(module, name, True)
    try:
        yield
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        for (module, name), value in zip(modules, settings, strict=True):
            setattr(module, name, value)
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def _first(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
