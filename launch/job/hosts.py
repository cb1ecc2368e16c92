"""``psgc run --hostfile``: a whole job on several hosts, over ssh, from one command to its end.

One connection a host, in two steps. First every host says hello (remote.py): who does not, has no psgc or another version is named, and nothing has
started. Then each gets its order through the connection's stdin: settings, the job's secret among them, and the command. The system's ``ssh`` connects; this
machine itself needs none.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from psgc import __version__
from psgc.config import Config
from psgc.errors import CodecError, ConfigError, PsgcError, UsageError
from psgc.launch.job.batch_signals import passing_on
from psgc.launch.job.bpslaunch import AS_BYTEPS
from psgc.launch.job.hostfile import Host
from psgc.launch.job.placing import Place
from psgc.launch.job.planned import PLAN, inside_of, plan_here, plan_told
from psgc.launch.job.remote import LIVES
from psgc.launch.job.run import NOT_INHERITED
from psgc.launch.supervision.blame import Weight
from psgc.launch.supervision.child import Child
from psgc.launch.supervision.supervisor import Patience, Supervisor
from psgc.processes.addresses import is_loopback
from psgc.variables import PREFIXES

PROGRAM: Final = "psgc run"
START_S: Final = 10.0
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
        self._pipe = -1
        self.ordered = False

    @property
    def name(self) -> str:
        return self.place.host.name

    def start(self, supervisor: Supervisor, way: Way) -> None:
        read, self._pipe = os.pipe()
        try:
            command = [way.python, "-m", REMOTE] if is_here(self.place.host, way) else ssh_command(self.place.host, way)
            self.child = supervisor.start(self.name, command, os.environ, stdin=read, notes=self._note)
        except OSError as error:
            raise PsgcError(f"run: {self.name}: ssh cannot be started: {error}") from None
        finally:
            os.close(read)
        self.child.deliver = self._deliver

    def order(self, order: Mapping[str, Any]) -> None:
        self._write(json.dumps(order))
        self.ordered = True

    def live(self) -> None:
        """Give a sign of life."""
        if self.ordered:
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
        if self.child.status == 255:
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
    config = Config.from_env(
        {**shared, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1"}
    )  # what is wrong is said before anything is started
    config.require_cluster()
    for note in config.notes:
        print(f"{PROGRAM}: {note}", file=sys.stderr)
    own = Patience.of(config)
    patience = replace(own, fault_s=own.fault_s + own.term_s, grace_s=own.grace_s + 2 * own.term_s)  # hosts end by themselves first
    remotes = [_Remote(place) for place in places]
    with (
        Supervisor(PROGRAM, way.prefix, patience) as supervisor,
        _closing(remotes),
        passing_on(lambda: [remote.child for remote in remotes if remote.ordered]),
    ):
        for remote in remotes:
            remote.start(supervisor, way)
        for account in supervisor.blame.accounts:
            account.joined = 1  # whoever fails, the others are given time: to say hello, or to end by themselves
        _await_hellos(supervisor, remotes, way.start_s)
        if supervisor.interrupted:
            return supervisor.run()
        root = _root(remotes, way)
        for remote in remotes:
            words = [*([AS_BYTEPS] if as_byteps else []), *command]
            remote.order(
                {
                    "env": {**shared, **root, **_own(remote.place)},
                    "folder": way.folder,
                    "prefix": way.prefix,
                    "dead_s": config.dead_s,
                    "command": words if remote.place.node >= 0 else [],
                }
            )
        return _watch(supervisor, remotes, config.dead_s / LIVES)


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


def _watch(supervisor: Supervisor, remotes: Sequence[_Remote], life_s: float) -> int:
    """See the job to its end. life_s: from one sign of life to the next."""
    alive_at = time.monotonic()

    def turned() -> None:
        nonlocal alive_at
        for number, remote in enumerate(remotes):
            while remote.learned:
                weight, text, status = remote.learned.pop(0)
                if not supervisor.interrupted:  # else it has ended because we told it to
                    supervisor.blame.learn(number, weight, f"{remote.name}: {text}", status)
            if time.monotonic() > alive_at + life_s:
                remote.live()
        if time.monotonic() > alive_at + life_s:
            alive_at = time.monotonic()

    return supervisor.run(turned)


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
    if codec and plan:
        raise UsageError(f"run: --codec {codec} and --plan {plan}: a plan names each bucket's codec; leave one of them out")
    servers = sum(place.servers for place in places)
    if codec:
        from psgc.codecs import parse_scheme
        from psgc.layout.collective import needs_servers, refusal

        scheme = parse_scheme(codec)
        codec = scheme.canonical
        if not servers and needs_servers(scheme):
            raise CodecError(f"run: {refusal(scheme)}")
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
    env |= {name: path for name, path in {**files, "PSGC_CODEC": codec}.items() if path}
    first = next((place for place in places if place.node == 0), None)
    env |= inside_of(plan_here(planned, needed=first is not None and is_here(first.host, way)), env)
    return env | {
        "DMLC_NUM_WORKER": str(len(sizes)), "DMLC_NUM_SERVER": str(servers), "BYTEPS_FORCE_DISTRIBUTED": "1", "PYTHONUNBUFFERED": "1",
        "PSGC_JOB": str(secrets.randbits(62) | 1), "PSGC_TOKEN": env.get("PSGC_TOKEN", "").strip() or secrets.token_hex(16),
    }  # fmt: skip


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
