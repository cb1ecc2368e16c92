"""What a job promises after what has been done to its members, and whether it kept that. Pure: knows exit statuses and lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from psgc.errors import UsageError


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the job. said: lines of stdout; last: the last line of stderr; left: processes of it that were still there after its end; killed: ranks of
    which a process was killed."""

    status: int
    said: Sequence[str]
    last: str = ""
    left: Sequence[str] = field(default=())
    killed: Collection[str] = ()


_RANK = re.compile(r"\[worker (\d+)\]|\brank (\d+)\b")  # how lines begin under `psgc run`, and how scripts say it themselves


def results_of(run: Run, pattern: re.Pattern[str]) -> Counter[str]:
    """The lines by which two runs are compared, whatever process they come from first: from where the pattern fits on."""
    return Counter(found.group() for line in run.said if (found := pattern.search(line)))


def last_of_ranks(run: Run, pattern: re.Pattern[str]) -> dict[str, str]:
    """By rank, the last of its lines by which runs are compared; by "" of lines that do not say whose they are."""
    found = {}
    for line in run.said:
        if fits := pattern.search(line):
            rank = _RANK.search(line)
            found["" if rank is None else rank[1] or rank[2]] = fits.group()
    return found


def reference_of(run: Run, pattern: re.Pattern[str], stuck: str = "") -> Run:
    """The undisturbed run. stuck: why it was given up. Raises UsageError where it cannot be a reference."""
    if stuck:
        raise UsageError(f"chaos: undisturbed, {stuck}; name lines that it prints, or raise --limit")
    if run.status:
        raise UsageError(f"chaos: the job fails by itself, with status {run.status}: {run.last}")
    if not results_of(run, pattern):
        raise UsageError(
            f"chaos: --result {pattern.pattern!r} fits no line of the job's output; have it print a digest of its losses and weights, or name its line"
        )
    return run


def fatal(killed: Mapping[str, Mapping[str, str]]) -> str:
    """Why a job may end that had members of these roles killed, by the policies that these were started with; empty if it goes on."""
    for role, name in (("server", "PSGC_ON_SERVER_LOSS"), ("scheduler", "PSGC_ON_SCHEDULER_LOSS")):
        if _policy(killed, role, name) == "stop":
            return f"{name}=stop"
    return (
        "a worker's death ends the job" if "worker" in killed and _policy(killed, "worker", "PSGC_ON_WORKER_LOSS") in ("", "stop") else ""
    )


def shrunk(killed: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether means were of those that lived."""
    return _policy(killed, "worker", "PSGC_ON_WORKER_LOSS") == "shrink"


def starts_again(killed: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether the launcher may start the whole job again that had members killed (PSGC_RESTARTS)."""
    return any(env.get("PSGC_RESTART", "").strip() for env in killed.values())


def _policy(killed: Mapping[str, Mapping[str, str]], role: str, name: str) -> str:
    return killed.get(role, {}).get(name, "").strip().lower()


def broken(run: Run, reference: Run, pattern: re.Pattern[str], ends: str, shrinks: bool = False, again: bool = False) -> list[str]:
    """The promises that the run broke, as sentences. ends: why it was to end, by policy; empty: it was to go on. shrinks: the mean was to be over the living,
    so that results may differ from the undisturbed ones, but not between ranks. again: a job that was to end may have been started again instead, with the
    results that its script's checkpoint leads to."""
    found = [f"a process was left: {left}" for left in run.left]
    if ends:
        if not run.status:
            found += [] if again else [f"the job ended in order, but {ends}"]
        elif not run.last.strip() or run.last.startswith((" ", "Traceback")):
            found.append(f"the job's last line does not say why it ended: {run.last!r}")
        return found
    if run.status:
        found.append(f"the job ended with status {run.status}: {run.last}")
    elif shrinks:
        found += apart(run, reference, pattern)
    elif (results := results_of(run, pattern)) != (wanted := results_of(reference, pattern)):
        lost, other = wanted - results, results - wanted
        found.append(f"results differ: undisturbed {_some(lost)}, disturbed {_some(other)}")
    return found


def apart(run: Run, reference: Run, pattern: re.Pattern[str]) -> list[str]:
    """What ranks that were to have one result in the end, as in the reference, have otherwise; and whether some that came to the end have none."""
    found, wanted = last_of_ranks(run, pattern), last_of_ranks(reference, pattern)
    if not found:
        return ["no rank has printed a result"]
    if "" in found or "" in wanted:  # lines are compared as they are, where one line was all that ranks had to say
        if len(results_of(reference, pattern)) == 1 < len(results := results_of(run, pattern)):
            return [f"ranks' results differ: {_some(results)}"]
        return []
    if len(set(wanted.values())) == 1 < len(set(found.values())):
        return [f"ranks' results differ: {'; '.join(f'rank {rank} {result}' for rank, result in sorted(found.items()))[:300]}"]
    return [f"rank {rank}, which was not killed, has printed no result" for rank in sorted(wanted.keys() - found.keys() - set(run.killed))]


def _some(lines: Counter[str]) -> str:
    return "; ".join(sorted(lines))[:300] or "nothing more"
