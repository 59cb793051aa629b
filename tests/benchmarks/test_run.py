"""The benchmarks' own promises: targets for every case, whole rows, few imports, and a plan for a GPU machine."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import machine
import measure
import pytest
import run
import smoke
import torch
import yaml

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
# Its programs find each other as neighbours, which the tests' PYTHONSAFEPATH would forbid.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}


def test_every_case_has_targets_and_every_target_a_case() -> None:
    targets = yaml.safe_load((BENCHMARKS / "targets.yaml").read_text())
    assert set(targets) == set(cases.SUITES)
    sys.path.insert(0, str(BENCHMARKS))
    for suite in cases.SUITES:
        assert set(targets[suite]) == set(cases.cases(suite)), suite
        for name, bounds in targets[suite].items():
            for figure, bound in bounds.items():
                assert set(bound) <= {"least", "most", "gpu", "by_gpu", "goals"}, f"{suite}/{name}/{figure}"
                assert {"least", "most", "by_gpu"} & set(bound)
                for its_own in bound.get("by_gpu", {}).values():
                    assert set(its_own) <= {"least", "most", "goals"}, f"{suite}/{name}/{figure}"
                    assert {"least", "most"} & set(its_own)
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.slow
def test_a_small_case_from_the_command_line_to_its_row(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import machine, run, wkv7
machine.measured_rates = lambda device: {{"bytes_per_second": 1e10, "flops_per_second": 1e11}}  # which takes seconds
tiny = {{"cpu_tiny": wkv7.Shape(1, 33, 1, 32)}}
wkv7.CASES = wkv7.comparison.cases_of(tiny, "cpu", wkv7.measure, wkv7.about)
sys.exit(run.main())
"""
    arguments = ["--suite", "wkv7", "--case", "cpu_tiny_training", "--blocks", "2", "--without", "32", "--results"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, tmp_path],
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"CDRMIX_BACKEND": "reference"},
    )
    assert done.returncode in (0, 1), done.stderr
    (line,) = (tmp_path / "wkv7.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["settings"]["backend"] == "reference"
    assert {"commit", "machine", "versions", "load", "ours", "ratio", "samples", "targets"} <= set(row)
    assert row["samples"] == 2
    assert row["absent"]["PyTorch, chunks of 32"] == "left out by --without"
    assert "rwkv" in row["absent"]
    measured = row["peers"]
    assert {"cdrmix", "PyTorch, chunks of 16", "PyTorch, token by token"} <= set(measured)
    for found in measured.values():
        assert found["milliseconds"]["p20"] <= found["milliseconds"]["p50"] <= found["milliseconds"]["p80"]
        assert set(found["errors"]) == {"y", "dr", "dlog_w", "dk", "dv", "da", "db"}
        assert max(found["errors"].values()) < 1e-5
        assert (found["saved_bytes"] > 0) == (found is not measured["cdrmix"])  # ours, as the reference, recomputes
    assert row["roofline"]["least_bytes"] == 20 * 33 * 32 * 4
    assert row["roofline"]["flops"] == 35 * 33 * 32**2
    assert row["roofline"]["measured"]["share"] > 0
    assert row["targets"]["speed_over_naive"]["found"] == row["figures"]["speed_over_naive"]


def test_a_target_is_met_missed_not_measured_or_for_another_machine() -> None:
    assert run.check(2.0, {"most": 2.5}, None)["met"] is True
    assert run.check(3.0, {"most": 2.5}, None)["met"] is False
    assert run.check(float("nan"), {"most": 2.5}, None)["met"] is False
    assert run.check(None, {"least": 20}, None) == {"least": 20, "found": None, "met": None}
    assert run.check(2.0, {"most": 2.5, "gpu": "H200"}, "NVIDIA H100 80GB HBM3")["met"] == "elsewhere"
    assert run.check(2.0, {"most": 2.5, "gpu": "H200"}, "NVIDIA H200")["met"] is True
    assert run.finite({"a": [float("inf"), 1.0]}) == {"a": [None, 1.0]}


@pytest.mark.slow
def test_the_kernel_suites_need_no_more_than_a_bare_gpu_machine_has() -> None:
    code = f"""
import sys
absent = {{"pydantic", "transformers", "deepspeed", "datasets", "pyarrow", "tokenizers", "safetensors", "zstandard",
          "huggingface_hub", "matplotlib", "hypothesis", "numba"}}
finders = list(sys.meta_path)
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in absent:
            return next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)
sys.meta_path[:] = [Hide()]
sys.path.insert(0, {str(BENCHMARKS)!r})
import run, smallest, smoke
for options in ("--suite wkv7 --list", "--suite moe --list", "--suite trainer --dry"):
    sys.argv[1:] = options.split()
    try:
        print("exit code", run.main(), flush=True)
    except SystemExit as error:
        print("exit code", error.code, flush=True)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    first, second, refused = re.findall(r"(.*?)exit code (\w+)\n", done.stdout, re.DOTALL)
    assert "wkv7/h32_k64_training (cuda)" in first[0]
    assert "moe/swiglu_training (cuda)" in second[0]
    assert [code for _, code in (first, second, refused)] == ["0", "0", "2"]
    assert "is not installed; name another with --suite" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu_the_gpu_is_asked_for() -> None:
    command = [sys.executable, BENCHMARKS / "run.py", "--suite", "wkv7", "--device", "cuda"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert "no GPU found" in done.stderr


def test_the_commit_comes_from_the_environment_where_git_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_git", lambda *_: None)
    monkeypatch.setenv("CDRMIX_COMMIT", "0123456789ab")
    assert machine.commit() == "0123456789ab"
    monkeypatch.delenv("CDRMIX_COMMIT")
    assert machine.commit() == "unknown"


def test_saved_bytes_are_of_distinct_storages_beside_inputs_and_output() -> None:
    x = torch.randn(10, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x.exp()  # saves its result
        return (y * y).sin()  # saves y twice, and y * y

    assert measure.kept_for_backward(forward, [x]) == 2 * 40


@pytest.mark.slow
def test_peak_memory_is_what_a_call_took_at_once() -> None:
    """Two blocks of 64 MiB, one after the other, also where malloc has kept as much from before."""
    code = f"""
import sys, torch
sys.path.insert(0, {str(BENCHMARKS)!r})
import measure
small = [torch.ones(1 << 14) for _ in range(1 << 10)]
del small
def one_at_a_time():
    for _ in range(2):
        torch.ones(1 << 24)
print(measure.peak_of_process(one_at_a_time))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=ENVIRONMENT)
    printed = done.stdout.strip()
    # Not exact: Linux counts pages some hundred KB late, and may take pages of program code back meanwhile.
    assert printed == "None" or 0.9 < int(printed) / (1 << 26) < 1.5


