"""`cdrmix data`: prepare and inspect from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main

Arguments = Callable[..., list[str]]


def test_prepare_prints_the_folder_that_inspect_takes(
    arguments: Arguments, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", *arguments()]) == 0
    folder = capsys.readouterr().out.splitlines()[-1]
    assert (Path(folder) / "report" / "report.html").is_file()
    assert main(["data", "inspect", folder, "--split", "valid", "--row", "0", "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "=== document 0 begins (text, " in out
    assert "\x1b" not in out  # no terminal
    assert main(["data", "inspect", folder, "--row", "99999"]) == 2
    assert "cdrmix: error: --row: train has no row 99999; allowed: 0 to " in capsys.readouterr().err
    assert main(["data", "inspect", folder, "--domain", "txet"]) == 2
    assert "Did you mean 'text'?" in capsys.readouterr().err
    assert main(["data", "inspect", str(workspace)]) == 4
    assert "no finished shards" in capsys.readouterr().err


def test_each_takes_its_own_arguments(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", "SHARDS", "data.row_length=3"]) == 2
    assert "`cdrmix data inspect --help`" in capsys.readouterr().err
    assert main(["data", "prepare", *arguments(), "--row", "3"]) == 2
    assert "`cdrmix data prepare --help`" in capsys.readouterr().err
    for command in (["data"], ["data", "prepare"], ["data", "inspect"], ["data", "inspect", "SHARDS", "--rows", "0"]):
        with pytest.raises(SystemExit) as stopped:
            main(command)
        assert stopped.value.code == 2
    for command, expected in (
        (["data"], "inspect"),
        (["data", "prepare"], "--config"),
        (["data", "inspect"], "--domain"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([*command, "--help"])
        assert stopped.value.code == 0
        assert expected in capsys.readouterr().out
