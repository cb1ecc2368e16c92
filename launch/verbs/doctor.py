"""``psgc doctor``: can psgc run here? Each check says what was found, what is wanted, and how to mend it."""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from psgc.config import Config
from psgc.errors import ConfigError, UsageError
from psgc.launch.flags import Json
from psgc.launch.tables import print_table, progress
from psgc.launch.topology import Topology, detect, switch_size
from psgc.launch.topology.describe import rows as rows_of
from psgc.processes.addresses import join
from psgc.processes.cores import usable_cores

Finding = tuple[bool, str]
PACKAGES = {"numpy": (1, 26), "numba": (0, 60), "pyzmq": (26,), "torch": (2, 4)}
IMPORT_NAMES = {"pyzmq": "zmq"}
# Of these the comparison of a job's machines has checks of its own.
COMPARED = ("memory", "cores", "open files", "kernel cache", "scheduler", "tcp after a pause", "compiled ahead")


def doctor(
    job: Annotated[
        bool,
        typer.Option(
            "--job", help="Compare the machines of a job before it starts: run this on each, with the environment of its psgc-launch."
        ),
    ] = False,
    wait: Annotated[float, typer.Option(help="With --job: seconds to wait for the other machines.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Check that psgc can run here, and say how to mend what is wrong; show the machine's GPUs, links and interfaces.

    Example: psgc doctor --json
    """
    if job:
        _examine_job(wait, as_json)
    with progress(as_json):
        report = examine()
    if as_json:
        print(json.dumps(report))
    else:
        print_table(
            ["", "check", "found", "wanted"], [["ok" if c["ok"] else "WRONG", c["name"], c["found"], c["wanted"]] for c in report["checks"]]
        )
        print_table(["this machine", ""], rows_of(*_machine(), _roots()))
        for check in report["checks"]:
            if not check["ok"]:  # below the table and unbroken, to be copied
                print(f"{check['name']} is wrong; remedy: {check['remedy']}")
    sys.exit(0 if report["ok"] else 1)


def _examine_job(wait_s: float, as_json: bool) -> NoReturn:
    """Meet the job's other machines, print what is wrong with all of them together, and exit with status 1 if anything is."""
    from psgc.launch.doctor.compare import rows, to_json
    from psgc.launch.doctor.facts import collect
    from psgc.launch.doctor.meeting import host_meeting, join_meeting
    from psgc.launch.job.clusters import completed
    from psgc.launch.job.part import of_machine, roles_of

    if not 0 < wait_s < 1e6:
        raise UsageError(f"doctor: --wait {wait_s:g}: expected seconds above 0")
    env = completed(os.environ, socket.gethostname()).within(os.environ)
    roles = roles_of(env)
    config = Config.from_env(of_machine(env), role=roles[-1])
    config.require_cluster()
    with progress(as_json):
        checks = [_check(*row) for row in _rows() if row[0] not in COMPARED]
        wrong = tuple((check["name"], check["found"], check["remedy"]) for check in checks if not check["ok"])
        own = collect(config, roles, env, _machine()[0], wrong)
    meet = host_meeting if "scheduler" in roles else join_meeting
    findings = meet(config, own, wait_s, lambda text: print(f"psgc doctor: {text}", file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps({"ok": not findings, "findings": to_json(findings)}))
    elif findings:
        print_table(["check", "machine", "found", "remedy"], rows(findings))
    else:
        print(f"{own.name}: nothing is wrong with the job's machines")
    sys.exit(1 if findings else 0)


def examine() -> dict[str, Any]:
    """All checks, as ``psgc doctor --json`` prints them."""
    checks = [_check(*row) for row in _rows()]
    found, size = _machine()
    return {"ok": all(check["ok"] for check in checks), "checks": checks, "topology": found.to_json(size)}


@cache
def _machine() -> tuple[Topology, int]:
    """This machine's topology, and BYTEPS_PCIE_SWITCH_SIZE if it suits it."""
    found = detect()
    try:
        return found, switch_size(os.environ, found)
    except UsageError:
        return found, 0  # the check says so


def _roots() -> tuple[int, ...]:
    try:
        return Config.from_env().reduce_roots
    except ConfigError:
        return ()  # the check of the environment says so


def _topology() -> Finding:
    found, _ = _machine()
    try:
        switch_size(os.environ, found)
    except UsageError as error:
        return False, str(error)
    return True, f"{len(found.gpus)} GPU(s), {len(found.nics)} network interface(s), {len(found.numa)} NUMA node(s){_placing(found)}"


def _placing(found: Topology) -> str:
    """Whether psgc can have pinned memory on a GPU's NUMA node, where that is a question."""
    from psgc.transport.memory.numa import may_place_memory

    if not found.gpus or len(found.numa) < 2 or may_place_memory():
        return ""
    return "; the kernel does not let this process choose the node of its memory (set_mempolicy), so pinned memory may be far from its GPU"


def _rows() -> list[tuple[str, Callable[[], Finding], str, str]]:
    rows: list[tuple[str, Callable[[], Finding], str, str]] = [
        ("python", _python, "3.10 or newer on Linux", "install a newer Python"),
        ("environment", _environment, "settings that make sense", "mend the variable named; docs/env.md lists them all"),
        ("memory", _memory, "at least 1 GiB available", "end other programs, or use a larger machine"),
        ("cores", _cores, "at least 2: a trainer and psgc's threads share them", "give this process more cores (taskset, cgroup)"),
        ("open files", _open_files, "a limit of at least 1024", "ulimit -n 65536"),
        ("shared memory", _shared_memory, "sealed memfds, passed between processes", "run on Linux 5 or newer; else PSGC_TRANSPORT=tcp"),
        (
            "tcp after a pause",
            _after_a_pause,
            "0 (sysctl -w) where links have a delay of 10 ms or more",
            "advice only",
        ),
        ("loopback", _loopback, "a ZeroMQ message over TCP on this host", "check firewall rules for 127.0.0.1"),
        ("kernel cache", _kernel_cache, "a folder that can be written", "set NUMBA_CACHE_DIR to one; else every start compiles"),
        ("compiled ahead", _warm, "or at first use, for some 10 s a codec", "psgc warm"),
        ("kernels", _kernels, "a compiled kernel gives its definition's bytes", "reinstall numba and llvmlite"),
        ("gpu kernels", _gpu_kernels, "Triton can run them, where there is a GPU", "what it says; else gradients are encoded on the CPU"),
        ("topology", _topology, "shown below; without GPUs nothing of it is needed", "unset BYTEPS_PCIE_SWITCH_SIZE, or correct it"),
        (
            "scheduler",
            _scheduler,
            "answers at DMLC_PS_ROOT_URI:PORT, where one is named",
            "start it, open its port, or correct the address",
        ),
    ]
    for package, minimum in PACKAGES.items():
        wanted = f"{'.'.join(map(str, minimum))} or newer"
        rows.insert(1, (package, partial(_package, package, minimum), wanted, f"pip install -U {package}"))
    return rows


def _check(name: str, look: Callable[[], Finding], wanted: str, remedy: str) -> dict[str, Any]:
    try:
        ok, found = look()
    except Exception as error:
        ok, found = False, f"{type(error).__name__}: {error}"
    return {"name": name, "ok": ok, "found": found, "wanted": wanted, "remedy": "" if ok else remedy}


def _python() -> Finding:
    return sys.version_info >= (3, 10) and sys.platform == "linux", f"{platform.python_version()} on {sys.platform}"


def _package(name: str, minimum: tuple[int, ...]) -> Finding:
    version = importlib.metadata.version(name)
    importlib.import_module(IMPORT_NAMES.get(name, name))  # installed and broken is not installed
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    return numbers >= minimum, version


def _own_config() -> Config:
    """The configuration of this process. If psgc-launch would start several roles on this machine, it is that of none in particular."""
    several = os.environ.get("DMLC_ROLE", "").strip().lower()
    return Config.from_env({k: v for k, v in os.environ.items() if k != "DMLC_ROLE" or not (several == "joint" or "," in several)})


def _environment() -> Finding:
    try:
        config = _own_config()
    except ConfigError as error:
        return False, str(error)
    return not config.notes, "; ".join(config.notes) or f"role {config.role}, {config.nodes} node(s), {config.servers} server(s)"


def _memory() -> Finding:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    mib = int(lines["MemAvailable"].split()[0]) >> 10
    return mib >= 1024, f"{mib} MiB available"


def _cores() -> Finding:
    cores = usable_cores()
    return cores >= 2, str(cores)


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # to which psgc's processes raise their own
    return hard == resource.RLIM_INFINITY or hard >= 1024, str(hard)


def _shared_memory() -> Finding:
    """A sealed segment is passed over an abstract socket, and what was written to it is read at the other end."""
    from psgc.transport.memory.segment import Place, Segment
    from psgc.transport.security.handshake import NONCE_BYTES, ServerProof, WorkerProof
    from psgc.transport.shm import LocalLink, LocalListener
    from psgc.wire.frames import Header, Kind

    segment = Segment.create("psgc-doctor", 4096)
    listener = LocalListener(f"psgc-doctor/{os.getpid()}")
    key, nonces = os.urandom(NONCE_BYTES), (os.urandom(NONCE_BYTES), os.urandom(NONCE_BYTES))
    sender = LocalLink.connect(listener.name, WorkerProof("unix", 0, 1, 0, key, "here", nonces[0]))
    receiver = listener.accept(ServerProof("unix", 0, 1, 1, lambda _: key, nonces[1]))
    try:
        proved = [link.prove() for _ in range(3) for link in (receiver, sender)]
        assert all(proved[-2:]), "both ends know the key"
        segment.bytes[:5] = list(b"hello")
        sender.send(Header(Kind.PUSH, payload_bytes=5), place=Place(segment, 0, segment.bytes))
        sender.flush()
        received = [bytes(payload) for _, payload in receiver.receive()]
        sealed = bool(fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        return received == [b"hello"] and sealed, "a sealed segment passed and read"
    finally:
        sender.close()
        receiver.close()
        listener.close()
        segment.close()


def _after_a_pause() -> Finding:
    """Never wrong: what it costs depends on the links. 1: after a pause of a retransmission timeout (0.2 s and the round trip) or more, as backward
    makes them, TCP begins with ten packets again and needs round trips to be as fast as before."""
    setting = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
    if not setting.exists():
        return True, "not known here"
    return True, f"{setting.read_text().strip()} (net.ipv4.tcp_slow_start_after_idle)"


def _loopback() -> Finding:
    import zmq

    context: zmq.Context[Any] = zmq.Context()
    try:
        server, client = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"hello")
        ok = bool(server.poll(20_000)) and server.recv() == b"hello"
        return ok, f"sent and received on port {port}"
    finally:
        context.destroy(0)


def _kernel_cache() -> Finding:
    from psgc.codecs.jit.kernel_cache import cache_folder

    folder = cache_folder()
    return folder is not None, str(folder or "no folder can be written")


def _warm() -> Finding:
    """Whether kernels are compiled ahead. Never an error: the others compile at first use."""
    from psgc.launch.job.warming import everything, is_warm

    known = everything()
    cold = [text for text in known if not is_warm(text)]
    if not cold:
        return True, "all codecs, and the planner"
    if len(cold) == len(known):
        return True, "none yet: each is compiled at its first use, or by `psgc warm`"
    return True, f"{', '.join(text for text in known if text not in cold)}; `psgc warm` compiles the rest"


def _kernels() -> Finding:
    import numpy as np

    from psgc.codecs import Stream, parse_codec

    codec = parse_codec("onebit")
    grad = np.linspace(-1, 1, 4097, dtype=np.float32)
    out = np.zeros(codec.payload_bound(len(grad)), np.uint8)
    codec.encode(grad, np.zeros_like(grad), 1.0, Stream(0, 1, 0, 0), out)
    signs = np.packbits(grad < 0, bitorder="little")
    return out[-len(signs) :].tobytes() == signs.tobytes(), "onebit packs the signs of 4097 elements"


def _gpu_kernels() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return True, "no GPU: none are needed"
    from psgc.cuda.common.usable import why_not

    reason = why_not()
    return not reason, reason or f"Triton runs on {torch.cuda.get_device_name()}"


def _scheduler() -> Finding:
    config = _own_config()
    if not config.root_host:
        config.require_alone()
        return True, "none named: this process would be a job of one"
    with socket.create_connection((config.root_host, config.root_port), timeout=2):
        return True, f"{join(config.root_host, config.root_port)} accepts connections"
