"""Several hosts on one machine: network namespaces on a switch, their links as fast as asked.  Needs root.

    python benchmarks/testbed.py --hosts 3 --gbps 1 -- CMD...          CMD on every host; TESTBED_HOST and TESTBED_ADDRESSES say where it is
    python benchmarks/testbed.py --hosts 3 --gbps 0.1 --job -- python examples/train_gpt.py --steps 20
                                                    a psgc job: scheduler and servers on host 0, workers on the others

Each host has a network of its own (so psgc's processes on different hosts speak TCP) behind one full-duplex link, limited both ways by
``tbf`` as it leaves the host and as it leaves the switch; all share this machine's memory and disk. Hosts stay on cores of their own where
there are enough. ``--delay-ms`` and ``--loss`` put ``wire_relay.py`` in the switch's place.
Owns namespaces, links and what runs in them: all of it ends with the ``with`` block, whatever ends that; what a killed testbed left behind,
the next one removes. Knows of psgc only how a job is started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Final

PREFIX: Final = "psgc-testbed-"
NAMESPACES: Final = Path("/run/netns")
MOST_HOSTS: Final = 64
TOOLS: Final = ("ip", "tc", "nsenter", "taskset")
# What may go at once after a pause. A longer burst would carry a small payload as if there were no limit; with a shorter one a busy machine
# serves the queue's timer too late to keep 1 Gbit/s (0.25 ms: 0.91 of it, 0.5 ms: 0.94, 1 ms: 0.94, on 2 cores with a load of 4).
BURST_S: Final = 500e-6
LEAST_BURST_BYTES: Final = 10 << 10
HEADER_BYTES: Final = 2 << 10  # more than a frame has beside its segment's data
# What waits before a link that is busy: 10 ms, as in a switch with ordinary buffers.
QUEUE_S: Final = 10e-3
LEAST_QUEUE_BYTES: Final = 256 << 10
UNKILLABLE_S: Final = 10.0
CAUGHT: Final = (signal.SIGTERM, signal.SIGHUP)
JOB_PORT: Final = 9000  # every host's ports are its own
LAUNCH: Final = "import sys; from psgc.launch.job.bpslaunch import main; sys.exit(main())"


class TestbedError(Exception):
    """Why there is no testbed, in one line."""


class WrongTestbed(TestbedError):
    """What was asked for is none: wrong usage."""


class Testbed:
    """``with`` it. gbps: of each host's link, 1e9 bit/s, each way; None: as fast as the machine copies. delay_ms: one way, between any
    two hosts; loss: the probability that a packet does not arrive. Raises TestbedError, having left nothing, where it cannot be.

    addresses: of the hosts; host_cores: those each host stays on; notes: what a reader of its figures must know.
    """

    def __init__(self, hosts: int = 2, gbps: float | None = None, *, delay_ms: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise WrongTestbed(f"--hosts {hosts}: expected 1 to {MOST_HOSTS}")
        if gbps is not None and not 0.001 <= gbps <= 100:
            raise WrongTestbed(f"--gbps {gbps:g}: expected 0.001 to 100")
        if not 0 <= delay_ms <= 10_000 or not 0 <= loss < 1:
            raise WrongTestbed(f"--delay-ms {delay_ms:g} --loss {loss:g}: expected 0 to 10000, and from 0 to below 1")
        self.gbps, self._delay_ms, self._loss, self._seed = gbps, delay_ms, loss, seed
        self._prefix = f"{PREFIX}{os.getpid()}-{_start_of(os.getpid())}-{secrets.token_hex(2)}-"
        self.addresses = tuple(f"10.77.0.{host + 1}" for host in range(hosts))
        self.host_cores, shared = share_cores(sorted(os.sched_getaffinity(0)), hosts)
        self.notes = [shared] if shared else []
        self._processes: list[subprocess.Popen[Any]] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Testbed:
        lacking = why_not()
        if lacking:
            raise TestbedError(lacking)
        for prefix in dead_prefixes():
            remove(prefix)
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, _leave) for n in CAUGHT if signal.getsignal(n) is signal.SIG_DFL}
        try:
            self._build()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """What runs ``argv`` on that host, on its cores; the process itself is replaced twice, so its id is that of ``argv``."""
        pin = ["taskset", "--cpu-list", ",".join(map(str, self.host_cores[host]))] if self.host_cores[host] else []
        return [*pin, *_within(self._namespace(f"h{host}")), *argv]

    def run(self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` on a host. env: instead of ours; popen: as Popen takes it. Killed when the block ends, if it still runs."""
        process = subprocess.Popen(self.command(host, argv), env=None if env is None else dict(env), **popen)
        self._processes.append(process)
        return process

    def environment(self, host: int) -> dict[str, str]:
        """What a command on a host may want to know: its number, and all hosts' addresses."""
        return {"TESTBED_HOST": str(host), "TESTBED_ADDRESSES": ",".join(self.addresses)}

    @contextlib.contextmanager
    def cut_off(self, host: int) -> Iterator[None]:
        """Nothing goes to that host or comes from it while the block runs; both ends' connections stay as they are, as with a cable that is
        pulled out somewhere in between."""
        if self._delay_ms or self._loss:
            raise WrongTestbed("cut_off: with --delay-ms or --loss there is no switch to take the host from")
        switch, port = self._namespace("switch"), f"port{host}"
        _ip("-n", switch, "link", "set", port, "nomaster")
        try:
            yield
        finally:
            _ip("-n", switch, "link", "set", port, "master", "bridge")

    def lose(self, host: int) -> None:
        """That host is no more: nothing goes to it or comes from it, not even that its processes have ended."""
        if self._delay_ms or self._loss:
            raise WrongTestbed("lose: with --delay-ms or --loss there is no switch to take the host from")
        _ip("-n", self._namespace("switch"), "link", "set", f"port{host}", "nomaster")
        _kill_all(self._namespace(f"h{host}"))

    def set_gbps(self, gbps: float) -> None:
        """From now on every host's link, which had a limit from the start, has this one."""
        if self.gbps is None or self._delay_ms or self._loss:
            raise WrongTestbed("set_gbps: expected links that have had a limit from the start, without --delay-ms and --loss")
        switch = self._namespace("switch")
        for host in range(len(self.addresses)):
            name = self._namespace(f"h{host}")
            for space, device in ((name, "eth0"), (switch, f"port{host}")):
                _call(["tc", "-n", space, "qdisc", "change", "dev", device, "root", "tbf", *_limits(gbps)])
            _ip("-n", name, "link", "set", "eth0", "gso_max_size", str(min(_burst_bytes(gbps) - HEADER_BYTES, 65536)))
        self.gbps = gbps

    def _namespace(self, name: str) -> str:
        return self._prefix + name

    def _build(self) -> None:
        switch, ports = self._namespace("switch"), [f"port{host}" for host in range(len(self.addresses))]
        _ip("netns", "add", switch)
        for host, (address, port) in enumerate(zip(self.addresses, ports, strict=True)):
            self._add_host(self._namespace(f"h{host}"), address, switch, port)
        if self._delay_ms or self._loss:
            self._start_relay(switch, ports)
            return
        _ip("-n", switch, "link", "add", "name", "bridge", "type", "bridge")
        for port in ports:
            _ip("-n", switch, "link", "set", port, "master", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")

    def _add_host(self, name: str, address: str, switch: str, port: str) -> None:
        _ip("netns", "add", name)
        _ip("link", "add", "name", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for space, device in ((name, "lo"), (name, "eth0"), (switch, port)):
            _ip("-n", space, "link", "set", device, "up")
        # BBR, where it is the machine's choice, stops for 200 ms every 10 s to measure the way; cubic is what most hosts have.
        _ip("-n", name, "route", "replace", "10.77.0.0/24", "dev", "eth0", "src", address, "congctl", "cubic")
        if self._loss:  # packets are lost one by one, not in bundles of 45
            _ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1")
        if self.gbps is not None:
            for space, device in ((name, "eth0"), (switch, port)):
                _call(["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *_limits(self.gbps)])
            # A segment that is larger than a burst is cut up by the queue, which takes twice the CPU and halves the rate on a busy machine.
            _ip("-n", name, "link", "set", "eth0", "gso_max_size", str(min(_burst_bytes(self.gbps) - HEADER_BYTES, 65536)))

    def _start_relay(self, switch: str, ports: Sequence[str]) -> None:
        script = [sys.executable, str(Path(__file__).with_name("wire_relay.py")), *ports]
        flags = ["--delay-ms", str(self._delay_ms), "--loss", str(self._loss), "--seed", str(self._seed)]
        relay = subprocess.Popen([*_within(switch), *script, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._processes.append(relay)
        with _closing(relay.stdout) as said, _closing(relay.stderr) as errors:
            if said.readline() != "ready\n":
                raise TestbedError(f"delay and loss need packet sockets: {(errors.read().strip().splitlines() or ['the relay died'])[-1]}")

    def _end(self) -> None:
        """Undisturbed by further signals."""
        ours = threading.current_thread() is threading.main_thread()
        during: dict[int, Any] = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, *CAUGHT)} if ours else {}
        try:
            remove(self._prefix)
            for process in self._processes:
                process.wait()
        finally:
            for number, handler in {**during, **self._before}.items():
                signal.signal(number, handler)


def share_cores(cores: Sequence[int], hosts: int) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Each host's own cores, as many for each, and ""; where there are too few: none of its own, and what is to be said about it."""
    each = len(cores) // hosts
    if not each:
        return ((),) * hosts, f"{hosts} hosts share {len(cores)} core{'s' * (len(cores) > 1)}: a host's work slows the others"
    return tuple(tuple(cores[host * each : (host + 1) * each]) for host in range(hosts)), ""


def why_not() -> str:
    """What this machine lacks for a testbed; "" if nothing."""
    if os.geteuid() != 0:
        return "not root: network namespaces need it; run it with sudo"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"no {' and no '.join(lacking)} here: install iproute2 and util-linux"
    trial = f"{PREFIX}{os.getpid()}-{_start_of(os.getpid())}-{secrets.token_hex(2)}-"
    try:
        _ip("netns", "add", trial)
        _call(["tc", "-n", trial, "qdisc", "add", "dev", "lo", "root", "tbf", *_limits(1.0)])
        _ip("-n", trial, "link", "add", "name", "end", "type", "veth", "peer", "name", "other")
        _ip("-n", trial, "link", "add", "name", "bridge", "type", "bridge")
    except TestbedError as error:
        return f"this kernel or container does not let us: {error}"
    finally:
        remove(trial)
    return ""


def _limits(gbps: float) -> list[str]:
    queue = max(LEAST_QUEUE_BYTES, round(gbps * 1e9 / 8 * QUEUE_S))
    return ["rate", f"{round(gbps * 1e9)}bit", "burst", str(_burst_bytes(gbps)), "limit", str(queue)]


def _burst_bytes(gbps: float) -> int:
    return max(LEAST_BURST_BYTES, round(gbps * 1e9 / 8 * BURST_S))


def dead_prefixes() -> list[str]:
    """Of testbeds whose process is no more: it was killed, and could not clean up."""
    prefixes = []
    for name in _names():
        pid, _, rest = name[len(PREFIX) :].partition("-")
        start = rest.partition("-")[0]
        if pid.isdigit() and start.isdigit() and _start_of(int(pid)) != int(start):
            prefixes.append(f"{PREFIX}{pid}-{start}-")
    return sorted(set(prefixes))


def _start_of(pid: int) -> int | None:
    """When the process started, in ticks since boot: with its id this names a process for good. None: there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def remove(prefix: str) -> None:
    """Kill what runs in the namespaces whose names begin so, and remove them, their links with them."""
    for name in (name for name in _names() if name.startswith(prefix)):
        _kill_all(name)
        with contextlib.suppress(TestbedError):  # another testbed removes it, too
            _ip("netns", "del", name)


def _kill_all(name: str) -> None:
    deadline = time.monotonic() + UNKILLABLE_S
    while time.monotonic() < deadline:
        listed = subprocess.run(["ip", "netns", "pids", name], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        pids = [int(pid) for pid in listed.stdout.split()]
        if not any(_runs(pid) for pid in pids):
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether it is neither gone nor dead and waiting for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _names() -> list[str]:
    return sorted(entry.name for entry in NAMESPACES.glob(f"{PREFIX}*"))


def _within(namespace: str) -> list[str]:
    return ["nsenter", f"--net={NAMESPACES / namespace}"]


def _ip(*words: str) -> None:
    _call(["ip", *words])


def _call(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(f"`{' '.join(argv)}`: {(done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1]}")


@contextlib.contextmanager
def _closing(pipe: IO[str] | None) -> Iterator[IO[str]]:
    assert pipe is not None
    with pipe:
        yield pipe


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


@dataclass(frozen=True, slots=True)
class Member:
    """One process to be started. service: it ends by itself when all others have."""

    name: str
    host: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    service: bool = False


def everywhere(testbed: Testbed, command: Sequence[str], per_host: int) -> list[Member]:
    """The command on every host, ``per_host`` times."""
    members = []
    for host in range(len(testbed.addresses)):
        env = {**os.environ, **testbed.environment(host)}
        members += [Member(f"host {host}" + (f".{copy}" if per_host > 1 else ""), host, command, env) for copy in range(per_host)]
    return members


def psgc_job(
    testbed: Testbed,
    command: Sequence[str],
    per_host: int = 1,
    servers: int = 1,
    extra: Mapping[str, str] | None = None,
    server_hosts: int = 1,
) -> list[Member]:
    """A job's members, services first. The first ``server_hosts`` hosts have the servers, in turn; each other host is a node with ``per_host``
    workers. With 0 every host is a node, and the servers run beside the workers. The scheduler is on host 0."""
    from psgc.launch.job.run import NOT_INHERITED

    nodes = len(testbed.addresses) - server_hosts
    if nodes < 1:
        raise WrongTestbed(
            f"--job: expected at least {server_hosts + 1} hosts; the first {server_hosts} are for servers, the others for workers"
        )
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    env.update(
        DMLC_NUM_WORKER=str(nodes), DMLC_NUM_SERVER=str(servers), DMLC_PS_ROOT_URI=testbed.addresses[0], DMLC_PS_ROOT_PORT=str(JOB_PORT),
        BYTEPS_LOCAL_SIZE=str(per_host), BYTEPS_FORCE_DISTRIBUTED="1", PSGC_JOB=str(secrets.randbits(62) | 1),
        PSGC_TOKEN=secrets.token_hex(16), OMP_WAIT_POLICY="passive",
    )  # fmt: skip
    env.setdefault("OMP_NUM_THREADS", "1")
    env.update(extra or {})
    launch = [sys.executable, "-c", LAUNCH]
    members = [Member("scheduler", 0, launch, {**env, "DMLC_ROLE": "scheduler"}, service=True)]
    for index in range(servers):
        own = {**env, "DMLC_ROLE": "server", "DMLC_SERVER_ID": str(index)}
        members.append(Member(f"server {index}", index % (server_hosts or nodes), launch, own, service=True))
    for node in range(nodes):
        own = {**env, **testbed.environment(server_hosts + node), "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(node)}
        members.append(Member(f"node {node}", server_hosts + node, [*launch, *command], own))
    return members


def run_members(testbed: Testbed, members: Sequence[Member]) -> int:
    """Run them to their end, their output marked with their names; as Supervisor.run returns."""
    from psgc.launch.supervision.supervisor import Supervisor

    with Supervisor("testbed") as supervisor:
        for member in members:
            supervisor.start(member.name, testbed.command(member.host, member.argv), member.env, service=member.service)
        return supervisor.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--gbps", type=float, default=None, help="of each host's link, each way, 1e9 bit/s; default: no limit")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, between any two hosts")
    parser.add_argument("--loss", type=float, default=0.0, help="probability that a packet is lost")
    parser.add_argument("--job", action="store_true", help="CMD is a psgc worker; bring up its job")
    parser.add_argument("--servers", type=int, help="of the job; default: 1")
    parser.add_argument(
        "--server-hosts", type=int, help="of the job: hosts for its servers alone; 0: they run beside the workers; default: 1"
    )
    parser.add_argument("--per-host", type=int, default=1, help="processes of CMD on a host")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="what to run")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    servers = 1 if options.servers is None else options.servers
    try:
        if not command or options.per_host < 1 or servers < 1:
            raise WrongTestbed("expected a command after --, and --per-host and --servers of at least 1")
        if options.servers is not None and not options.job:
            raise WrongTestbed(f"--servers {servers} without --job: nothing but a psgc job has servers; give both or neither")
        if options.server_hosts is not None and (not options.job or options.server_hosts < 0):
            raise WrongTestbed(f"--server-hosts {options.server_hosts}: expected 0 or more, and --job: nothing but a psgc job has servers")
        with Testbed(options.hosts, options.gbps, delay_ms=options.delay_ms, loss=options.loss) as testbed:
            for note in testbed.notes:
                print(f"testbed: {note}", file=sys.stderr)
            if options.job:
                server_hosts = 1 if options.server_hosts is None else options.server_hosts
                members = psgc_job(testbed, command, options.per_host, servers, server_hosts=server_hosts)
            else:
                members = everywhere(testbed, command, options.per_host)
            status = run_members(testbed, members)
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, WrongTestbed) else 1)
    sys.exit(status)


if __name__ == "__main__":
    main()
