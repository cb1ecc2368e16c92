"""The verb ``psgc slurm``: submits a job to Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

# Of an allocation that `psgc slurm` is called in.
SLURMS = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NODEID")


def slurm(
    command: Annotated[list[str] | None, typer.Argument(metavar="CMD", help="What every worker runs.", show_default=False)] = None,
    nodes: Annotated[int, typer.Option("--nodes", "-N", help="Nodes of the job.")] = 1,
    workers_per_node: Annotated[
        int | None, typer.Option(help="Workers on each node. Default: one for each GPU that Slurm gives it, else one.")
    ] = None,
    servers: Annotated[int | None, typer.Option(help="Server processes, which the nodes share; 0: none. Default: one a node.")] = None,
    codec: Annotated[str | None, typer.Option(help="Codec of DistributedOptimizer, e.g. int8 or onebit/int8.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p", help="Slurm's partition.")] = None,
    time: Annotated[str | None, typer.Option("--time", "-t", help="Time limit, as Slurm takes it, e.g. 2:00:00.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs on each node.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="Cores on each node.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="Another option of sbatch, e.g. account=physics or exclusive.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and submit nothing.")] = False,
) -> None:
    """Submit a job to Slurm: on each node a psgc-launch, which starts a server and the node's workers; on the first the scheduler, too.

    Example: psgc slurm -N 4 --gpus-per-node 8 --codec int8 -- python train.py
    """
    from psgc.errors import PsgcError, UsageError
    from psgc.launch.job.slurm_script import Batch

    if not command:
        raise UsageError("slurm: no command given; for example: psgc slurm -N 4 -- python train.py")
    for name, value, least in (("--nodes", nodes, 1), ("--workers-per-node", workers_per_node, 1), ("--servers", servers, 0)):
        if value is not None and value < least:
            raise UsageError(f"slurm: {name} {value}: at least {least}")
    if codec:
        from psgc.codecs import parse_scheme

        codec = parse_scheme(codec).canonical
    given = {"partition": partition, "time": time, "gpus-per-node": gpus_per_node, "cpus-per-task": cpus_per_task}
    options = {name: str(value) for name, value in given.items() if value is not None}
    options |= {name.lstrip("-"): value for name, _, value in (text.partition("=") for text in sbatch or [])}
    if wrong := next((text for text in (*options, *options.values()) if "\n" in text or text.startswith("-")), ""):
        raise UsageError(f"slurm: {wrong!r} is no option of sbatch")
    settings = {"DMLC_NUM_SERVER": servers, "BYTEPS_LOCAL_SIZE": workers_per_node, "PSGC_CODEC": codec}
    given_settings = {name: str(value) for name, value in settings.items() if value is not None}
    batch = Batch(
        nodes=nodes, command=command, launcher=str(Path(sys.executable).parent / "psgc-launch"), options=options, settings=given_settings,
        outlives=_check(nodes, workers_per_node or 0, command, {**os.environ, **given_settings}),
    )  # fmt: skip
    if dry_run:
        print(batch.script(), end="")
        return
    if shutil.which("sbatch") is None:
        raise UsageError("slurm: there is no sbatch here; log into a machine of the cluster, or print the script with --dry-run")
    done = subprocess.run(["sbatch"], input=batch.script(), env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PsgcError(f"slurm: sbatch refuses: {' '.join(done.stderr.split()) or f'status {done.returncode}'}")
    print(done.stdout.strip())


def _check(nodes: int, workers_per_node: int, command: list[str], env: dict[str, str]) -> bool:
    """Refuse what the nodes could not do together, before anything is submitted. workers_per_node: 0: it follows from what Slurm gives. env: this shell's,
    which goes along, with the job's settings. Returns whether the job goes on when a node is lost."""
    from psgc.config import Config
    from psgc.errors import UsageError
    from psgc.launch.job.checks import check_job
    from psgc.launch.job.clusters import completed
    from psgc.launch.job.interpreter import spares_of, words_of
    from psgc.launch.job.part import local_servers, of_machine
    from psgc.launch.job.run import NOT_INHERITED

    if env.get("DMLC_NUM_WORKER", "").strip():  # the job's topology is the user's own
        return False
    # What another machine has, or Slurm, is not looked for here.
    env = {name: text for name, text in env.items() if name not in NOT_INHERITED and name not in ("PSGC_TOKEN_FILE", *SLURMS)}
    first = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NODELIST": f"n[1-{nodes}]"}
    found = completed({**env, **first}, "").settings
    config = Config.from_env({**of_machine({**env, **found}), "PSGC_TOKEN": "set"}, role="worker")
    if nodes == 1 and not config.force_distributed:
        return False
    shares = {"the first node": local_servers(config, {**env, **found})} if "server" in found.get("DMLC_ROLE", "") else {}
    check_job(config, workers=nodes * workers_per_node, shares=shares, command=words_of(command), spares=spares_of(env))
    shrinks = config.on_worker_loss == "shrink"
    if config.replicas and not shrinks:
        raise UsageError(
            f"slurm: PSGC_REPLICAS=1 and PSGC_ON_WORKER_LOSS={config.on_worker_loss}: every node has workers, and with a lost node's the job ends; set "
            f"PSGC_ON_WORKER_LOSS=shrink, or leave PSGC_REPLICAS at 0"
        )
    return shrinks
