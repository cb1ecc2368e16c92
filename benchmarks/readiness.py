"""What it costs to be ready for a server's death: steps under PSGC_ON_SERVER_LOSS=restart against stop, in turns.

    python benchmarks/readiness.py --minutes 4

Each pair is two jobs of ``psgc bench pushpull`` (sums are checked), whose order alternates. Prints medians, and of the pairs' ratios median and quartiles.
On a busy machine the quartiles say that it means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

CASES = {
    "25 MB, none": ["--bytes", "25000000", "--transport", "shm", "--rounds", "60"],
    "1 MB, onebit": ["--bytes", "1000000", "--transport", "shm", "--codec", "onebit", "--rounds", "300"],
    "4 KB, none": ["--bytes", "4096", "--transport", "shm", "--rounds", "1000"],
}
MODES = ("restart", "stop")


def median_ms(case: list[str], mode: str) -> float:
    command = [sys.executable, "-m", "psgc", "bench", "pushpull", "--workers", "2", "--servers", "1", "--json", *case]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PSGC_ON_SERVER_LOSS": mode})
    return float(json.loads(ran.stdout)["median_ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="in all")
    given = parser.parse_args()
    for name, case in CASES.items():
        until, found = time.monotonic() + 60 * given.minutes / len(CASES), {mode: [] for mode in MODES}
        while time.monotonic() < until or len(found["stop"]) < 2:
            for mode in MODES if len(found["stop"]) % 2 else MODES[::-1]:
                found[mode].append(median_ms(case, mode))
        ratios = [restart / stop for restart, stop in zip(*found.values(), strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        restart, stop = (statistics.median(times) for times in found.values())
        print(
            f"{name}: restart {restart:.3f} ms, stop {stop:.3f} ms, {len(ratios)} pairs, ratio {middle:.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
