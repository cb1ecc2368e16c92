"""Which members hold up a job's steps, and where they are slow: in computing, in encoding, on their link, or, of a server, in its sums. Pure.

From the members' last reports alone, which are of their last steps. What each of them tells is of its own clock:

- A worker: for how long of a step its training thread does not wait for psgc (compute), for how long it waits for its own encoding and decoding (encode), and
  for how long it waits altogether. All steps take equally long on all ranks, so whoever computes longer waits less.
- A server: for how long of a step it awaits each rank's contributions, beyond the others'. What neither computing nor encoding explains of that is the rank's
  link, if what it sends, or is sent, is on its way for longer than the others'. (Behind a slow server ranks queue, so that the last of them is late as well.)
- A worker, of each server: for which share of the time it has something there. The rank that comes last waits for no other, so the least of all ranks' is the
  server's own time and its link's. It is the server's if its sums, or its loop, are under way for as long; else its link's.

Nobody is named unless the others wait for as long as half of that; so a rank that waits for another is not, nor anybody where ranks do not wait for each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from psgc.observe.others import beyond_others
from psgc.wire.reports import MOST_NAMES, Report

Where = Literal["compute", "encode", "link", "server"]
CLEAR_SHARE: Final = 0.15  # of a step: who is slower than the others by less is not named
LEAST_MS: Final = 3.0  # and by less than this: threads take as long to wake up on a busy machine
ALONE_SHARE: Final = 0.5  # of the time, for the only server of a job, which no other can be compared with
LOOP_FULL: Final = 0.8  # share of the time from which on a server's loop counts as what holds it up


@dataclass(frozen=True, slots=True)
class Slow:
    """A member that the others wait for in most steps. member: as everywhere, ``rank 3``; ms: by how much of a step it is beyond the others; share: that, of a
    step; why: the figures that say so."""

    member: str
    where: Where
    ms: float
    share: float
    why: str

    @property
    def text(self) -> str:
        return f"{self.member} is slow ({self.where}): {self.why}"


def slow_members(workers: Mapping[int, Report], servers: Mapping[int, Report]) -> tuple[Slow, ...]:
    """Who is slow, the slowest first. workers, servers: last reports by rank and index, of members that are there and have been heard lately."""
    known = {rank: report for rank, report in workers.items() if report.compute_us or report.waits_us}
    if not known:
        return ()
    step_ms = statistics.median((report.compute_us + report.waits_us) / 1e3 for report in known.values())
    if step_ms <= 0:
        return ()
    found = [*_slow_ranks(known, servers, step_ms), *_slow_servers(known, servers, step_ms)]
    return tuple(sorted(found, key=lambda slow: -slow.ms))


def _slow_ranks(workers: Mapping[int, Report], servers: Mapping[int, Report], step_ms: float) -> Iterator[Slow]:
    compute = {rank: report.compute_us / 1e3 for rank, report in workers.items()}
    encode = {rank: report.coding_us / 1e3 for rank, report in workers.items()}
    more_compute, more_encode = beyond_others(compute), beyond_others(encode)
    late, longer_ms = _late(servers, step_ms)
    sends = {rank: max((share for _, _, share in report.servers.values()), default=0.0) * step_ms for rank, report in workers.items()}
    more_sends = beyond_others(sends)
    waits = sorted(report.waits_us / 1e3 for report in workers.values())
    for rank in more_compute:
        computes, encodes = more_compute[rank], more_encode[rank]
        link = late.get(rank, 0.0) - computes - encodes
        if more_sends[rank] + longer_ms.get(rank, 0.0) < link / 2:
            link = 0.0
        each: tuple[tuple[float, Where], ...] = (computes, "compute"), (encodes, "encode"), (link, "link")
        ms, where = max(each, key=lambda one: one[0])
        others_wait = _upper_median_without(waits, workers[rank].waits_us / 1e3)
        if ms < max(CLEAR_SHARE * step_ms, LEAST_MS) or others_wait < ms / 2:
            continue
        if where == "compute":
            why = f"it computes for {compute[rank]:.0f} ms of a step, {ms:.0f} ms more than others"
        elif where == "encode":
            why = f"it waits for its own encoding and decoding for {encode[rank]:.0f} ms of a step, {ms:.0f} ms more than others"
        else:
            own = f", of which computing and encoding longer are {computes + encodes:.0f} ms" if computes + encodes >= 1 else ""
            why = f"servers await its gradients for {late[rank]:.0f} ms of a step longer than others'{own}"
        yield Slow(f"rank {rank}", where, ms, ms / step_ms, why)


def _late(servers: Mapping[int, Report], step_ms: float) -> tuple[dict[int, float], dict[int, float]]:
    """By rank, at the server where that is most: how late it is, and for how long of a step results to it are on their way beyond the others'. In ms."""
    late: dict[int, float] = {}
    longer: dict[int, float] = {}
    for report in servers.values():
        for name, (ms, share) in report.late.items():
            if name.isdecimal():
                rank = int(name)
                late[rank], longer[rank] = max(late.get(rank, 0.0), float(ms)), max(longer.get(rank, 0.0), share * step_ms)
    return late, longer


