"""``psgc run --hostfile``: a whole job on several hosts, over ssh, from one command to its end.

One connection a host, in two steps. First every host says hello (remote.py): who does not, has no psgc or another version is named, and nothing has
started. Then each gets its order through the connection's stdin: settings, the job's secret among them, and the command. A spare host gets it once another
host is lost (lost_hosts.py). The system's ``ssh`` connects; this machine itself needs none.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from psgc import __version__
from psgc.config import Config
from psgc.errors import ConfigError, PsgcError, UsageError
from psgc.launch.job.batch_signals import passing_on
from psgc.launch.job.bpslaunch import AS_BYTEPS
from psgc.launch.job.checks import canonical, check_codec_or_plan, check_job
from psgc.launch.job.hostfile import Host
from psgc.launch.job.interpreter import spares_of, words_of
from psgc.launch.job.lost_hosts import LostHosts, check_reserve, smallest
from psgc.launch.job.placing import Place
from psgc.launch.job.planned import PLAN, inside_of, plan_here, plan_told
from psgc.launch.job.remote import LIVES
from psgc.launch.job.run import NOT_INHERITED
from psgc.launch.supervision.blame import Weight
from psgc.launch.supervision.child import Child
from psgc.launch.supervision.ending import Patience
from psgc.launch.supervision.supervisor import Supervisor
from psgc.processes.addresses import is_loopback
from psgc.variables import PREFIXES

PROGRAM: Final = "psgc run"
START_S: Final = 10.0
LOST: Final = 255  # ssh's own status, where it or its connection has failed
SAYING_S: Final = 2.0  # ssh gives up so long before, and says why
REMOTE: Final = "psgc.launch.job.remote"
# A host that is cut off is given up by ssh after 15 s; no question is asked of a user who may not be there.
SSH_OPTIONS: Final = ("BatchMode=yes", "ServerAliveInterval=5", "ServerAliveCountMax=3")
HINTS: Final = {
    "Host key verification failed": "log in once by hand, `ssh {host}`, to accept its key",
    "Permission denied": "ssh must log in without a password there: `ssh -o BatchMode=yes {host} true`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How hosts are reached, and what they are given. ssh: the command, in words. python: theirs that has psgc. folder: where the command runs. env:
    further settings."""

    ssh: Sequence[str] = ("ssh",)
    python: str = sys.executable
    folder: str = field(default_factory=os.getcwd)
    user: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    root_host: str = ""
    root_port: int = 0
    prefix: bool = True
    start_s: float = START_S  # within which every host has to answer


class _Remote:
    """One host's connection, and what it has said."""

    def __init__(self, place: Place) -> None:
        self.place, self.hello = place, {}  # type: tuple[Place, dict[str, Any]]
        self.child: Child
        self.learned: list[tuple[Weight, str, int]] = []
        self.told = False  # why its part of the job has ended
        self.mourned = False  # it is lost, and the job goes on without it
        self.follows = False  # it was a spare host, and has taken a lost one's place
        self._pipe = -1
        self.ordered = False

    @property
    def name(self) -> str:
        return self.place.host.name

    @property
    def waits(self) -> bool:
        """Whether it can take a lost host's place."""
        return self.place.spare and self.child.running and not self.ordered

    @property
    def lost(self) -> bool:
        """Whether the connection has ended, and nobody there has said why."""
        status = self.child.status
        return status is not None and (status < 0 or status == LOST) and not self.told

    def start(self, supervisor: Supervisor, way: Way, spared: Callable[[], bool]) -> None:
        read, self._pipe = os.pipe()
        try:
            command = [way.python, "-m", REMOTE] if is_here(self.place.host, way) else ssh_command(self.place.host, way)
            self.child = supervisor.start(self.name, command, os.environ, stdin=read, notes=self._note, spared=spared)
        except OSError as error:
            raise PsgcError(f"run: {self.name}: ssh cannot be started: {error}") from None
        finally:
            os.close(read)
        self.child.deliver = self._deliver

    def order(self, order: Mapping[str, Any]) -> None:
        self._write(json.dumps(order))
        self.ordered = True

    def wait(self, dead_s: float) -> None:
        """Have it wait for an order. dead_s: as in an order."""
        self._write(json.dumps({"dead_s": dead_s}))

    def live(self) -> None:
        """Give a sign of life."""
        self._write("")

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def _deliver(self, number: int) -> bool:
        """Pass a signal on."""
        return self.ordered and self._write(str(int(number)))

    def _write(self, line: str) -> bool:
        try:
            os.write(self._pipe, f"{line}\n".encode())
        except OSError:
            return False
        return True

    def _note(self, text: str) -> None:
        with contextlib.suppress(ValueError, KeyError):
            told = json.loads(text)
            if told["event"] == "hello":
                self.hello = told
            elif told["event"] == "end":
                self.learned.append((Weight(told["weight"]), str(told["text"]), int(told["status"])))
                self.told = True

    def why_not(self) -> str:
        """Why this host takes no part; "" if it does, or is still expected to say hello."""
        if self.hello:
            other = self.hello["version"]
            return (
                ""
                if other == __version__
                else f"{self.name} has psgc {other} (for {self.hello['python']}), but this machine {__version__}: install one version on all hosts"
            )
        if self.child.running:
            return ""
        assert self.child.popen.stderr is not None
        said = self.child.relays[self.child.popen.stderr].words.line
        if self.child.status == LOST:
            hint = next((f"; {text.format(host=self.name)}" for sign, text in HINTS.items() if sign in said), "")
            return f"{self.name} cannot be reached by ssh: {said or 'it says nothing'}{hint}"
        return f"psgc does not start on {self.name}: {said or f'status {self.child.status}'}; is it installed there for that Python? (--remote-python)"


