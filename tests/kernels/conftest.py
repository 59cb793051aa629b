"""The tests of the kernels run them in a quick interpreter."""

from __future__ import annotations

import quick_interpreter

quick_interpreter.install()
