"""Builds the C++ extensions that a file is a part of, in the folder of the project:

python tests/mutations/build_extensions.py csrc/words.hpp
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import setuptools


def parts(source: Path) -> set[Path]:
    """A file of csrc/, and the files there that it includes."""
    included = re.findall(r'^#include "(.+)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    return {source}.union(*(parts(source.with_name(name)) for name in included))


def main() -> None:
    """Runs setup.py of the current folder with these extensions alone."""
    changed, setup = Path(sys.argv[1]), setuptools.setup

    def set_up(**arguments: Any) -> None:
        extensions = arguments.pop("ext_modules")
        affected = [each for each in extensions if any(changed in parts(Path(name)) for name in each.sources)]
        setup(**arguments, ext_modules=affected)

    setuptools.setup = set_up
    sys.argv = ["setup.py", "-q", "build_ext", "--inplace", "--force"]
    runpy.run_path("setup.py")


if __name__ == "__main__":
    main()
