"""An interrupt while the command line is imported is told in one line."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys
from cdrmix import entry
class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "cdrmix.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
sys.exit(entry.train_main())
"""


def test_an_interrupt_before_the_command_begins() -> None:
    """It printed a traceback, or a panic of a compiled package that was being imported."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "cdrmix: interrupted\n")
