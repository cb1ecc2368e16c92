"""A worker that runs examples/train_digits.py once with each codec, in one job. Run by tests; arguments: a folder, steps, codecs.

The records are written to the folder as 0.json, 1.json, ..., one a codec.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_digits

import psgc.torch as psgc


def main() -> None:
    folder, steps, *codecs = sys.argv[1:]
    leave, psgc.shutdown = psgc.shutdown, lambda: None  # a process joins and leaves a job once
    for number, codec in enumerate(codecs):
        sys.argv = ["train_digits.py", "--steps", steps, "--codec", codec, "--out", str(Path(folder) / f"{number}.json")]
        train_digits.main()
    leave()


if __name__ == "__main__":
    main()
