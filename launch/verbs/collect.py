"""The verb ``psgc collect``: one archive for a bug report, of all hosts that can be reached."""

from __future__ import annotations

import gzip
import io
import os
import shlex
import subprocess
import sys
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psgc.errors import PsgcError, UsageError

if TYPE_CHECKING:
    from psgc.launch.job.hostfile import Host

HOST_S = 120.0  # limit on one host's part
STDOUT = "-"
GZIP = b"\x1f\x8b\x08"  # an archive begins with it; before it is what the host's shell prints at every start


def collect(
    output: Annotated[str, typer.Option("--output", "-o", help="The archive (.tar.gz); -: standard output.")] = "psgc-bundle.tar.gz",
    pid: Annotated[int | None, typer.Option(help="A job's launcher, or another of its processes, on this machine.")] = None,
    job: Annotated[str, typer.Option(help="Processes of this PSGC_JOB; default, without --pid: of all jobs here.")] = "",
    hostfile: Annotated[
        str | None, typer.Option("--hostfile", help="Further hosts, as of `psgc run --hostfile`; they are reached over ssh.")
    ] = None,
    ssh: Annotated[str, typer.Option(help="The command that reaches hosts.")] = "ssh",
    log: Annotated[list[Path] | None, typer.Option("--log", help="A log file to add; may be repeated.")] = None,
) -> None:
    """Gather logs, settings, versions, the doctor's findings, the job's status and traces into one archive, without the job's secrets.

    Logs are the files that the output of the job's processes goes to, and those that --log names. Look into the archive before you give it away.

    Example: psgc collect --pid 4711 --hostfile hosts -o bundle.tar.gz
    """
    from psgc.launch.observing.bundle import gather
    from psgc.launch.observing.processes import environment, family, members
    from psgc.launch.verbs.doctor import examine

    for path in log or ():
        if not path.is_file():
            raise UsageError(f"collect: --log {path}: there is no such file")
    if pid is not None and not environment(pid):
        raise UsageError(f"collect: --pid {pid}: there is no such process, or it is another user's")
    pids = members(job) if pid is None else family(pid)
    ids = {env["PSGC_JOB"] for one in pids if (env := environment(one)).get("PSGC_JOB")}
    job = job or (ids.pop() if len(ids) == 1 else "")
    hosts = _hosts(hostfile)
    if output != STDOUT and not os.access(Path(output).resolve().parent, os.W_OK):
        raise UsageError(f"collect: --output {output}: its folder cannot be written to")
    bundle = gather(pids, log or (), examine(), _status(pid if pid is not None else next(iter(pids), None)))
    notes = [] if pids or log else ["no process of a job was found on this machine; name one with --pid, or its log with --log"]
    with ThreadPoolExecutor(16) as pool:
        for host, (data, why) in zip(hosts, pool.map(lambda host: _part(host, job, ssh), hosts), strict=True):
            entries, damage = ([], why) if why else _entries(data)
            if damage:
                notes.append(f"{host.name}: {damage}")
            for name, content in entries:
                bundle.add(f"hosts/{host.name}/{name}", content)
    bundle.add("notes.txt", "".join(f"{note}\n" for note in notes).encode())
    archive = bundle.close()
    if output == STDOUT:
        sys.stdout.buffer.write(archive)
        return
    try:
        Path(output).write_bytes(archive)
    except OSError as error:
        raise UsageError(f"collect: --output {output}: {error.strerror}") from None
    for note in notes:
        print(f"psgc collect: {note}", file=sys.stderr)
    print(f"{output}: {len(bundle.names)} files, {len(archive) / 1e6:.1f} MB; secrets were left out, look into it before you give it away")


def _hosts(hostfile: str | None) -> list[Host]:
    """Those of the file, but this machine."""
    from psgc.launch.job.hostfile import read_hosts
    from psgc.launch.job.hosts import Way, is_here

    if hostfile is None:
        return []
    found = {(host.name, host.port): host for host in read_hosts(hostfile)}
    return [host for host in found.values() if not is_here(host, Way())]


def _status(pid: int | None) -> dict[str, Any]:
    """What ``psgc top --json`` says, or why it does not."""
    from psgc.launch.observing.live_table import document
    from psgc.launch.observing.scheduler_view import SchedulerView, config_of
    from psgc.observe.live import Follower

    try:
        with SchedulerView(config_of(pid)) as scheduler:
            return document(Follower().see(scheduler.ask()))
    except PsgcError as error:
        return {"error": str(error)}


def _part(host: Host, job: str, ssh: str) -> tuple[bytes, str]:
    """A host's archive, and what is wrong with it."""
    from psgc.launch.job.hosts import Way, ssh_command

    words = [sys.executable, "-m", "psgc.launch", "collect", "-o", STDOUT, *(["--job", job] if job else [])]
    try:
        command = ssh_command(host, Way(ssh=shlex.split(ssh)), shlex.join(words))
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=HOST_S, check=False)
    except subprocess.TimeoutExpired:
        return b"", f"nothing came for {HOST_S:.0f} s"
    except OSError as error:
        return b"", f"{ssh} cannot be started: {error.strerror}"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return (done.stdout, "") if not done.returncode else (b"", said[-1] if said else f"ssh ended with status {done.returncode}")


def _entries(data: bytes) -> tuple[list[tuple[str, bytes]], str]:
    """What is in a host's archive, as far as it can be read, and what is wrong with it. Nothing of it is unpacked to this machine."""
    start, found = data.find(GZIP), list[tuple[str, bytes]]()
    if start < 0:
        said = data.decode(errors="replace").strip().splitlines()
        return found, f"it sent no archive{f', but {said[0]!r:.100}' if said else ''}"
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data[start:])) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for entry in archive:
                if entry.isreg() and (file := archive.extractfile(entry)) is not None:
                    found.append((entry.name, file.read()))
            stream.read()  # up to its checksum
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        return found, f"its archive is damaged ({' '.join(str(error).split())}); {len(found)} file(s) of it could be read"
    return found, ""
