"""Runs a job, does to its members what a schedule says, and takes down what became of it. The only module of chaos that touches processes' fates.

An event comes when the one before is over: when the member is back and workers have gone on. What is left of an event (a stopped process, slow connections)
is undone at the end, however that comes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Final

from psgc.errors import PsgcError
from psgc.launch.chaos import connections
from psgc.launch.chaos.members import Member, Process, descendants, environment, members_of
from psgc.launch.chaos.promises import Run
from psgc.launch.chaos.schedule import Event
from psgc.transport.host import pid_started

TURN_S: Final = 0.03
GONE_S: Final = 10.0  # after a job's end: how long its processes may take to be gone
TERM_S: Final = 20.0  # of a job that is given up, from SIGTERM to SIGKILL


@dataclass(slots=True)
class Blow:
    """An event that has happened. at_s: since the job's first step; recovered_s: until workers had gone on; None: not yet, or never. again: it is the kill
    that follows the event's own."""

    event: Event
    name: str
    at_s: float
    recovered_s: float | None = None
    note: str = ""
    again: bool = False

    @property
    def done(self) -> dict[str, str]:
        """What was done, and to whom."""
        kind, role = ("kill", self.event.again or self.event.role) if self.again else (self.event.kind, self.event.role)
        return {"kind": kind, "role": role}


@dataclass(slots=True)
class _Open:
    """An event that is not over. since: from when recovery counts; back: when the member was seen again; lines: of progress until then. seen: when the process
    in its place was seen; followed: it has been struck again, or need not be."""

    blow: Blow
    victim: Member
    since: float
    until: float
    undone: bool
    back: float | None = None
    lines: int = 0
    seen: float | None = None
    followed: bool = False


@dataclass(slots=True)
class Outcome:
    """run: as the promises see it; blows: in their order; stuck: why the job was given up; killed: by role that had members killed, what the first of them was
    started with."""

    run: Run
    blows: list[Blow]
    stuck: str = ""
    killed: dict[str, Mapping[str, str]] = field(default_factory=dict)


