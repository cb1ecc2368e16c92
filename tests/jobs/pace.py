"""A job that says its steps waits for the test that reads them: what is done to it at a step is done before it has gone much further, however late the test
reads. `tests/launch/killing.py` has the other end.
"""

from __future__ import annotations

import os
import time
from typing import Final

ALLOWED: Final = "TESTS_ALLOWED"  # a file whose size is the last step that may be taken; where none is named the job waits for nobody


def wait_for_readers(step: int) -> None:
    """Call it before a step, counted from 1."""
    path = os.environ.get(ALLOWED)
    while path and os.stat(path).st_size < step:
        time.sleep(0.002)