def run_hosts(command: Sequence[str], places: Sequence[Place], way: Way, *, codec: str | None = None, plan: str | None = None, layout_out: str | None = None,
              as_byteps: bool = False, more: Mapping[str, str] | None = None) -> int:  # fmt: skip
    """Run the job to its end; its exit status. more: further variables of all processes. Raises UsageError, ConfigError, CodecError, or PsgcError naming the
    hosts that cannot take part."""
    if not command:
        raise UsageError("run: no command given; for example: psgc run --hostfile hosts -- python train.py")
    shared = {**_shared(places, way, codec, plan, layout_out), **(more or {})}
    config = Config.from_env({**_elsewhere(shared), "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1"})
    _check(config, places, command, shared)  # what is wrong is said before anything is started
    for note in config.notes:
        print(f"{PROGRAM}: {note}", file=sys.stderr)
    own = Patience.of(config)
    patience = replace(own, fault_s=own.fault_s + own.term_s, grace_s=own.grace_s + 2 * own.term_s)  # hosts end by themselves first
    remotes = [_Remote(place) for place in places]
    words = [*([AS_BYTEPS] if as_byteps else []), *command]
    with (
        Supervisor(PROGRAM, way.prefix, patience) as supervisor,
        _closing(remotes),
        passing_on(lambda: [remote.child for remote in remotes if remote.ordered]),
    ):
        watch = _Watch(supervisor, remotes, config)
        for remote in remotes:
            remote.start(supervisor, way, functools.partial(watch.survives, remote))
        for account in supervisor.blame.accounts:
            account.joined = 1  # whoever fails, the others are given time: to say hello, or to end by themselves
        _await_hellos(supervisor, remotes, way.start_s)
        if supervisor.interrupted:
            return supervisor.run()
        job = {**shared, **_root(remotes, way)}

        def order(remote: _Remote, more: Mapping[str, str]) -> None:
            command = words if remote.place.node >= 0 else []
            own = {**job, **_own(remote.place), **more}
            told = {
                "env": own,
                "folder": way.folder,
                "prefix": way.prefix,
                "dead_s": config.dead_s,
                "outlived": watch.outlives(remote.place),
            }
            remote.order({**told, "command": command})

        for remote in remotes:
            if remote.place.spare:
                remote.wait(config.dead_s)
            else:
                order(remote, {})
        return watch.run(order)


@contextlib.contextmanager
def _closing(remotes: Sequence[_Remote]) -> Iterator[None]:
    try:
        yield
    finally:
        for remote in remotes:
            remote.close()


