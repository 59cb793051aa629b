"""`python -m cdrmix.cli`: the command line, and the worker processes of a launch."""

from __future__ import annotations

import sys

from cdrmix.cli import main
from cdrmix.training import launch

if __name__ == "__main__":
    if launch.is_worker():
        launch.exit_worker(main())
    sys.exit(main())
