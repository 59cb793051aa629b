"""What the tests of the kernels share: a quick interpreter, and the implementations that serve a device."""

from __future__ import annotations

import contextlib

import pytest
import quick_interpreter

quick_interpreter.install()
with contextlib.suppress(ModuleNotFoundError):
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # no thread that stays after the bar of torch.compile's work


@pytest.fixture(params=["cpu", "reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def where(request: pytest.FixtureRequest) -> str:
    """An implementation; "triton" is its interpreter on a CPU, "cuda" the same kernels on a GPU."""
    return str(request.param)


@pytest.fixture(scope="module")
def device(where: str) -> str:
    return "cuda" if where == "cuda" else "cpu"


@pytest.fixture(autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`where` is in the environment during its tests."""
    if "where" in request.fixturenames:
        where = request.getfixturevalue("where")
        monkeypatch.setenv("CDRMIX_BACKEND", "triton" if where == "cuda" else where)