def _await_hellos(supervisor: Supervisor, remotes: Sequence[_Remote], start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while (
        time.monotonic() < deadline and not supervisor.interrupted and any(remote.child.running and not remote.hello for remote in remotes)
    ):
        supervisor.turn()
    if supervisor.interrupted:
        return
    wrong = [
        remote.why_not() or ("" if remote.hello else f"{remote.name} has not answered ssh within {start_s:g} s (--start-timeout)")
        for remote in remotes
    ]
    if any(wrong):
        raise PsgcError(f"run: {'; '.join(filter(None, wrong))}")


class _Watch:
    """Sees the job to its end."""

    def __init__(self, supervisor: Supervisor, remotes: Sequence[_Remote], config: Config) -> None:
        self._supervisor, self._remotes, self._config = supervisor, remotes, config
        self._lost_hosts = LostHosts(config)
        self._alive_at = time.monotonic()
        self._order: Callable[[_Remote, Mapping[str, str]], None]

    def run(self, order: Callable[[_Remote, Mapping[str, str]], None]) -> int:
        """order: has a host run its part, with further settings."""
        self._order = order
        return self._supervisor.run(self._turned)

    def survives(self, remote: _Remote) -> bool:
        """Whether the job goes on without a host whose connection has ended."""
        if self._came_late(remote):
            return True
        if not remote.lost or not self._begun:
            return False
        why = self._lost_hosts.ends(remote.place, self._reserve)
        if why is not None:
            self._supervisor.say(f"the job ends with {remote.name}: {why}")
        return why is None

    def outlives(self, place: Place) -> bool:
        """Whether the job would go on without a host, as things are now."""
        return self._lost_hosts.ends(place, self._reserve) is None

    @property
    def _reserve(self) -> list[Place]:
        return [remote.place for remote in self._remotes if remote.waits]

    @property
    def _begun(self) -> bool:
        return any(remote.ordered for remote in self._remotes)

    @property
    def _over(self) -> bool:
        """Whether nobody is awaited any more but spare hosts."""
        return not any(remote.child.running for remote in self._remotes if not remote.place.spare)

    def _came_late(self, remote: _Remote) -> bool:
        """Whether the others have gone on without it, under PSGC_ON_WORKER_LOSS=shrink, and do so if it fails in a lost host's place."""
        return remote.follows and self._config.on_worker_loss == "shrink"

    def _turned(self) -> None:
        now = time.monotonic()
        for number, remote in enumerate(self._remotes):
            while remote.learned:
                weight, text, status = remote.learned.pop(0)
                if not self._supervisor.interrupted and not self._came_late(remote):  # else it has ended because we told it to
                    self._supervisor.blame.learn(number, weight, f"{remote.name}: {text}", status)
            if self._supervisor.blame.accounts[number].left_out and not remote.mourned:
                remote.mourned = True
                if remote.lost:
                    self._lost_hosts.lost(remote.place, now)
            if now > self._alive_at + self._config.dead_s / LIVES:
                remote.live()
        if now > self._alive_at + self._config.dead_s / LIVES:
            self._alive_at = now
        if self._over or self._supervisor.blame.failed:
            for remote in self._remotes:
                if not remote.ordered:
                    remote.close()
        elif (place := self._lost_hosts.due(now)) is not None:
            self._follow(place)

    def _follow(self, place: Place) -> None:
        """Have a spare host take a lost one's place."""
        waiting = [remote for remote in self._remotes if remote.waits]
        spare = smallest((remote.place for remote in waiting), place)
        if spare is not None:
            remote = next(remote for remote in waiting if remote.place is spare)
            remote.place, more = self._lost_hosts.taken(remote.place, place)
            remote.follows = True
            self._supervisor.say(f"{remote.name} takes the place of {place.host.name} (node {place.node})")
            self._order(remote, more)
        elif self._config.on_worker_loss == "wait":
            number = next(number for number, remote in enumerate(self._remotes) if remote.place is place)
            text = f"{place.host.name} is lost, and so is every spare host that could take its place"
            self._supervisor.fail(number, text)


def is_here(host: Host, way: Way) -> bool:
    """Whether it is this machine, which needs no ssh to itself."""
    return not (host.port or host.user or way.user) and host.name in (
        "localhost",
        "127.0.0.1",
        "::1",
        socket.gethostname(),
        socket.getfqdn(),
    )


def ssh_command(host: Host, way: Way, command: str = "") -> list[str]:
    """command: for the host's shell; default: its part of a job."""
    connect_s = max(1, round(way.start_s - SAYING_S))
    options = [word for option in (*SSH_OPTIONS, f"ConnectTimeout={connect_s}") for word in ("-o", option)]
    user = host.user or way.user
    return [
        *way.ssh, "-T", *options, *(["-p", str(host.port)] if host.port else []), *(["-l", user] if user else []), host.name,
        f"exec {command or f'{shlex.quote(way.python)} -m {REMOTE}'}",
    ]  # fmt: skip


def _root(remotes: Sequence[_Remote], way: Way) -> dict[str, str]:
    """Where the scheduler is: at the address by which its host was reached. That of this machine itself is the one that another host has seen."""
    first = next(remote for remote in remotes if remote.place.scheduler)
    seen = {remote: remote.hello["connection"].split() for remote in remotes}  # our address and port, the host's address and port
    address = way.root_host or (seen[first][2] if len(seen[first]) == 4 else "127.0.0.1")
    if is_loopback(address) and not way.root_host:
        address = next((ends[0] for ends in seen.values() if len(ends) == 4 and not is_loopback(ends[2])), address)
    return {"DMLC_PS_ROOT_URI": address, "DMLC_PS_ROOT_PORT": str(way.root_port or first.hello["port"])}


def _own(place: Place) -> dict[str, str]:
    env = {"DMLC_ROLE": place.roles}
    if place.servers:
        env |= {"DMLC_SERVER_ID": str(place.first_server), "PSGC_LOCAL_SERVERS": str(place.servers)}
    if place.node >= 0:
        env |= {"DMLC_WORKER_ID": str(place.node), **({"BYTEPS_LOCAL_SIZE": str(place.workers)} if place.workers else {})}
    return env


def _shared(places: Sequence[Place], way: Way, codec: str | None, plan: str | None, layout_out: str | None) -> dict[str, str]:
    """What all processes of the job share: the settings of this shell, what is asked for by name, and the job's identity."""
    check_codec_or_plan("run", codec, plan)
    servers = sum(place.servers for place in places)
    own = ("PSGC_RESTARTS", "PSGC_RESTART", "PSGC_LOCAL_SERVERS", "PSGC_OUTLET", "PSGC_LAUNCHER", "PSGC_JOB")
    env = {
        name: text
        for name, text in os.environ.items()
        if name.partition("_")[0] in PREFIXES and name not in NOT_INHERITED and name not in own
    }
    env |= way.env
    sizes = [place.workers for place in places if place.node >= 0]
    if all(sizes) and len(set(sizes)) > 1:
        env["PSGC_NODE_SIZES"] = ",".join(map(str, sizes))
    planned = plan_told(plan) if plan else plan_told(env.get(PLAN, ""), way.folder)
    files = {PLAN: planned, "PSGC_LAYOUT_OUT": layout_out and os.path.abspath(layout_out)}
    codec = canonical(codec or env.get("PSGC_CODEC", "").strip(), servers)
    env |= {name: path for name, path in {**files, "PSGC_CODEC": codec}.items() if path}
    first = next((place for place in places if place.node == 0), None)
    env |= inside_of(plan_here(planned, needed=first is not None and is_here(first.host, way)), env)
    return env | {
        "DMLC_NUM_WORKER": str(len(sizes)), "DMLC_NUM_SERVER": str(servers), "BYTEPS_FORCE_DISTRIBUTED": "1", "PYTHONUNBUFFERED": "1",
        "PSGC_JOB": str(secrets.randbits(62) | 1), "PSGC_TOKEN": env.get("PSGC_TOKEN", "").strip() or secrets.token_hex(16),
    }  # fmt: skip


def _elsewhere(env: Mapping[str, str]) -> dict[str, str]:
    """Settings that can be read on this machine, which need not have the hosts' interfaces."""
    return {name: text for name, text in env.items() if name != "DMLC_INTERFACE"}


def _check(config: Config, places: Sequence[Place], command: Sequence[str], env: Mapping[str, str]) -> None:
    """Refuse what these hosts cannot do together. env: of all processes."""
    sizes = [place.workers for place in places if place.node >= 0]
    shares = {place.host.name: place.servers for place in places}
    check_job(config, workers=sum(sizes) if all(sizes) else 0, shares=shares, command=words_of(list(command)), spares=spares_of(env))
    if text := check_reserve(config, [place for place in places if place.spare]):
        raise UsageError(f"run: {text}")


def forwarded(texts: Sequence[str]) -> dict[str, str]:
    """--env: NAME, with this shell's value; NAME=VALUE; or NAME:VALUE, as BytePS's dist_launcher has it. Raises UsageError."""
    env = {}
    for text in texts:
        end = min((place for sign in "=:" if (place := text.find(sign)) >= 0), default=len(text))
        name, value = text[:end], text[end + 1 :]
        if not name or not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise UsageError(f"run: --env {text}: expected NAME, NAME=VALUE or NAME:VALUE")
        if end == len(text) and name not in os.environ:
            raise ConfigError(f"run: --env {name}: there is no such variable in this shell; give --env {name}=VALUE")
        env[name] = os.environ[name] if end == len(text) else value
    return env
