"""The processes of a job on this machine: found among the descendants of its launcher, by the variables that these were started with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from psgc.launch.supervision.spares import MODULE, TITLE
from psgc.transport.host import pid_started


@dataclass(frozen=True, slots=True)
class Process:
    """One process, ever: pids are used again."""

    pid: int
    started: int

    @property
    def runs(self) -> bool:
        """Whether it is there, and no zombie."""
        return self.started != 0 and pid_started(self.pid) == self.started

    @property
    def title(self) -> str:
        """Its command line, for people."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
        except OSError:
            return ""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a job. role: DMLC_ROLE; name: as its launcher calls it."""

    process: Process
    role: str
    name: str


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    below: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(int(entry))) is not None:
            below.setdefault(parent, []).append(int(entry))
    found, open_ = [], [pid]
    while open_:
        children = below.get(open_.pop(), [])
        found += children
        open_ += children
    return found


def environment(pid: int) -> dict[str, str]:
    """What it was started with; nothing for other users' processes."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0"))
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs if name}


def members_of(pids: list[int]) -> list[Member]:
    """Those of these processes that are members of a job, and not processes which members have started: in the order of role and name."""
    found = []
    for pid in pids:
        started, env = pid_started(pid), environment(pid)
        if _was_spare(pid):
            if started and (rank := _place_taken(pid)):
                found.append(Member(Process(pid, started), "worker", f"worker {rank}"))
            continue
        role = env.get("DMLC_ROLE", "")
        if not started or role not in ("worker", "server", "scheduler") or not _leads(pid) or "PSGC_LAUNCHER" not in env:
            continue
        if role == "scheduler":
            name = role
        elif role == "server":
            name = f"server {env.get('DMLC_SERVER_ID', '0')}"
        else:
            name = f"worker {env.get('RANK') or env.get('BYTEPS_LOCAL_RANK', '0')}"
        found.append(Member(Process(pid, started), role, name))
    own = {member.process.pid: member.name for member in found}  # what a member starts is none itself
    found = [member for member in found if own.get(_parent(member.process.pid) or 0) != member.name]
    return sorted(found, key=lambda member: (member.role, len(member.name), member.name))


def _was_spare(pid: int) -> bool:
    """Whether it was started to take a dead worker's place, and waits for that or has done so."""
    try:
        return MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _place_taken(pid: int) -> str:
    """The rank of a process that has taken a dead worker's place; "" while it waits for one."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
    return name.removeprefix(TITLE) if name.startswith(TITLE) else ""


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _leads(pid: int) -> bool:
    """Whether it leads its session, as launchers start their children."""
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False