def test_a_peer_that_takes_too_long_is_stopped() -> None:
    def endless() -> None:
        with measure.time_limit(0.01):
            while True:
                pass

    with pytest.raises(TimeoutError):
        endless()


def gpu_sh(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(BENCHMARKS / "gpu.sh"), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT | variables)


def test_the_plan_for_a_gpu_names_every_gpu_case(tmp_path: Path) -> None:
    plan = gpu_sh("--dry", 9, tmp_path)
    assert plan.returncode == 0, plan.stderr
    steps = [line.split()[0] for line in plan.stdout.splitlines()]
    assert steps[:4] == ["smoke", "wkv7/h32_k64_training", "moe/swiglu_training", "moe/relu2_training"]
    suites = {
        name: importlib.import_module(module)
        for name, module in cases.SUITES.items()
        if name not in ("trainer", "train", "aot", "data")
    }
    on_gpu = {
        f"{suite}/{name}" for suite in suites for name, case in suites[suite].CASES.items() if "cuda" in case.devices
    }
    on_gpu |= {f"train/{name}" for name in ("compiled_1b", "loose_1b")}
    on_gpu |= {f"train/{name}" for name in ("core_1b", "core_tiny", "dense_1b", "reference_1b")}
    assert {step for step in steps if "/" in step} == on_gpu
    assert gpu_sh("--dry", 9, tmp_path, "tests").stdout.split()[0] == "tests"
    assert gpu_sh(9, tmp_path, "nonsense").returncode == 2
    assert not list(tmp_path.iterdir())


def test_what_comes_first_on_a_gpu_takes_45_minutes_in_calls_of_nine(tmp_path: Path) -> None:
    plan = gpu_sh("--dry", 9, tmp_path)
    first, _, rest = plan.stdout.partition("if time is left:\n")
    steps = [
        re.fullmatch(r"(\S+) +at most +(\d+) s +until +(\d+) min +call +(\d+)  .*", line) for line in first.splitlines()
    ]
    found = [(step[1], *map(int, step.groups()[1:])) for step in steps if step]
    assert len(found) == len(steps)
    assert len(rest.splitlines()) > 50
    wanted = ["train/core_1b", "train/core_tiny", "train/dense_1b", "tests", "trainer_tests", "ce/v50k_training"]
    assert [name for name, *_ in found][4:] == [*wanted, "scan/h32_k64_training", "memcheck", "moe_memcheck"]
    assert gpu_sh("--dry", 10, tmp_path).returncode == 0
    assert found[-1][2] <= 45
    assert found[-1][3] <= 5
    for call in range(1, 6):
        assert sum(limit for _, limit, _, at in found if at == call) <= 9 * 60 - 5
    # Calls in which too little fits take more than 45 minutes, or cannot hold a step at all.
    for minutes, complaint in ((6, "more than 2700"), (3, "more than a call of 3 minutes")):
        refused = gpu_sh("--dry", minutes, tmp_path)
        assert refused.returncode == 1
        assert complaint in refused.stderr