class _Lines:
    """The lines of a pipe, read by a thread."""

    def __init__(self, pipe: IO[str], fits: re.Pattern[str] | None = None) -> None:
        self.lines: list[str] = []
        self.progress = 0
        self._pipe, self._fits = pipe, fits
        self.thread = threading.Thread(target=self._read, name="psgc-chaos", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with self._pipe:
            for line in self._pipe:
                self.lines.append(line.rstrip("\n"))
                if self._fits is not None and self._fits.search(line):
                    self.progress += 1


class Running:
    """One run of a job. say: prints a line. limit_s: a job that does not go on for so long is given up. connected: connections may be touched."""

    def __init__(
        self, command: Sequence[str], progress: re.Pattern[str], limit_s: float, say: Callable[[str], None], connected: bool = False
    ) -> None:
        self._progress, self._limit_s, self._say, self._connected = progress, limit_s, say, connected
        try:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
            )
        except OSError as error:
            raise PsgcError(f"chaos: {command[0]} cannot be started: {error}") from None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._out, self._err = _Lines(self._popen.stdout, progress), _Lines(self._popen.stderr)
        self._seen: dict[Process, None] = {}  # every process of the job, whoever started it
        self._began = 0.0  # when it took its first step
        self._killed_ranks: set[str] = set()
        self._members: list[Member] = []
        self._open: list[_Open] = []
        self._outcome = Outcome(Run(0, ()), [])
        self._moved = time.monotonic()  # when there last was progress, and how much
        self._moves = 0

    def through(self, events: Sequence[Event]) -> Outcome:
        """To the job's end. Without events it is only watched."""
        try:
            self._await_first()
            self._began = last = time.monotonic()
            for event in events:
                if not self._wait_until(last + event.pause_s) or (not event.together and not self._settle()):
                    break
                self._strike(event)
                last = time.monotonic()
            while self._goes_on():
                self._turn()
        finally:
            self._undo()
            self._end()
        return self._outcome

    def _goes_on(self) -> bool:
        return self._popen.poll() is None and not self._outcome.stuck

    def _await_first(self) -> None:
        while self._goes_on() and not self._out.progress:
            self._turn()
        if self._goes_on():
            self._turn()  # whoever took it may have been no member yet when members were last looked for

    def _wait_until(self, when: float) -> bool:
        while self._goes_on() and time.monotonic() < when:
            self._turn()
        return self._goes_on()

    def _settle(self) -> bool:
        """Wait until all events are over."""
        while self._goes_on() and self._open:
            self._turn()
        return self._goes_on()

    def _turn(self) -> None:
        time.sleep(TURN_S)
        now = time.monotonic()
        pids = descendants(self._popen.pid)
        self._members = members_of(pids)
        for pid in (self._popen.pid, *pids):
            self._seen.setdefault(Process(pid, pid_started(pid)))
        if self._out.progress > self._moves:
            self._moves, self._moved = self._out.progress, now
        elif now - self._moved > self._limit_s:
            self._outcome.stuck = (
                f"the job has not gone on for {now - self._moved:.0f} s: no line in that time fits --progress {self._progress.pattern!r}"
            )
        for each in list(self._open):
            self._look_at(each, now)

    def _look_at(self, each: _Open, now: float) -> None:
        """Whether an event is over: its victim, or whoever took its place, is there, and as many lines as there are workers have been said since. Who says them
        is not asked: lines need not tell, and where only one worker speaks, its next steps are ones that all have taken."""
        if not each.undone:
            if now < each.until:
                return
            self._undo_one(each)
            each.since = now
        if each.back is None:
            other = next((member for member in self._members if member.name == each.victim.name), None)
            if other is None or (each.blow.event.kind == "kill" and other.process == each.victim.process):
                return
            if self._strikes_again(each, other, now):
                return
            if each.victim.role == "scheduler" and self._connected and not self._heard_of_everyone(other):
                return
            each.back, each.lines = now, self._out.progress
        workers = sum(member.role == "worker" for member in self._members)
        if self._out.progress - each.lines >= max(1, workers):
            each.blow.recovered_s = round(now - each.since, 3)
            self._open.remove(each)

    def _strikes_again(self, each: _Open, other: Member, now: float) -> bool:
        """Whether the event is to be followed by another kill while this process comes into the killed one's place, and is not over before. It is struck when
        that is due."""
        event = each.blow.event
        if event.again is None or each.followed or not other.process.runs:
            return False
        each.seen = each.seen or now
        if now - each.seen < event.again_s:
            return True
        victim = other if event.again == event.role else next((member for member in self._members if member.role == event.again), None)
        each.followed = True
        if victim is None or (victim is not other and any(victim.name == one.victim.name for one in self._open)):
            return False
        if victim is other:
            self._open.remove(each)
        self._kill(victim, Blow(event, victim.name, round(now - self._began, 3), note=f"while {other.name} comes back", again=True), now)
        return victim is other

    def _heard_of_everyone(self, scheduler: Member) -> bool:
        """Whether all other members have a connection to it."""
        found = self._connections(scheduler)
        for connection in found:
            connection.close()
        return len(found) >= len(self._members) - 1

    def _kill(self, victim: Member, blow: Blow, now: float) -> None:
        self._outcome.killed.setdefault(victim.role, environment(victim.process.pid) or os.environ)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.process.pid, signal.SIGKILL)
        if victim.role == "worker":
            self._killed_ranks.add(victim.name.removeprefix("worker "))
        self._note(_Open(blow, victim, now, now, undone=True, followed=blow.again), "")

    def _note(self, each: _Open, length: str) -> None:
        blow, victim = each.blow, each.victim
        self._say(
            f"{blow.at_s:7.1f} s: event {blow.event.number}: {blow.done['kind']} {victim.name} (pid {victim.process.pid}){length} {blow.note}".rstrip()
        )
        self._outcome.blows.append(blow)
        self._open.append(each)

    def _strike(self, event: Event) -> None:
        busy = {each.victim.name for each in self._open}
        candidates = [member for member in self._members if member.role == event.role and member.name not in busy and member.process.runs]
        if not candidates:
            return
        victim, now = candidates[event.of(len(candidates))], time.monotonic()
        blow = Blow(event, victim.name, round(now - self._began, 3))
        lasts = event.kind in ("stop", "slow")
        each = _Open(blow, victim, now, now + event.for_s, undone=not lasts)
        if event.kind == "kill":
            self._kill(victim, blow, now)
            return
        if event.kind == "stop":
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.process.pid, signal.SIGSTOP)
        else:
            found = self._connections(victim)
            count = connections.cut(found) if event.kind == "cut" else connections.slow(found, event.rate)
            blow.note = f"{count} connections"
        self._note(each, f" for {event.for_s:g} s" if lasts else "")

    def _connections(self, victim: Member) -> list[socket.socket]:
        return connections.connections_of(victim, [member for member in self._members if member.role != "worker"])

    def _undo_one(self, each: _Open) -> None:
        each.undone = True
        if not each.victim.process.runs:
            return
        if each.blow.event.kind == "stop":
            os.kill(each.victim.process.pid, signal.SIGCONT)
        elif each.blow.event.kind == "slow":
            connections.slow(self._connections(each.victim), None)

    def _undo(self) -> None:
        for each in self._open:
            if not each.undone:
                with contextlib.suppress(OSError):
                    self._undo_one(each)

    def _end(self) -> None:
        """Wait for the job's end; one that is given up, or whose watching was interrupted, is ended."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
            try:
                self._popen.wait(TERM_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        for lines in (self._out, self._err):
            lines.thread.join(GONE_S)
        deadline = time.monotonic() + GONE_S
        while (left := [process for process in self._seen if process.runs]) and time.monotonic() < deadline:
            time.sleep(TURN_S)
        last = next((line for line in reversed(self._err.lines) if line.strip()), "")
        status = self._popen.returncode
        self._outcome.run = Run(
            status if status >= 0 else 128 - status,
            self._out.lines,
            last,
            [f"pid {process.pid} ({process.title})" for process in left],
            self._killed_ranks,
        )
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    @property
    def last_lines(self) -> list[str]:
        """Of stderr, for whoever asks why."""
        return self._err.lines[-20:]


def can_touch_connections() -> str:
    """Why connections cannot be cut and slowed here; empty if they can."""
    probe = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.DEVNULL)
    try:
        connections.connections_of(Member(Process(probe.pid, 1), "server", "probe"), [])
        return connections.refused(probe.pid)
    except (OSError, AttributeError) as error:
        return str(error)
    finally:
        probe.kill()
        probe.wait()
