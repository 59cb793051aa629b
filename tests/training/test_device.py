"""GPUs that cannot be used: build, driver, kernels, precision; PyTorch's answers are put in its mouth."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cdrmix import runtime as device
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.kernels.common import triton_helpers
from cdrmix.runtime import check_gpu, device_type

GPU = torch.device("cuda", 0)
CONFIG = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"


def of_precision(precision: str, *overrides: str) -> Config:
    return Config.from_yaml(CONFIG, [f"train.precision={precision}", *overrides])


@pytest.fixture(autouse=True)
def forgets() -> None:
    triton_helpers.architecture.cache_clear()


def without_gpu(monkeypatch: pytest.MonkeyPatch, cuda: str | None, hip: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)


def test_auto_is_the_cpu_where_no_gpu_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch, "12.8")
    assert device_type("auto") == device_type("cpu") == "cpu"


@pytest.mark.parametrize(("maker", "kind"), [("NVIDIA", "CUDA"), ("AMD", "ROCm")])
def test_a_cpu_build_beside_a_driver(maker: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_gpu(monkeypatch, None)
    monkeypatch.setattr(device, "DEVICE_FILES", {maker: tmp_path})
    with pytest.raises(ConfigError, match=f"is a CPU build, but an {maker} driver is loaded.*{kind} build"):
        device_type("cuda")


def test_a_cpu_build_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_gpu(monkeypatch, None)
    monkeypatch.setattr(device, "DEVICE_FILES", {"NVIDIA": tmp_path / "nothing"})
    with pytest.raises(ConfigError, match=r"is a CPU build.*set run.device .* to auto or cpu"):
        device_type("cuda")


def test_a_driver_too_old_for_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch, "12.8")

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(ConfigError, match=r"too old \(found version 11040\) \(PyTorch .* is built for 12.8\)") as found:
        device_type("cuda")
    assert found.value.exit_code == 2


def test_an_amd_gpu_that_the_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI210")
    names = iter(["gfx90a:sramecc+:xnack-", "gfx942:sramecc+:xnack-"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=next(names)))
    monkeypatch.delenv("CDRMIX_BACKEND", raising=False)
    with pytest.raises(ConfigError, match=r"AMD Instinct MI210, has AMD's architecture gfx90a.*gfx942.*reference"):
        check_gpu(GPU, of_precision("bf16"))
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    check_gpu(GPU, of_precision("bf16"))
    monkeypatch.delenv("CDRMIX_BACKEND")
    check_gpu(GPU, of_precision("bf16"))  # gfx942
    assert triton_helpers.architecture(GPU) == "gfx942"


def test_bf16_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(
        ConfigError, match=r"is bf16, but Tesla T4 does not support bfloat16: .* capability 7\.5.*fp16 or fp32"
    ):
        check_gpu(GPU, of_precision("bf16"))
    check_gpu(GPU, of_precision("fp16"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_gpu(GPU, of_precision("bf16"))


def test_a_head_size_that_no_kernel_of_a_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    narrow = of_precision("fp32", "model.rwkv.head_size=16")
    monkeypatch.delenv("CDRMIX_BACKEND", raising=False)
    with pytest.raises(ConfigError, match=r"head_size is 16; on a GPU it must be one of 32, 64, 128\. Set one of them"):
        check_gpu(GPU, narrow)
    check_gpu(GPU, of_precision("fp32", "model.rwkv.head_size=32"))
    check_gpu(GPU, of_precision("fp32", "model.rwkv.head_size=16", "model.attention_fraction=1.0"))  # no RWKV-7
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    check_gpu(GPU, narrow)
