"""Evaluates trained models: on held-out text, on generated questions, and on tasks of lm-eval."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypedDict

from cdrmix.config.schema import Config
from cdrmix.config.schema_data import Tokenizer
from cdrmix.config.schema_model import Model
from cdrmix.data.prepare import prepare, same_text
from cdrmix.data.shards import ShardSet, open_shards
from cdrmix.durable import sha256_file
from cdrmix.errors import CdrmixError, ConfigError
from cdrmix.eval.changes import changes, text_table
from cdrmix.eval.documents import DocumentScores, score_documents
from cdrmix.eval.evaluation import Answerer, Scores, evaluate_by_length, evaluations
from cdrmix.eval.perplexity import HeldOut, held_out
from cdrmix.eval.suites import SUITES, Measure, Parts, Subject, SuiteOptions, SuiteResult, Writing, suites
from cdrmix.hf.harness import HarnessScores, check_installed, evaluate_with_harness
from cdrmix.hf.harness_model import HarnessModel, prompts_begin
from cdrmix.hf.load import LoadedForeign, is_plain, load_alone
from cdrmix.hf.tool_prompts import ToolFormat
from cdrmix.inference.checkpoints import MANIFEST, read_manifest, weight_files
from cdrmix.inference.generate import Row, decode, generate
from cdrmix.inference.load import SUMS, Loaded, Trained, pointed_checkpoint, read_sums, run_of, tokenizer_file
from cdrmix.inference.sampling import Sampling
from cdrmix.inference.text_model import TextModel
from cdrmix.kernels.common.products import set_num_threads
from cdrmix.run_folder import RunFolder


def evaluate_model(
    model: Path, config_path: Path | None = None, overrides: Sequence[str] = (), *, device: str | None = None
) -> HeldOut:
    """Evaluates the model of a run, checkpoint or export folder on held-out text.

    The text is that of the configuration of the model, or that of config_path and overrides. The tokenizer is that of
    the model. device: auto, cpu or cuda; it replaces run.device of the configuration.
    Progress of a preparation goes to standard error, so that standard output has the results only.
    """
    model = pointed_checkpoint(model)
    loaded = load_alone(model, device)
    shards, config = _text_of(model, loaded, config_path, overrides)
    return measure(loaded, shards, config)


def _text_of(
    model: Path, loaded: Loaded | LoadedForeign, config_path: Path | None, overrides: Sequence[str]
) -> tuple[ShardSet, Config]:
    """The prepared text of a model, or of config_path and overrides with its tokenizer, and the configuration.

    If no key that determines the text differs from those of the model, these are the shards of its run, as long as they
    exist: other threads or rows prepare nothing again, and the working folder does not matter.
    """
    if config_path is None and is_plain(model):
        raise ConfigError(f"{model} is not of cdrmix, so it has no text of its own: name a configuration by --config")
    folder = _folder(model)
    config = Config.from_yaml(config_path or folder / "config_snapshot.yaml", overrides)
    if not is_plain(model) and same_text(config, loaded.config):
        if (own := _own_shards(model, config)) is not None:
            return own, config
        if _base_exists(config):
            shards = prepare(config, say=to_standard_error)
            if shards.tokenizer_fingerprint == loaded.tokenizer.fingerprint:
                return shards, config
    tokenizer = Tokenizer(
        path=str(tokenizer_file(folder).resolve()),
        end_of_text=loaded.tokenizer.end_of_text,
        begin_of_text=loaded.tokenizer.begin_of_text,
        lossless=loaded.tokenizer.lossless,
    )
    data = config.data.model_copy(update={"tokenizer": tokenizer})
    section = loaded.model.section if isinstance(loaded, LoadedForeign) else loaded.config.model
    config = config.model_copy(update={"data": data, "model": section})
    return prepare(config, say=to_standard_error), config


def _own_shards(model: Path, config: Config) -> ShardSet | None:
    """The shards that the run of a model was trained on, where it recorded them or in data.cache; None without them."""
    folder = _folder(model).resolve()
    run = folder if (folder / "metrics.json").is_file() else folder.parent  # of an export in its run
    corpus = RunFolder(run, writes=False).summary().get("corpus", {})
    if (recorded := corpus.get("shards")) is None:
        return None
    for path in (Path(recorded), Path(config.data.cache).expanduser() / Path(recorded).name):
        index = path / "index.json"
        if index.is_file() and sha256_file(index) == corpus.get("index_sha256"):
            return open_shards(path)
    return None


def _base_exists(config: Config) -> bool:
    """Whether the folder model.path exists, if the configuration has one: a trained model does not need it."""
    model = config.model
    return isinstance(model, Model) or model.random is not None or model.folder is not None


def evaluate_tasks(
    model: Path,
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    count: int,
    seed: int,
    device: str | None = None,
) -> Scores:
    """Scores of the model in a run, checkpoint or export folder by task and length in tokens, with greedy generation.

    tasks: names or families of evaluations, or `all`. Progress goes to standard error.
    Raises ConfigError for an unknown task, and if no task has questions of these lengths.
    """
    names = evaluations(tasks)
    loaded = load_alone(model, device)
    scores = evaluate_by_length(
        names,
        lengths,
        _answerer(loaded),
        loaded.tokenizer,
        count=count,
        seed=seed,
        training_length=loaded.config.data.row_length,
        say=to_standard_error,
    )
    if all(score.problem for score in scores.scores):
        problems = "; ".join(scores.problems)
        raise ConfigError(f"--lengths: no evaluation has questions of these lengths; {problems}")
    return scores


def _harness_model(loaded: Loaded | LoadedForeign, batch_size: int, max_length: int | None) -> HarnessModel:
    """Log-likelihoods and texts of a model. max_length: tokens that it reads; None: the row length of its training."""
    return HarnessModel(
        loaded.model,
        loaded.tokenizer,
        begins=prompts_begin(loaded),
        max_length=max_length or loaded.config.data.row_length,
        batch_size=batch_size,
        say=to_standard_error,
    )


def _answerer(loaded: Loaded | LoadedForeign) -> Answerer:
    """Greedy answers of a model in batches."""

    def answer(prompts: Sequence[str], limits: Sequence[int]) -> list[str]:
        samplings = [Sampling(temperature=0.0, max_new_tokens=limit) for limit in limits]
        answers = [""] * len(prompts)
        for number, piece in generate(loaded.model, loaded.tokenizer, prompts, samplings):
            answers[number] += piece
        return answers

    return answer


def evaluate_suites(
    model: Path,
    names: Sequence[str],
    config_path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    options: SuiteOptions | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> list[SuiteResult]:
    """The results of evaluation suites on a run, checkpoint, export folder, or folder of transformers.

    names: of `cdrmix.eval.suites.SUITES`. config_path, overrides: the text of the model, as of `evaluate_model`.
    batch_size: sequences in one forward pass of log-likelihoods. max_length: as of `evaluate_harness`.
    threads: CPU threads of the model; None: as its configuration says.
    Progress goes to standard error.
    A suite that cannot measure anything here has one figure, with the reason.
    Raises ConfigError for an unknown suite, and CdrmixError, the reason of the first suite, if no suite can measure
    anything here.
    """
    chosen, model = suites(names), pointed_checkpoint(model)
    loaded = load_alone(model, device)
    if threads is not None:
        set_num_threads(threads)
    text = TextModel(loaded)

    @cache
    def prepared() -> tuple[ShardSet, Config]:
        return _text_of(model, loaded, config_path, overrides)

    def tokens(prompts: Sequence[Sequence[int]], new_tokens: int) -> Iterator[tuple[int, int]]:
        rows = [Row(list(ids), Sampling(temperature=0.0, max_new_tokens=new_tokens)) for ids in prompts]
        return decode(loaded.model, rows, loaded.tokenizer.vocab_size)

    def generate(prompts: Sequence[str], samples: int, writing: Writing) -> list[list[str]]:
        sampling = Sampling(
            temperature=writing.temperature,
            top_p=writing.top_p,
            seed=writing.seed,
            max_new_tokens=writing.max_new_tokens,
            stop=tuple(writing.stop),
        )
        return text.sample(list(prompts), samples, sampling, heal=True)

    def documents(split: Literal["train", "valid"]) -> Iterator[str]:
        shards, _ = prepared()
        chosen = shards.train if split == "train" else shards.valid
        return (each.decode("utf-8", errors="replace") for each in chosen.text())

    parts = Parts(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        config=loaded.config,
        step=loaded.step,
        answer=_answerer(loaded),
        decode=tokens,
        loss_model=loaded.loss_model,
        text=prepared,
        own_text=config_path is None and not overrides,
    )
    scorer = _harness_model(loaded, batch_size, max_length)

    def scored() -> DocumentScores:
        shards, config = prepared()
        return score_documents(loaded.loss_model(), shards.valid, **_rows(config), say=to_standard_error)

    subject = Subject(
        str(model),
        generate,
        lambda: documents("valid"),
        lambda: documents("train"),
        likelihoods=lambda pairs: scorer.likelihoods([scorer.pair(*pair) for pair in pairs]),
        max_length=scorer.max_length,
        documents=scored,
        tools=_tool_format(model, loaded),
        parts=parts,
    )
    results, problems = list[SuiteResult](), list[CdrmixError]()
    for name in chosen:
        try:
            results.append(SUITES[name](subject, options or SuiteOptions(), to_standard_error))
        except CdrmixError as error:  # the results of the other suites may have taken hours
            problems.append(error)
            results.append(SuiteResult(name, (Measure(name, problem=str(error)),)))
    if all(result.measures and all(each.value is None for each in result.measures) for result in results):
        raise problems[0] if problems else ConfigError(_reasons(results))
    about = {"path": str(model), "step": loaded.step, "weights": _weight_files(model, loaded.step)}
    return [dataclasses.replace(result, facts={**result.facts, "model": about}) for result in results]


def _reasons(results: Sequence[SuiteResult]) -> str:
    """Why nothing was measured: the reasons of each suite, each once."""
    told = []
    for result in results:
        reasons = dict.fromkeys(str(measure.problem) for measure in result.measures)
        told.append(f"--suite {result.suite}: nothing can be measured; {'; '.join(reasons)}")
    return "\n".join(told)


def _weight_files(model: Path, step: int) -> dict[str, str]:
    """The SHA-256 of the files of weights of a model, by name, so that its results can be told from another one's.

    Those that its checkpoint or export lists; {} for a folder of transformers.
    """
    model = pointed_checkpoint(model)
    if (model / SUMS).is_file():
        hashes = read_sums(model)
    elif is_plain(model):
        hashes = {}
    else:
        checkpoint = model if (model / MANIFEST).is_file() else run_of(model).checkpoints / f"step-{step:08d}"
        files = read_manifest(checkpoint)["files"]
        hashes = {name: files[name]["sha256"] for name in weight_files(files)}
    return {name: digest for name, digest in hashes.items() if name.endswith(".safetensors")}


def _tool_format(model: Path, loaded: Loaded | LoadedForeign) -> ToolFormat | None:
    """The format of a model for tools; None without a chat template that writes them."""
    try:
        return ToolFormat(loaded, loaded.folder if isinstance(loaded, LoadedForeign) else _folder(model))
    except ConfigError:
        return None


def _folder(model: Path) -> Path:
    """The export, or the run of a checkpoint."""
    return model if (model / "tokenizer.json").is_file() else run_of(model).path


def evaluate_harness(
    model: Path,
    tasks: Sequence[str],
    config_path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    include: Path | None = None,
    limit: int | None = None,
    few_shot: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    online: bool = False,
    device: str | None = None,
) -> HarnessScores:
    """Scores of a model in tasks of lm-eval. The model: as of cdrmix.load, or a folder of transformers.

    config_path, overrides: the text of the task cdrmix_held_out, as of `evaluate_model`. max_length: tokens that the
    model reads at most; by default those of a row in its training. The other arguments are those of
    `evaluate_with_harness`.
    """
    check_installed()
    loaded = load_alone(model, device)

    def held_out() -> Iterator[str]:
        shards, _ = _text_of(model, loaded, config_path, overrides)
        return (text.decode("utf-8") for text in shards.valid.text())

    return evaluate_with_harness(
        _harness_model(loaded, batch_size, max_length),
        tasks,
        name=str(model),
        step=loaded.step,
        held_out=held_out,
        include=include,
        limit=limit,
        few_shot=few_shot,
        online=online,
        say=to_standard_error,
    )


def measure(loaded: Trained, shards: ShardSet, config: Config) -> HeldOut:
    """The results of a model on the held-out split of shards, on evaluation.max_tokens of it at most."""
    return held_out(loaded.loss_model(), shards.valid, **_rows(config), say=to_standard_error)


def _rows(config: Config) -> _Rows:
    return {
        "row_length": config.data.row_length,
        "micro_batch_rows": config.train.micro_batch_rows,
        "max_tokens": config.evaluation.max_tokens,
    }


class _Rows(TypedDict):
    row_length: int
    micro_batch_rows: int
    max_tokens: int | None


def to_standard_error(text: str) -> None:
    """Prints progress, so that standard output has the results only."""
    print(text, file=sys.stderr, flush=True)


def held_out_table(figures: HeldOut) -> str:
    """The results as aligned lines of text."""
    ratio = figures.bits_per_byte / figures.unigram_bits_per_byte
    domains = text_table(changes(None, figures.as_json())) if figures.domains else []
    return "\n".join(
        [
            f"Held-out text: {figures.tokens:,} tokens, {figures.text_bytes:,} bytes",
            f"  {'':<12}{'bits per byte':>14}",
            f"  {'model':<12}{figures.bits_per_byte:>14.4f}   {ratio:.3f} of unigram; "
            f"perplexity per token {figures.perplexity:.3f}",
            f"  {'unigram':<12}{figures.unigram_bits_per_byte:>14.4f}",
            f"  {'gzip -9':<12}{figures.gzip9_bits_per_byte:>14.4f}",
            f"  {'zstd -19':<12}{figures.zstd19_bits_per_byte:>14.4f}",
            *(f"  {line}" for line in domains),
        ]
    )
