"""Runs the tests that failed once more, by themselves, and says at the end which they were and what became of them.

Exit status 0 if all of them pass now. Tests of real processes have low limits, and a machine that others use may be slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def failed() -> list[str]:
    """Tests that failed when they last ran, by name."""
    return sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.is_file() else []


def main() -> int:
    first = failed()
    if not first:
        sys.stdout.write("the tests' command failed, but no test did: nothing is run again\n")
        return 1
    status = subprocess.run([sys.executable, "-m", "pytest", "-m", "not long", "--last-failed", *sys.argv[1:]], check=False).returncode
    still = set(failed())
    sys.stdout.write(f"\n{len(first)} tests failed and were run again, once each:\n")
    for name in first:
        sys.stdout.write(f"  {name}: {'failed again' if name in still else 'passed the second time'}\n")
    sys.stdout.write(f"{len(first) - len(still)} passed the second time, {len(still)} failed twice\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
