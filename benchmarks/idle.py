"""CPU of an idle scheduler and server: a complete job whose only worker sleeps.  python benchmarks/idle.py [--seconds 20]"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

WORKER = """
import sys, time
from psgc.config import Config
from psgc.worker.cluster import ClusterSession
session = ClusterSession.open(Config.from_env())
print("joined", flush=True)
time.sleep(float(sys.argv[1]))
session.close()
"""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def roles(launcher: int) -> dict[str, int]:
    """Pids of the launcher's scheduler and server."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == launcher and "psgc.launch.job.role" in words:
                found[words[words.index("psgc.launch.job.role") + 1]] = int(entry.name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    command = [
        sys.executable,
        "-m",
        "psgc.launch",
        "run",
        "--no-prefix",
        "--workers",
        "1",
        "--",
        sys.executable,
        "-c",
        WORKER,
        str(seconds + 5),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "joined\n"
        time.sleep(2)
        pids = roles(job.pid)
        before = {role: cpu_seconds(pid) for role, pid in pids.items()}
        start = time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - start
        used = {role: cpu_seconds(pid) - before[role] for role, pid in pids.items()}
    for role, cpu in used.items():
        print(f"{role:10} {cpu / elapsed:7.2%} of a core")
    print(f"{'together':10} {sum(used.values()) / elapsed:7.2%} of a core over {elapsed:.0f} s")


if __name__ == "__main__":
    main()
