"""What a job promises after what has been done to its members, and whether it kept that. Pure: knows exit statuses and lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from psgc.errors import UsageError


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the job. said: lines of stdout; last: the last line of stderr; left: processes of it that were still there after its end."""

    status: int
    said: Sequence[str]
    last: str = ""
    left: Sequence[str] = field(default=())


def results_of(run: Run, pattern: re.Pattern[str]) -> Counter[str]:
    """The lines by which two runs are compared, whatever process they come from first: from where the pattern fits on."""
    return Counter(found.group() for line in run.said if (found := pattern.search(line)))


def reference_of(run: Run, pattern: re.Pattern[str]) -> Counter[str]:
    """Of the undisturbed run. Raises UsageError where it cannot be a reference."""
    if run.status:
        raise UsageError(f"chaos: the job fails by itself, with status {run.status}: {run.last}")
    found = results_of(run, pattern)
    if not found:
        raise UsageError(
            f"chaos: --result {pattern.pattern!r} fits no line of the job's output; have it print a digest of its losses and weights, or name its line"
        )
    return found


def fatal(killed: Collection[str], env: Mapping[str, str]) -> str:
    """Why a job may end that had members of these roles killed, by its policies; empty if it goes on."""
    stops = {"server": "PSGC_ON_SERVER_LOSS", "scheduler": "PSGC_ON_SCHEDULER_LOSS"}
    for role, name in stops.items():
        if role in killed and env.get(name, "").strip() == "stop":
            return f"{name}=stop"
    if "worker" in killed and env.get("PSGC_ON_WORKER_LOSS", "").strip() in ("", "stop"):
        return "a worker's death ends the job"
    return ""


def broken(run: Run, reference: Counter[str], pattern: re.Pattern[str], ends: str, shrinks: bool = False) -> list[str]:
    """The promises that the run broke, as sentences. ends: why it was to end, by policy; empty: it was to go on. shrinks: the mean was to be over the living,
    so that results may differ."""
    found = [f"a process was left: {left}" for left in run.left]
    if ends:
        if not run.status:
            found.append(f"the job ended in order, but {ends}")
        elif not run.last.strip() or run.last.startswith((" ", "Traceback")):
            found.append(f"the job's last line does not say why it ended: {run.last!r}")
        return found
    if run.status:
        found.append(f"the job ended with status {run.status}: {run.last}")
    elif not shrinks and (results := results_of(run, pattern)) != reference:
        lost, other = reference - results, results - reference
        found.append(f"results differ: undisturbed {_some(lost)}, disturbed {_some(other)}")
    return found


def _some(lines: Counter[str]) -> str:
    return "; ".join(sorted(lines))[:300] or "nothing more"
