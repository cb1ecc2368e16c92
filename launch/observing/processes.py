"""A job's processes on this machine, by what /proc shows of them: of this user's processes only, unless root asks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def environment(pid: int) -> Mapping[str, str]:
    """What the process was started with; empty where it is gone, or another user's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries if b"=" in entry)


def command(pid: int) -> list[str]:
    """Its words; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def family(pid: int) -> list[int]:
    """The process and all that it has started, directly or not, as far as they live."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def members(job: str = "") -> list[int]:
    """Processes of a job, by PSGC_JOB, or of any job, and the launchers that have started them."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        env = environment(int(entry.name))
        if env.get("DMLC_PS_ROOT_URI") and (not job or env.get("PSGC_JOB") == job):
            found.add(int(entry.name))
    launchers = {parent for pid in found if (parent := _parent(pid)) not in found and any("psgc" in word for word in command(parent))}
    return sorted(found | launchers)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0
