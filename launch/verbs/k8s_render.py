"""The verb ``psgc k8s render``: a job as manifests for Kubernetes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from psgc.plan.model.plan import Plan

KINDS = ("jobset", "trainjob")
# With "-scheduler-0-0" and a suffix of Kubernetes' own, a pod's name has to be a label of DNS, which has 63 characters.
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
CONFIG_MAP_BYTES = 1 << 20  # Kubernetes takes no larger one


def render(
    command: Annotated[list[str] | None, typer.Argument(metavar="CMD", help="What every worker runs.", show_default=False)] = None,
    name: Annotated[str, typer.Option(help="Name of the job and of its objects.")] = "psgc",
    image: Annotated[str, typer.Option(help="Image with psgc and the script; docs/docker.md has one to build on.")] = "psgc",
    kind: Annotated[str, typer.Option(help="jobset, or trainjob for Kubeflow Trainer.")] = "jobset",
    nodes: Annotated[int, typer.Option("--nodes", "-N", help="Pods of workers.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each of these pods, a worker for each.")] = 0,
    workers_per_node: Annotated[
        int | None, typer.Option(help="Workers of each of these pods. Default: one for each GPU, else one.")
    ] = None,
    servers: Annotated[
        int | None, typer.Option(help="Pods of servers; 0: none. Default: as many as the plan has, else one for each node.")
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Codec of DistributedOptimizer, e.g. int8 or onebit/int8.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan, which goes along as a ConfigMap; its tensors say how much memory servers need.")
    ] = None,
    parameters: Annotated[float, typer.Option(help="Parameters of the model, for servers' memory, where there is no plan.")] = 100e6,
    link_gbit: Annotated[float, typer.Option(help="Gbit/s of a server's link, for its cores.")] = 10.0,
    server_cpu: Annotated[str | None, typer.Option(help="Cores of a server, in place of the rule's.")] = None,
    server_memory: Annotated[str | None, typer.Option(help="Memory of a server, in place of the rule's, e.g. 8Gi.")] = None,
    worker_cpu: Annotated[str, typer.Option(help="Cores of each pod of workers. Default: none asked for.")] = "",
    worker_memory: Annotated[str, typer.Option(help="Memory of each pod of workers. Default: none asked for.")] = "",
    shm: Annotated[str, typer.Option(help="Limit of /dev/shm in pods of workers; it counts as their memory.")] = "8Gi",
    restarts: Annotated[int, typer.Option(help="How often a job that failed is started again.")] = 0,
    secret: Annotated[
        str | None, typer.Option(help="A Secret that is there, whose key `token` is the job's. Default: a new one, drawn.")
    ] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Of all objects. Default: kubectl's.")] = "",
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for all processes.")] = None,
) -> None:
    """Print manifests for `kubectl apply -f -`: the job's secret, and a JobSet or Kubeflow Trainer's objects.

    Example: psgc k8s render --name bert -N 4 --gpus 8 --image registry/bert --codec int8 -- python train.py
    """
    import secrets

    from psgc.codecs import parse_scheme
    from psgc.config import Config
    from psgc.errors import UsageError
    from psgc.launch.job.checks import check_codec_or_plan, check_job
    from psgc.launch.job.hosts import forwarded
    from psgc.launch.job.interpreter import spares_of, words_of
    from psgc.launch.kubernetes import sizing
    from psgc.launch.kubernetes.manifests import Job, Resources, jobset, trainjob
    from psgc.launch.kubernetes.yaml_text import yaml_text

    if not command:
        raise UsageError("k8s render: no command given; for example: psgc k8s render --image registry/bert -- python train.py")
    if kind not in KINDS:
        raise UsageError(f"k8s render: --kind {kind}: choose one of {', '.join(KINDS)}")
    _check_texts(
        {"--name": name, "--namespace": namespace, "--secret": secret or ""},
        NAME,
        "up to 40 small letters, digits and dashes, first a letter",
    )
    quantities = {
        "--server-cpu": server_cpu or "", "--server-memory": server_memory or "", "--worker-cpu": worker_cpu, "--worker-memory": worker_memory, "--shm": shm,
    }  # fmt: skip
    _check_texts(quantities, QUANTITY, "a quantity as Kubernetes writes it, e.g. 4, 500m or 8Gi")
    planned = _plan(plan) if plan is not None else None
    if planned is not None:
        check_codec_or_plan("k8s render", codec, plan)
    workers = workers_per_node if workers_per_node is not None else max(1, gpus)
    if servers is None:
        servers = nodes if planned is None or planned.shape.servers is None else planned.shape.servers
    least = {
        "--nodes": (nodes, 1),
        "--workers-per-node": (workers, 1),
        "--servers": (servers, 0),
        "--gpus": (gpus, 0),
        "--restarts": (restarts, 0),
    }
    for label, (number, limit) in {**least, "--parameters": (parameters, 1), "--link-gbit": (link_gbit, 0)}.items():
        if not math.isfinite(number) or number < limit:
            raise UsageError(f"k8s render: {label} {number:g}: expected a number, at least {limit}")
    scheme = parse_scheme(codec or "none")
    settings = {**({"PSGC_CODEC": scheme.canonical} if codec else {}), **forwarded(env or [])}
    topology = {"DMLC_NUM_WORKER": str(nodes), "DMLC_NUM_SERVER": str(servers), "DMLC_PS_ROOT_URI": name, "DMLC_PS_ROOT_PORT": "9000"}
    config = Config.from_env({**settings, **topology, "PSGC_TOKEN": "set"})
    check_job(config, workers=nodes * workers, command=words_of(command), spares=spares_of(settings))
    if config.replicas:
        raise UsageError(
            "k8s render: PSGC_REPLICAS=1: a pod that is lost fails its Job, and then all pods start anew, so that no standby takes its place; leave it "
            "out, and give --restarts"
        )
    if planned is not None:
        parameters = sum(bucket.numel for bucket in planned.buckets)
    held = sizing.memory(parameters, max(1, servers), nodes * workers, scheme)
    job = Job(
        name=name, image=image, command=command, nodes=nodes, workers_per_node=workers, servers=servers, secret=secret or f"{name}-token",
        token="" if secret else secrets.token_hex(32), worker=Resources(cpu=worker_cpu, memory=worker_memory, gpus=gpus),
        server=Resources(cpu=server_cpu or sizing.cpu(link_gbit), memory=server_memory or held), shm=shm, restarts=restarts,
        save_s=config.save_timeout_s, namespace=namespace, plan=plan.read_text() if plan is not None else "", settings=settings,
    )  # fmt: skip
    print(yaml_text((trainjob if kind == "trainjob" else jobset)(job)), end="")


def _check_texts(texts: dict[str, str], pattern: re.Pattern[str], expected: str) -> None:
    """Raise UsageError for one that is given and does not fit. texts: by their flags."""
    from psgc.errors import UsageError

    for label, text in texts.items():
        if text and not pattern.fullmatch(text):
            raise UsageError(f"k8s render: {label} {text}: expected {expected}")


def _plan(path: Path) -> Plan:
    from psgc.errors import UsageError
    from psgc.plan.planfile.runtime import load_runnable

    found = load_runnable(str(path))
    if path.stat().st_size > CONFIG_MAP_BYTES:
        raise UsageError(
            f"k8s render: --plan {path} has {path.stat().st_size} bytes, and a ConfigMap at most {CONFIG_MAP_BYTES}: put the file into the image, and give "
            f"--env PSGC_PLAN=its path there"
        )
    return found
