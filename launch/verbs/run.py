"""The verb ``psgc run``: a whole job on this machine, or on the hosts of a file."""

from __future__ import annotations

import math
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from psgc.launch.job.placing import Place


def run(
    command: Annotated[list[str] | None, typer.Argument(metavar="CMD", help="What every worker runs.", show_default=False)] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: 2; with --hostfile, one for each slot.")] = None,
    servers: Annotated[
        int | None,
        typer.Option(
            help="Server processes; 0: workers aggregate among themselves. Default: 1; with --hostfile one a host, or its `server` lines."
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of simulated nodes that the workers are spread over. Default: 1; with --link-mbit one for each worker."),
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Codec of DistributedOptimizer, e.g. int8 or onebit/int8.")] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="File of the plan that gradients travel by, or auto: by what is measured to be quickest."),
    ] = None,
    layout_out: Annotated[str | None, typer.Option(help="Write the layout that was used to this file, as a plan.")] = None,
    link_mbit: Annotated[
        float | None,
        typer.Option(
            help="Give each node and each server a simulated link of this rate, in 1e6 bit/s, each way: psgc's payloads are paced and go by TCP. "
            "Not paced: torch.distributed's collectives, and psgc's control messages."
        ),
    ] = None,
    spares: Annotated[
        int | None,
        typer.Option(
            help="Processes that wait, with imports done, to take dead workers' places (PSGC_ON_WORKER_LOSS=wait or shrink); with --hostfile on "
            "each host. Default: PSGC_SPARES, or 0."
        ),
    ] = None,
    as_byteps: Annotated[bool, typer.Option("--as-byteps", help="CMD's `import byteps.torch` is psgc.")] = False,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Prefix each line with its process.")] = True,
    hostfile: Annotated[
        str | None,
        typer.Option(
            help="Run on this file's hosts, over ssh: lines such as `host slots=8`, `user@host port=2222`, `server host`, `spare host`."
        ),
    ] = None,
    worker_hostfile: Annotated[
        str | None, typer.Option("--worker-hostfile", "-WH", help="As BytePS's dist_launcher: a worker host a line.")
    ] = None,
    server_hostfile: Annotated[
        str | None, typer.Option("--server-hostfile", "-SH", help="As BytePS's dist_launcher: a server host a line.")
    ] = None,
    scheduler_ip: Annotated[
        str | None, typer.Option(help="Host of the scheduler, by an address that all hosts reach. Default: the first host.")
    ] = None,
    scheduler_port: Annotated[int | None, typer.Option(help="The scheduler's port. Default: a free one.")] = None,
    scheduler_ssh_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of ssh on the scheduler's host.")] = None,
    interface: Annotated[
        str | None, typer.Option(help="The hosts' network interface (DMLC_INTERFACE). Default: the one that leads to the scheduler.")
    ] = None,
    username: Annotated[str | None, typer.Option(help="User for ssh, of hosts that name none.")] = None,
    identity_file: Annotated[str | None, typer.Option("--identity-file", "--identity_file", "-i", help="Key for ssh.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="For the hosts' processes: NAME of this shell, or NAME=VALUE or NAME:VALUE. PSGC_*, BYTEPS_* and DMLC_* go without."
        ),
    ] = None,
    chdir: Annotated[str | None, typer.Option(help="Folder that CMD runs in on every host. Default: this one.")] = None,
    ssh: Annotated[str, typer.Option(help="How to connect, e.g. 'ssh -i key'.")] = "ssh",
    start_timeout: Annotated[float, typer.Option(help="Seconds within which every host has to answer.")] = 10.0,
    remote_python: Annotated[str | None, typer.Option(help="The hosts' Python that has psgc. Default: this one's path.")] = None,
) -> None:
    """Run a whole job: scheduler, servers, and CMD once a worker; on this machine, or with --hostfile on others.

    Example: psgc run --workers 4 --codec onebit -- python train.py

    Example: psgc run --hostfile hosts --codec int8 -- python train.py
    """
    from psgc.errors import UsageError
    from psgc.launch.job.interpreter import spares_of
    from psgc.launch.job.restarts import restarts_of, run_again

    over_ssh = {
        "--scheduler-ip": scheduler_ip, "--scheduler-port": scheduler_port, "--scheduler-ssh-port": scheduler_ssh_port, "--interface": interface,
        "--username": username, "--identity-file": identity_file, "--env": env, "--chdir": chdir, "--remote-python": remote_python,
        "--server-hostfile": server_hostfile,
    }  # fmt: skip
    if hostfile or worker_hostfile:
        for name, given in {"--nodes": nodes, "--link-mbit": link_mbit}.items():
            if given is not None:
                raise UsageError(f"run: {name} {given:g} is for jobs on this machine alone; leave it out, or the hosts' file")
        if not (math.isfinite(start_timeout) and start_timeout > 0):
            raise UsageError(f"run: --start-timeout {start_timeout:g}: expected seconds, more than 0")
        from psgc.launch.job.hosts import Way, forwarded, run_hosts
        from psgc.launch.job.placing import with_ssh_port

        way = Way(
            ssh=[*shlex.split(ssh), *(["-i", identity_file] if identity_file else [])], python=remote_python or sys.executable,
            folder=chdir or os.getcwd(), user=username or "", env=forwarded(env or []) | ({"DMLC_INTERFACE": interface} if interface else {}),
            root_host=scheduler_ip or "", root_port=scheduler_port or 0, prefix=prefix, start_s=start_timeout,
        )  # fmt: skip
        places = _places(hostfile, worker_hostfile, server_hostfile, scheduler_ip, workers, servers)
        if scheduler_ssh_port is not None:
            places = with_ssh_port(places, scheduler_ssh_port)

        def on_hosts(more: dict[str, str]) -> int:
            told = more if spares is None else {**more, "PSGC_SPARES": str(spares)}
            return run_hosts(command or [], places, way, codec=codec, plan=plan, layout_out=layout_out, as_byteps=as_byteps, more=told)

        sys.exit(run_again(on_hosts, restarts_of(os.environ), "psgc run"))
    for name, value in over_ssh.items():
        if value:
            raise UsageError(f"run: {name} is for jobs on several hosts; give --hostfile, too")
    from psgc.launch.job.run import run_job

    def once(more: dict[str, str]) -> int:
        return run_job(
            command or [], workers=2 if workers is None else workers, servers=1 if servers is None else servers, nodes=nodes, codec=codec, plan=plan,
            layout_out=layout_out, link_mbit=link_mbit, prefix=prefix, as_byteps=as_byteps, more=more,
            spares=spares_of(os.environ) if spares is None else spares,
        )  # fmt: skip

    sys.exit(run_again(once, restarts_of(os.environ), "psgc run"))


def _places(
    hostfile: str | None, worker_hostfile: str | None, server_hostfile: str | None, scheduler_ip: str | None, workers: int | None, servers: int | None
) -> list[Place]:  # fmt: skip
    """What each host runs."""
    from psgc.errors import UsageError
    from psgc.launch.job.hostfile import read_hosts
    from psgc.launch.job.placing import place

    if hostfile and (worker_hostfile or server_hostfile):
        raise UsageError("run: --hostfile names all hosts; leave out --worker-hostfile and --server-hostfile, or it")
    hosts = read_hosts(hostfile) if hostfile else read_hosts(str(worker_hostfile), byteps=True)
    if server_hostfile:
        hosts += read_hosts(server_hostfile, servers=True, byteps=True)
    return place(hosts, workers, servers, scheduler_ip)