def test_the_smoke_of_a_family_is_close_to_float64_and_says_when_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")  # which it changes
    make = smoke.FAMILIES["projection"]
    assert smoke.check("projection", torch.device("cpu"))
    for factor, verdict in ((1.001, "NOT CLOSE"), (float("nan"), "NOT FINITE")):

        def broken(sizes: Any, normal: Any, factor: float = factor) -> Any:
            leaves, outputs = make(sizes, normal)
            return leaves, lambda x: [y * (factor if y.dtype == torch.float32 else 1) for y in outputs(x)]

        monkeypatch.setitem(smoke.FAMILIES, "projection", broken)
        assert not smoke.check("projection", torch.device("cpu"))
        assert verdict in capsys.readouterr().out


@pytest.mark.slow
def test_steps_that_fail_or_take_too_long_do_not_stop_the_others(tmp_path: Path) -> None:
    """With a stand-in for python: a case that leaves no row is run again without peers, a row outlives its failure."""
    python = tmp_path / "python"
    python.write_text("""#!/usr/bin/env bash
results=$(sed -n "s/.*--results \\([^ ]*\\).*/\\1/p" <<<"$*")
case "$*" in
    *smallest.py*) exit 7 ;;
    *h32_k64_training*) echo '{"a": 1}' >>"$results/wkv7.jsonl"; exit 1 ;;
    *packed_training*--without*) echo '{"b": 2}' >>"$results/wkv7.jsonl" ;;
    *packed_training*) exit 1 ;;
    *core-1b-12*) echo '{"c": 3}' >>"$results/train.jsonl"; exit 1 ;;
    *core-1b*) exit 8 ;;
esac
""")
    python.chmod(0o755)
    out = tmp_path / "out"
    steps = ("train/core_1b", "tests", "wkv7/h32_k64_training", "smallest", "wkv7/packed_training", "wkv7/long_forward")
    done = gpu_sh(9, out, *steps, PYTHON=str(python), WHEELS=str(tmp_path / "none"))
    assert done.returncode == 1, done.stderr
    found = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [(step["step"], step["outcome"]) for step in found] == [
        ("wkv7/h32_k64_training", "target missed"),
        ("train/core_1b", "target missed"),  # of half of the model, since the whole one did not fit
        ("tests", "passed"),
        ("smallest", "failed with 7"),
        ("wkv7/packed_training", "failed with 1"),
        ("wkv7/packed_training", "passed"),
        ("wkv7/long_forward", "passed"),
    ]
    assert (out / "wkv7.jsonl").read_text() == '{"a": 1}\n{"b": 2}\n'
    for minutes in (0, 1):  # a step of 270 s is not begun in one
        done = gpu_sh(minutes, out, "train/core_1b", PYTHON=str(python))
        assert done.stdout.split()[:4] == ["train/core_1b", "no", "time", "left"]
        assert f"gpu.sh {minutes} {out} train/core_1b" in done.stdout


@pytest.mark.parametrize(("megabytes", "code"), [(1, 0), (70, 1)])
def test_the_wheels_for_a_gpu_are_named_and_refused_beyond_64_mib(tmp_path: Path, megabytes: int, code: int) -> None:
    """With a stand-in for pip, which notes how it was called."""
    python = tmp_path / "python"
    python.write_text(f"""#!/usr/bin/env bash
echo "$DS_ACCELERATOR $*" >>{tmp_path}/calls
folder=$(sed -n 's/.*--\\(dest\\|wheel-dir\\) \\([^ ]*\\).*/\\2/p' <<<"$*")
case "$*" in
    *download*) truncate -s {megabytes}M "$folder/pydantic-9.whl" ;;
    *) truncate -s 1M "$folder/deepspeed-9.whl" ;;
esac
""")
    python.chmod(0o755)
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "left-over.whl").touch()
    command = ["bash", str(BENCHMARKS / "gpu_wheels.sh"), str(folder)]
    variables = {"PYTHON": str(python), "CDRMIX_PYTHON": ""}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT | variables)
    assert done.returncode == code, done.stderr
    assert {path.name for path in folder.iterdir()} == {"commit", "pydantic-9.whl", "deepspeed-9.whl"}
    assert f"{megabytes + 1:8.2f} MiB in {folder}, of 64" in done.stdout
    assert "1.00 MiB  deepspeed-9.whl" in done.stdout
    download, build = (tmp_path / "calls").read_text().splitlines()
    for wanted in ("--python-version 3.12", "--only-binary=:all:", "zstandard", "pytest-timeout", "fla-core"):
        assert wanted in download
    assert build.startswith("cpu ")  # DeepSpeed's setup would else look for nvcc