def _upper_median_without(ordered: list[float], value: float) -> float:
    """The upper median of the others: of two others it is enough that one waits. ordered: all values, ascending, ``value`` among them."""
    others = len(ordered) - 1
    middle = others // 2
    return ordered[middle + 1] if value <= ordered[middle] else ordered[middle]


def _slow_servers(workers: Mapping[int, Report], servers: Mapping[int, Report], step_ms: float) -> Iterator[Slow]:
    busy, moved = _at_servers(workers)
    waits = statistics.median_high(report.waits_us / 1e3 for report in workers.values())
    if len(servers) == 1 and len(busy) == 1:
        ((index, report),) = servers.items()
        share = report.sums_permille / 1e3
        if share < ALONE_SHARE and report.loop_permille / 1e3 >= LOOP_FULL:
            share = busy.get(index, 0.0)
        if share >= ALONE_SHARE and share * step_ms >= LEAST_MS and waits >= share * step_ms / 2:
            yield Slow(f"server {index}", "server", share * step_ms, share, _work_of(report))
        return
    sums = beyond_others({index: report.sums_permille / 1e3 for index, report in servers.items() if index in busy})
    for index in busy if len(busy) > 1 else ():
        others = sorted((busy[other], moved[other]) for other in busy if other != index)
        their_share, their_bytes = others[(len(others) - 1) // 2]
        # A server that holds more may take longer by as much; one that holds less has no reason to.
        share = busy[index] - their_share * max(
            1.0, moved[index] / their_bytes if their_bytes >= 1.0 else 1.0
        )  # of less than a byte a second no ratio tells
        ms = share * step_ms
        if ms < max(CLEAR_SHARE * step_ms, LEAST_MS) or waits < ms / 2 or index not in servers:
            continue
        report = servers[index]
        itself = sums.get(index, 0.0) >= share / 2 or report.loop_permille / 1e3 >= LOOP_FULL
        there_ms = busy[index] * step_ms
        why = f"ranks have something there for {there_ms:.0f} ms of a step, {ms:.0f} ms more than at others; {_work_of(report)}"
        yield Slow(f"server {index}", "server" if itself else "link", ms, share, why)


def _at_servers(workers: Mapping[int, Report]) -> tuple[dict[int, float], dict[int, float]]:
    """By server, the least share of the time in which a rank has something there, and the bytes that the rank with the least exchanges with it in a second, of
    those that tell of it. A rank tells of some servers only (``shortened``): at any other it has something for no longer than at each of these."""
    busy: dict[int, float] = {}
    moved: dict[int, float] = {}
    for report in workers.values():
        for server, (share, nbytes, _) in report.servers.items():
            if server.isdecimal() and share < busy.get(int(server), 2.0):
                busy[int(server)], moved[int(server)] = share, nbytes
    partial = [report.servers for report in workers.values() if len(report.servers) >= MOST_NAMES]
    at_most = sorted(((min(share for share, _, _ in told.values()), told) for told in partial), key=lambda one: one[0])
    # Each finds the first that does not tell of it: many ranks and servers cost no more than all that they tell.
    for index, share in busy.items():
        busy[index] = min(share, next((most for most, told in at_most if str(index) not in told), share))
    return busy, moved


def _work_of(report: Report) -> str:
    return f"its sums are under way for {report.sums_permille / 1e3:.0%} of the time, its loop for {report.loop_permille / 1e3:.0%}"
