"""Starts the processes of a job, watches them, and ends all of them when one fails; names the first fault.

Each child has a process group of its own, and no process of it is left behind. Knows nothing of what the processes compute. Single-threaded:
one selector over output pipes, keepers' sockets, reports and signals.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import IO, Any, Final

from psgc.diagnostics.report import Report
from psgc.launch.supervision.blame import Account, Blame, Weight
from psgc.launch.supervision.child import Child, live_groups
from psgc.launch.supervision.ending import Ending, Patience
from psgc.launch.supervision.ends import Ends
from psgc.launch.supervision.guard import Guard
from psgc.launch.supervision.keeper import Keeper
from psgc.launch.supervision.noting_relay import NotingRelay
from psgc.launch.supervision.relay import Relay, coloured
from psgc.launch.supervision.reports import Reports
from psgc.launch.supervision.sink import Sink
from psgc.launch.supervision.spared import Spared
from psgc.launch.supervision.spares import MODULE as SPARE
from psgc.launch.supervision.spares import Spares
from psgc.processes.descriptors import raise_limit

TURN_S: Final = 0.1  # polling interval for events without a signal: a group's last process is gone, a signal is due
DRAIN_S: Final = 1.0  # how long to wait for the end of output if a process outside the groups holds a pipe open
UNKILLABLE_S: Final = 10.0  # a process in the middle of a system call that does not return (a dead file server) outlives SIGKILL
HANDLED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Unrepeated(int):
    """A status that nobody should repeat, whichever it is: a signal to a launcher has ended the job."""


class Supervisor:
    """A context manager: start children, then ``run`` until all have ended. When the block is left, no process remains, even after an error.

    program: begins our own lines. prefix: whether children's lines begin with their names. absent: told of a worker that has ended by
    itself without having called init, for those who wait for it elsewhere. verdict: told of the reason of a failure, with its weight and the status, in
    place of the last line. interrupted: told of the first signal to us, before it is passed on.
    """

    def __init__(
        self, program: str, prefix: bool = True, patience: Patience | None = None, absent: Callable[[Child], None] | None = None,
        verdict: Callable[[Weight, str, int], None] | None = None, interrupted: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._absent, self._tell_interrupted = absent, interrupted
        self._tell_verdict = verdict
        self._program, self._prefix, self._patience = program, prefix, patience or Patience()
        self._out, self._err = Sink(sys.stdout, program), Sink(sys.stderr, program)
        self._said_lost: set[Sink] = set()
        self._ending = Ending(self._patience)
        self.children: list[Child] = []
        self._former: list[Child] = []  # processes in whose place others have been started
        self._spared, self._spares = Spared(), Spares()
        self._ends: dict[int, Ends] = {}  # by child's number
        self.blame = Blame()
        self._selector = selectors.DefaultSelector()
        self._failing = False  # a fault has come, and everyone is being ended
        self._unread_output = False
        self._interrupt = 0
        self._passed_on: set[int] = set()  # signals, to the workers
        self.final = False  # a signal has ended another launcher of the job, or nobody reads our output: it is not to be started again
        self._pending: list[int] = []  # signals that came and are not handled yet
        self._saving: set[int] = set()  # numbers of the children that are writing a checkpoint
        self._before: dict[int, Any] = {}
        self._signalled = False  # whether one of the due signals was sent
        self._give_up_at = float("inf")

    def __enter__(self) -> Supervisor:
        raise_limit()  # pipes and kept memory of every child; children start with what we have
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._reports = Reports()
        self._selector.register(self._reports.socket, selectors.EVENT_READ, self._reports)
        self._wake_before = signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._before = {n: signal.signal(n, self._note) for n in HANDLED_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # only so that it wakes the selector
        self._guard = Guard()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kill_what_is_left()
        for child in self._all:
            child.close()
        self._guard.close()
        signal.set_wakeup_fd(self._wake_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._selector.close()
        self._reports.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, who: str = "", service: bool = False,
        keep_memory: bool = False, pass_fds: Iterable[int] = (), cores: Iterable[int] = (), stdin: int = subprocess.DEVNULL,
        notes: Callable[[str], None] | None = None, replaced: bool = False, spared: Callable[[], bool] | None = None,
        estate: Sequence[IO[bytes] | socket.socket] = (), before: Sequence[str] = (),
    ) -> Child:  # fmt: skip
        """Start one process in a session of its own. before: words before the command, which a spare process in its place does without. who: in sentences;
        default: its name, until it has joined as some rank. keep_memory: it is a server, which may be started again; ``pass_fds`` stay open until the job's
        end. replaced: it is a worker, which may be started again; so are its ``pass_fds``; PSGC_INCARNATION in ``env`` is its first process's number, if not 1.
        spared: says, once it has died, whether the others go on without it. estate: it is a scheduler, which may be started again with these, its journal and
        its listening socket; they are the child's from now on.

        service: it ends by itself when all others have. notes: takes what its stderr has for the launcher. Raises OSError."""
        env = {**env, "PSGC_LAUNCHER": self._reports.address(len(self.children))}

        first = int(env.get("PSGC_INCARNATION") or 1)
        pass_fds, incarnations = list(pass_fds), itertools.count(first)

        def begin(keeper: Keeper | None = None) -> Child:
            relays = (self._relay(name, self._out), self._relay(name, self._err, notes))
            number = next(incarnations)
            own = {**env, "PSGC_INCARNATION": str(number)} if replaced or number > first else env
            if number > first and replaced and (spare := self._spares.take(name, who, command, own, cores, relays)) is not None:
                spare.start_again = begin
                return spare
            return Child.start(
                name, [*before, *command], own, relays, who=who, service=service, keep_memory=keep_memory, pass_fds=pass_fds, cores=cores, stdin=stdin,
                keeper=keeper, start_again=begin if keep_memory or replaced or estate else None, estate=estate,
            )  # fmt: skip

        cores = list(cores)
        child = begin()
        if spared is not None:
            self._spared.may_be[len(self.children)] = spared
        self.children.append(child)
        self.blame.accounts.append(Account(child.who, service, scheduler=name == "scheduler"))
        self._watch(child)
        return child

    def keep_spares(self, count: int, interpreter: str, env: Mapping[str, str], pass_fds: Iterable[int] = ()) -> None:
        """Have so many processes (``spare.py``) wait for workers' places, once everyone has joined, so that the start is nobody's loss."""
        pass_fds, command = list(pass_fds), [interpreter, "-m", SPARE]

        def begin(number: int) -> Child:
            name = f"spare {number}"
            relays = (self._relay(name, self._out), self._relay(name, self._err))
            return Child.start(name, command, env, relays, pass_fds=pass_fds, stdin=subprocess.PIPE)

        self._spares = Spares(count, begin)

    def _fill_spares(self) -> None:
        try:
            for child in self._spares.fill():
                self._watch(child)
        except OSError as error:
            self._spares.wanted = 0
            self.say(f"a spare process cannot be started: {error}; see `ulimit -u -n`")

    @property
    def _all(self) -> list[Child]:
        """All processes that are not known to be gone, and others."""
        return [*self.children, *self._former, *self._spares.waiting]

    def _watch(self, child: Child) -> None:
        self._guard.add(child.pid)
        for pipe in child.relays:
            self._selector.register(pipe, selectors.EVENT_READ, (child, pipe))
        if child.keeper is not None:
            self._selector.register(child.keeper.socket, selectors.EVENT_READ, child.keeper)

    def run(self, turned: Callable[[], None] = lambda: None) -> int:
        """Watch until all processes have ended. turned: called after each turn. Returns 0; after a fault the status of the process that caused it (128 + its
        signal; 1 if it has none); or 128 + the signal that ended us; Unrepeated if we were to end. After a failure the last line on stderr is the reason."""
        while not all(child.gone for child in (*self.children, *self._former)) and time.monotonic() < self._give_up_at:
            self.turn()
            turned()
        for child in self._spares.waiting:  # they hold nothing
            child.signal_group(signal.SIGKILL)
        deadline = time.monotonic() + DRAIN_S
        while any(isinstance(key.data, tuple) for key in self._selector.get_map().values()) and time.monotonic() < deadline:
            self.turn()
            turned()
        for child in self._all:
            child.close()
        for sink in (self._out, self._err):
            if sink.lost:
                sink.write(b"")  # there may be room by now to say so
        text, status = self._verdict()
        if self._tell_verdict is not None and status:
            self._tell_verdict(Weight.OWN if self.blame.cause is None else self.blame.cause.weight, text, status)
        elif text:
            self.say(text)
        return Unrepeated(status) if self.interrupted or self.final else status

    def _verdict(self) -> tuple[str, int]:
        """The last line to print ("" for none) and the exit status."""
        found = self.blame.verdict()
        if found is not None:
            return found
        if self._spared.last and not self._interrupt and not any(child.status == 0 for child in self.children if not child.service):
            return self._spared.last  # nobody has come to the end here
        if self._interrupt:
            return f"ended by {signal.Signals(self._interrupt).name}", 128 + self._interrupt
        return ("nobody reads the output any more", 1) if self._unread_output else ("", 0)

    @property
    def interrupted(self) -> bool:
        """Whether a signal, perhaps just now, or the end of our output's reader has told us to end the job."""
        return bool(self._interrupt or self._pending) or self._unread_output

    def turn(self) -> None:
        """Handle what happens next, or nothing for TURN_S."""
        for key, _ in self._selector.select(TURN_S):
            if isinstance(key.data, tuple):
                self._read(*key.data)
            elif isinstance(key.data, Keeper):
                if not key.data.receive():
                    self._selector.unregister(key.fileobj)
            elif isinstance(key.data, Reports):
                self._take_reports()
            else:
                os.read(self._wake_r, 4096)
        self._mind_output()
        while self._pending:
            self._interrupted(self._pending.pop(0))
        ended = [child for child in self.children if child.has_ended()]
        for child in sorted(ended, key=lambda c: ((c.status or 0) >= 0, c.service)):  # likeliest cause first
            self._ended(child)
        for child in self._spares.ended():
            self._former.append(child)
            if self._working and not (self._ending_them or self._failing):
                self.say(f"{child.describe_end()}; the job goes on without it")
        self._reap_if_any_ended()
        if renewed := self._guard.renewed():
            self.say(renewed)
        self._hold_for_checkpoints(time.monotonic())
        while (number := self._ending.next(time.monotonic())) is not None:
            self._send_due(number)

    # what happens to children

    def _take_reports(self) -> None:
        for report in self._reports.receive():
            if report.event == "saving":
                self._saving.add(report.child)
            elif report.event == "saved":
                self._saving.discard(report.child)
            elif report.event == "stepped":
                self._ends.setdefault(report.child, Ends()).stepped()
                self._fill_spares()
                self._is_back(report.child)
            elif report.event == "back":
                self._is_back(report.child)
            elif self._spared.heeds(report):
                continue
            elif report.event == "final":
                if not (self.final or self._interrupt):
                    self.say(
                        "another machine's part of the job was told to end, by a signal or because nobody reads its output: it is not started again"
                    )
                self.final = True
            elif report.event == "hung":
                self._print_where_it_hung(report)
            elif report.event == "unfollowed":
                self._leave_unfollowed(report.child)
            elif not self._ending_them:
                self._name_by_rank(report)
                self.blame.hear(report)
                if report.event == "joined":
                    self._fill_spares()
        self._end_if_failed()
        if self.blame.unneeded and not any(c.running for c in self.children if not c.service):
            self._end_within(0)

    def _leave_unfollowed(self, number: int) -> None:
        """A scheduler can leave its next process nothing, and its death ends the job."""
        if 0 <= number < len(self.children):
            self.children[number].start_again = None
            self.children[number].leave_nothing()

    def _is_back(self, number: int) -> None:
        """A process in a dead one's place has the job's state: it is waited for, even where others have come to the end a moment ago."""
        if number in self._spared.returning:
            self._spared.returning.discard(number)
            if self._working and not (self._failing or self._ending_them):
                self._ending.withdraw()

    def _name_by_rank(self, report: Report) -> None:
        if report.event == "joined" and report.rank >= 0 and 0 <= report.child < len(self.children):
            child = self.children[report.child]
            child.who = self.blame.accounts[report.child].name = f"rank {report.rank}"

    def _print_where_it_hung(self, report: Report) -> None:
        """After Ctrl-C, for rank 0, which prints it itself where Python could interrupt it."""
        if self._interrupt == signal.SIGINT and report.rank == 0 and 0 <= report.child < len(self.children):
            popen = self.children[report.child].popen
            assert popen.stderr is not None
            self.children[report.child].relays[popen.stderr].feed(f"KeyboardInterrupt ({report.text})\n".encode())

    @property
    def _ending_them(self) -> bool:
        """Whether we have told the children to end, so that their exit statuses and messages are consequences, not causes."""
        return self._signalled or bool(self._interrupt) or self._unread_output

    def _ended(self, child: Child) -> None:
        self._take_reports()  # what it has told comes before its end
        for pipe in child.relays:
            if not pipe.closed:
                self._read(child, pipe)  # its last words
        working = self._working
        ours = self._ending_them
        if (not child.service or working) and not ours and not self._failing and self._start_again(child):
            if not self._working:  # the others have come to the end, and nobody else ends any more who would set the limit
                self._end_within(self._patience.service_s)
            return
        number = self.children.index(child)
        child.leave_nothing()
        if child.service and not working and child.status != 0 and not self._failing:
            if not ours:
                self.say(f"after the workers had ended, {self._how_ended(number)}")
        elif ours:
            self.blame.end(number)
        elif child.status and self._spared.excuses(number, self.blame.accounts[number], self.blame.failed):
            self.blame.leave_out(number)
            if text := self._spared.lose(number, self._how_ended(number), child.status):
                self.say(text)
        else:
            self.blame.end(number, child.status or 0, self._how_ended(number))
            if self._absent is not None and self.blame.is_absent(number):
                self._absent(child)
                self._absent = None  # the first is enough
                if not child.status:  # else it says so itself
                    self.say(f"{child.name} has ended and never joined the job: it did not call psgc.torch.init()")
            self._end_if_failed()
        if not working:
            self._end_within(0 if self.blame.unneeded else self._patience.service_s)

    def _how_ended(self, number: int) -> str:
        """Who has ended and how, or why it had left the job before."""
        child, cut_off = self.children[number], self.blame.accounts[number].cut_off
        return f"{child.who} was cut off: {cut_off}" if cut_off else child.describe_end()

    @property
    def _working(self) -> bool:
        """Whether a worker runs, other than one that is still coming back to a job that others have come to the end of."""
        running = [number for number, child in enumerate(self.children) if child.running and not child.service]
        over = any(child.status == 0 for child in self.children if not child.service)
        return bool(set(running) - self._spared.returning if over else running)

    def _start_again(self, child: Child) -> bool:
        """Start a server, a scheduler or a worker again that has ended, unless it was told why, or ends again and again. Returns whether another process goes
        on in its place."""
        number = self.children.index(child)
        account = self.blame.accounts[number]
        if not child.status or self.blame.failed or account.informed or not child.followable or number in self._spared.too_late:
            return False
        worker = child.keeper is None and not child.estate
        if worker and not account.in_job:
            return False
        if child.estate and not account.begun:  # one that has not come so far as to join would not come further
            return False
        if so_often := self._ends.setdefault(number, Ends()).another(time.monotonic()):
            self.say(f"{child.name} has ended {so_often} and {child.unmet} in between, so it is not started again")
            return False
        assert child.start_again is not None
        try:
            if child.keeper is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(child.keeper.socket)
                child.keeper.renew()
            successor = child.start_again(child.keeper)
        except OSError as error:
            self.say(f"{child.name} cannot be started again: {error}; see `ulimit -u -n`")
            return False
        goes_on = "a spare process takes its place" if successor.was_spare else child.goes_on
        self.say(f"{self._how_ended(number)}; {goes_on}")
        if worker:
            account.comes_back()
            self._saving.discard(number)
            self._spared.comes_back(number)
        child.keeper, child.estate = None, []
        self.children[number] = successor
        self._former.append(child)
        if not successor.was_spare:
            self._watch(successor)
        return True

    def fail(self, number: int, text: str) -> None:
        """The job cannot go on, as has been found out elsewhere. number: of the child whose fault it is."""
        self.blame.learn(number, Weight.OWN, text, 1)
        self._end_if_failed()

    def _end_if_failed(self) -> None:
        """After the first fault, end everyone else: at once if the job was never complete, because then nobody has anything to save."""
        if self.blame.failed and not self._failing:
            self._failing = True
            self._end_within(self._patience.fault_s if self.blame.formed else 0)

    def _reap_if_any_ended(self) -> None:
        if any(not c.running and not c.gone for c in (*self.children, *self._former)):
            self._reap(live_groups())

    def _reap(self, live: set[int]) -> None:
        """Reap leaders whose group is empty. Once no leader runs, end the processes that leaders left behind."""
        for child in self._all:
            if not child.running and not child.gone and child.pid not in live:
                child.reap()
                self._guard.remove(child.pid)
        if not any(c.running for c in self.children):
            self._end_within(0)

    def _end_within(self, grace_s: float) -> None:
        self._ending.within(grace_s, time.monotonic())

    def _writers(self) -> list[Child]:
        """The children that are writing a checkpoint now."""
        return [child for number, child in enumerate(self.children) if number in self._saving and child.running]

    def _hold_for_checkpoints(self, now: float) -> None:
        """Postpone ending the children while one writes a checkpoint, and announce it once."""
        if (writers := self._writers()) and (longest_s := self._ending.hold(now)) is not None:
            self.say(f"{', '.join(child.name for child in writers)}: a checkpoint is being written (psgc.saving()) and waited for, "
                     f"{longest_s:.0f} s at most; Ctrl-C twice ends it at once")  # fmt: skip

    def _send_due(self, number: int) -> None:
        left = [c.name for c in self.children if c.running]
        if left and not (self._signalled or self._failing or self._unread_output or self._interrupt):
            if self.blame.unused:
                self.say("no worker has joined the job, so nothing was synchronised: does the command use psgc? (psgc.torch.init())")
            elif not self.blame.unneeded:
                self.say(f"the workers have ended; ending {', '.join(left)}, too")
        self._signalled = True
        if number == signal.SIGKILL:
            self._give_up_at = time.monotonic() + UNKILLABLE_S
        self._signal_all(number)

    def _kill_what_is_left(self) -> None:
        self._signal_all(signal.SIGKILL)
        deadline = time.monotonic() + UNKILLABLE_S
        while left := [child for child in self._all if not child.gone]:
            for child in left:
                child.has_ended()
            self._reap(live_groups())
            if time.monotonic() > deadline:
                self.say(f"{', '.join(f'{c.name} (process group {c.pid})' for c in left)} cannot be killed: the kernel holds it")
                return
            time.sleep(0.01)

    def _signal_all(self, number: int) -> None:
        # Workers first: a scheduler that is ended tells the others why, and they would say it.
        for child in sorted(self._all, key=lambda child: child.service):
            child.signal_group(number)

    # what happens to us

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(number)

    def _interrupted(self, number: int) -> None:
        """Pass a signal on. A second Ctrl-C kills at once."""
        if self._interrupt:
            if number == signal.SIGINT:
                self._signal_all(signal.SIGKILL)
            return
        self._interrupt = number
        self._tell_interrupted(signal.Signals(number).name)
        self._pass_on(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        self._end_within(self._patience.after(number))

    def _pass_on(self, number: int) -> None:
        """Send a signal once, to the workers alone: the scheduler and the servers follow them."""
        if number not in self._passed_on:
            self._passed_on.add(number)
            for child in [c for c in self.children if c.running and not (c.service or c.follows)] or self.children:
                child.signal_group(number)

    def _relay(self, name: str, out: Sink, notes: Callable[[str], None] | None = None) -> Relay:
        label = f"[{name}]"
        prefix = None if not self._prefix else coloured(label, len(self.children)) if _takes_colour(out.stream) else label
        return Relay(prefix, out) if notes is None else NotingRelay(prefix, out, notes)

    def _read(self, child: Child, pipe: IO[bytes]) -> None:
        if not child.read(pipe):
            self._selector.unregister(pipe)
            pipe.close()

    def _mind_output(self) -> None:
        """Say, once, that output is lost; end the job where nobody reads it any more."""
        for sink in (self._out, self._err):
            if sink.gone:
                self._unread()
            elif sink.lost and sink not in self._said_lost:
                self._said_lost.add(sink)
                self.say(
                    f"std{'out' if sink is self._out else 'err'} cannot be written ({sink.lost}): output is lost meanwhile, and the job goes on"
                )

    def _unread(self) -> None:
        """Nobody reads our output any more: end the job in order, as a program in a pipeline ends. The children's output is still taken, so that they can
        end."""
        if not self._unread_output and not self._interrupt:
            self._unread_output = self._failing = self.final = True
            self._tell_interrupted("a closed output")
            if not self._writers():
                self._pass_on(signal.SIGTERM)
            self._end_within(self._patience.grace_s)

    def _amid_line(self) -> bool:
        """Whether a child has left our stderr, or the terminal, in the middle of a line."""
        relays = [relay for child in self.children for relay in child.relays.values()]
        left = [relay for relay in relays if relay.amid_line]
        for relay in left:
            relay.amid_line = False
        return any(relay.out is self._err or self._out.stream.isatty() for relay in left)

    def say(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self._err.write(f"{chr(10) if self._amid_line() else ''}{self._program}: {text}\n".encode(errors="backslashreplace"))


def _takes_colour(out: IO[str]) -> bool:
    return out.isatty() and not os.environ.get("NO_COLOR")
