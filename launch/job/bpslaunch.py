"""``psgc-launch CMD...``: one machine's part of a job. Used like BytePS's bpslaunch: role and topology come from the environment."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from psgc.config import Config
from psgc.errors import CodecError, ConfigError, PsgcError, UsageError
from psgc.launch.job.as_byteps import FOLDER, found_as_byteps
from psgc.launch.job.batch_signals import ignore_scripts, run_in_step
from psgc.launch.job.checks import check_trace
from psgc.launch.job.clusters import completed
from psgc.launch.job.cores import near_memory
from psgc.launch.job.interpreter import spares_of
from psgc.launch.job.members import Verdict, run_members, worker_command, worker_cores
from psgc.launch.job.node_addresses import address_of, await_name
from psgc.launch.job.part import of_machine, one_machine, roles_of
from psgc.launch.job.restarts import await_the_end, restarts_of, run_again
from psgc.launch.job.role import run_role
from psgc.launch.job.run import run_job
from psgc.launch.supervision.blame import Weight
from psgc.launch.topology.devices import local_size
from psgc.launch.version import version_line
from psgc.transport.control.voice import own_outlet

AS_BYTEPS: Final = "--as-byteps"
USAGE = """usage: psgc-launch [--as-byteps] CMD...

Starts this machine's part of a job. The role comes from DMLC_ROLE (worker, server, scheduler; joint is server,worker), the rest from
DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and, on workers, DMLC_WORKER_ID; see docs/env.md. Under Slurm
(`srun --ntasks-per-node=1 psgc-launch CMD...`) and in Kubernetes' PyTorchJobs all of these are found; in other pods, DMLC_WORKER_ID.

--as-byteps: CMD's `import byteps.torch` is psgc; everything else comes from the environment.

With DMLC_NUM_WORKER=1 there is one machine: its workers, one for each entry of NVIDIA_VISIBLE_DEVICES, get a scheduler and servers of
their own (BYTEPS_FORCE_DISTRIBUTED=1: they use those that you start).

examples, on the only machine, with two GPUs, and on node 1 of 2:
  NVIDIA_VISIBLE_DEVICES=0,1 DMLC_NUM_WORKER=1 psgc-launch python train.py
  DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_WORKER_ID=1 DMLC_NUM_SERVER=1 \\
  DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=9000 psgc-launch python train.py"""


def main() -> None:
    """Entry point of ``psgc-launch``."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(USAGE)
        sys.exit(0)
    if sys.argv[1:2] == ["--version"]:
        print(version_line())
        sys.exit(0)
    ignore_scripts()
    sys.exit(run_in_step(lambda: launch(sys.argv[1:], os.environ), os.environ, "psgc-launch"))


def launch(command: list[str], env: Mapping[str, str], verdict: Verdict | None = None, prefix: bool = True) -> int:
    """Run this machine's roles to their end. Wrong usage is one line on stderr and status 2. verdict: gets why the job failed, in place of stderr.
    prefix: whether lines of several processes begin with their names."""
    try:
        if command[:1] == [AS_BYTEPS]:
            command, env = command[1:], {**env, **found_as_byteps(env)}
        if command and command[0].startswith("-"):
            raise UsageError(f"no such option {command[0]}; everything but the command comes from the environment: see psgc-launch --help")
        found = completed(env, socket.gethostname())
        if found.source == "Slurm" and (node := found.settings.get("DMLC_PS_ROOT_URI", "")):
            found.settings["DMLC_PS_ROOT_URI"] = address_of(node)
        full = found.within(env)
        roles = roles_of(full)
        if found.settings:
            named = ", ".join(f"{name}={value}" for name, value in sorted(found.settings.items()))
            print(f"psgc-launch: from {found.source}: {named}", file=sys.stderr)
        check_trace(Config.from_env(of_machine(full), role="server", node=0))
        if env.get("KUBERNETES_SERVICE_HOST") and not one_machine(full) and "scheduler" not in roles:
            own = Config.from_env(of_machine(full), role=roles[-1])
            await_name(own.root_host, own.register_timeout_s, own.silence_s, lambda text: print(f"psgc-launch: {text}", file=sys.stderr))

        def between() -> None:
            if not one_machine(full):
                await_the_end(Config.from_env(of_machine(full), role=roles[-1]), "scheduler" in roles)

        return run_again(lambda more: _run(roles, command, {**full, **more}, verdict, prefix), restarts_of(full), "psgc-launch", between)
    except PsgcError as error:
        status = 2 if isinstance(error, (CodecError, ConfigError, UsageError)) else 1
        if verdict is None:
            print(f"psgc-launch: {error}", file=sys.stderr)
        else:
            verdict(Weight.OWN, str(error), status)
        return status


def _run(roles: Sequence[str], command: list[str], env: Mapping[str, str], verdict: Verdict | None, prefix: bool) -> int:
    """Run this machine's roles once."""
    if one_machine(env):
        return _run_machine(roles, command, env)
    if roles == ("scheduler",) and Config.from_env(of_machine(env), role="scheduler").wire != "psgc":
        return run_role("scheduler", env)
    return run_members(roles, command, {"PSGC_OUTLET": own_outlet(), **env}, verdict, prefix)


def _run_machine(roles: Sequence[str], command: list[str], env: Mapping[str, str]) -> int:
    """Run a job on this machine alone: one worker by itself, or several with a scheduler and servers started here. As with bpslaunch, the
    ports and addresses in the environment are not used."""
    if "worker" not in roles:
        print(f"psgc-launch: DMLC_NUM_WORKER=1 needs no {roles[0]}: the workers' launcher starts what they need; to have them use this one, set "
              f"BYTEPS_FORCE_DISTRIBUTED=1 everywhere", file=sys.stderr)  # fmt: skip
        return 0
    size = local_size(env)
    if size == 1:
        return run_members(("worker",), command, {"PSGC_OUTLET": own_outlet(), **env})
    command, cores = worker_command(command, env), worker_cores(env, size)
    config = Config.from_env(of_machine(env), role="worker")
    if address := env.get("DMLC_PS_ROOT_URI", "").strip():
        print(f"psgc-launch: DMLC_NUM_WORKER=1: the scheduler and the servers are started here, DMLC_PS_ROOT_URI={address} is not used (it is "
              f"with BYTEPS_FORCE_DISTRIBUTED=1)", file=sys.stderr)  # fmt: skip
    as_byteps = str(FOLDER) in env.get("PYTHONPATH", "").split(os.pathsep)  # the job's environment is this process's
    return run_job(
        command, workers=size, servers=config.servers, program="psgc-launch", cores=cores, as_byteps=as_byteps, before=near_memory(cores),
        more={name: env[name] for name in ("PSGC_RESTART",) if name in env}, spares=spares_of(env),
    )  # fmt: skip
