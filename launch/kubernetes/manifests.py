"""A job as Kubernetes' objects: its secret, and a JobSet, or Kubeflow Trainer's TrainingRuntime and TrainJob, which become a JobSet. Pure.

The scheduler is a pod, each server is one, and each node of workers is one. Pods find each other by the names that the JobSet's headless service gives them. No
container is started again where it was: whichever pod fails, its Job fails, and the JobSet starts all pods anew, as often as ``restarts`` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Document = dict[str, Any]

SCHEDULER_PORT: Final = 9000
SERVER_PORT: Final = 9100
SECRET_KEY: Final = "token"
PLAN_FOLDER: Final = "/etc/psgc"
PLAN_FILE: Final = "plan.json"
USER: Final = 1000  # the image's
JOBSET: Final = "jobset.x-k8s.io/v1alpha2"
TRAINER: Final = "trainer.kubeflow.org"
RESTARTED: Final = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
# A container that is hung is found by psgc itself after PSGC_DEAD_S; this is later.
LIVENESS: Final = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 12}
READINESS: Final = {"periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 3}
GRACE_S: Final = 30
SAVE_MARGIN_S: Final = 15  # in which a worker ends after its checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Of a container, as Kubernetes writes them; "" for none asked for."""

    cpu: str = ""
    memory: str = ""
    gpus: int = 0

    def document(self) -> Document:
        """A GPU's number is a limit and a request at once; the others are both, so that the pod is not evicted for what it was promised."""
        named = {"cpu": self.cpu, "memory": self.memory, "nvidia.com/gpu": str(self.gpus) if self.gpus else ""}
        given = {name: text for name, text in named.items() if text}
        return {"requests": given, "limits": dict(given)} if given else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """nodes: pods of workers, each with ``workers_per_node`` of them. secret: the Secret's name. token: its content; "" where it is there already. shm: limit
    of /dev/shm of workers' pods. save_s: how long a checkpoint may take (PSGC_SAVE_TIMEOUT_S). plan: the text of PSGC_PLAN's file; "" for none. settings:
    further variables of all processes."""

    name: str
    image: str
    command: Sequence[str]
    nodes: int
    workers_per_node: int
    servers: int
    secret: str
    token: str
    worker: Resources
    server: Resources
    shm: str
    restarts: int
    save_s: float
    namespace: str = ""
    plan: str = ""
    settings: Mapping[str, str]

    @property
    def root_host(self) -> str:
        """The scheduler's pod, by the name that the JobSet's service gives it."""
        return f"{self.name}-scheduler-0-0.{self.name}"


def jobset(job: Job) -> list[Document]:
    """The Secret, unless it is there already, the plan, if there is one, and the JobSet."""
    body = {"apiVersion": JOBSET, "kind": "JobSet", "metadata": _metadata(job, job.name), "spec": _jobset_spec(job, "worker")}
    return [*_beside(job), body]


def trainjob(job: Job) -> list[Document]:
    """The same with the TrainingRuntime and the TrainJob of Kubeflow Trainer."""
    runtime = {
        "apiVersion": f"{TRAINER}/v1alpha1", "kind": "TrainingRuntime", "metadata": _metadata(job, job.name),
        "spec": {"mlPolicy": {"numNodes": job.nodes}, "template": {"spec": _jobset_spec(job, "node")}},
    }  # fmt: skip
    trainer: Document = {"image": job.image, "command": ["psgc-launch", *job.command], "numNodes": job.nodes}
    if resources := job.worker.document():
        trainer["resourcesPerNode"] = resources
    reference = {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": job.name}
    train = {
        "apiVersion": f"{TRAINER}/v1alpha1", "kind": "TrainJob", "metadata": _metadata(job, job.name),
        "spec": {"runtimeRef": reference, "trainer": trainer},
    }  # fmt: skip
    return [*_beside(job), runtime, train]


def _metadata(job: Job, name: str) -> Document:
    labels = {"app.kubernetes.io/name": "psgc", "app.kubernetes.io/instance": job.name}
    return {"name": name, **({"namespace": job.namespace} if job.namespace else {}), "labels": labels}


def _beside(job: Job) -> list[Document]:
    """What pods refer to."""
    found: list[Document] = []
    if job.token:
        secret = {"kind": "Secret", "metadata": _metadata(job, job.secret), "type": "Opaque", "stringData": {SECRET_KEY: job.token}}
        found.append({"apiVersion": "v1", **secret})
    if job.plan:
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job, _plans(job)), "data": {PLAN_FILE: job.plan}})
    return found


def _plans(job: Job) -> str:
    return f"{job.name}-plan"


def _jobset_spec(job: Job, workers: str) -> Document:
    """workers: the name of their Job; "node" is the one that Kubeflow Trainer fills in."""
    waits = [{"name": "scheduler", "status": "Ready"}]
    jobs = [_replicated("scheduler", 1, _scheduler(job))]
    if job.servers:
        jobs.append({**_replicated("server", job.servers, _server(job)), "dependsOn": waits})
    training = {**_replicated(workers, job.nodes, _worker(job, workers)), "dependsOn": waits}
    if workers == "node":
        training["template"]["metadata"] = {"labels": {f"{TRAINER}/trainjob-ancestor-step": "trainer"}}
    return {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [workers]},
        "failurePolicy": {"maxRestarts": job.restarts},
        "replicatedJobs": [*jobs, training],
    }


def _replicated(name: str, pods: int, pod: Document) -> Document:
    spec = {"completionMode": "Indexed", "completions": pods, "parallelism": pods, "backoffLimit": 0, "template": {"spec": pod}}
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _scheduler(job: Job) -> Document:
    return _pod(
        job, _container(job, "scheduler", ["psgc-launch"], {"DMLC_ROLE": "scheduler"}, Resources(cpu="1", memory="1Gi"), SCHEDULER_PORT)
    )


def _server(job: Job) -> Document:
    return _pod(
        job, _container(job, "server", ["psgc-launch"], {"DMLC_ROLE": "server", "DMLC_PORT": str(SERVER_PORT)}, job.server, SERVER_PORT)
    )


def _worker(job: Job, name: str) -> Document:
    own = {"DMLC_ROLE": "worker", "BYTEPS_LOCAL_SIZE": str(job.workers_per_node)}
    if job.plan:
        own["PSGC_PLAN"] = f"{PLAN_FOLDER}/{PLAN_FILE}"
    container = _container(job, name, ["psgc-launch", *job.command], own, job.worker)
    container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Document] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}}]
    if job.plan:
        container["volumeMounts"].append({"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True})
        volumes.append({"name": "plan", "configMap": {"name": _plans(job)}})
    return {**_pod(job, container, GRACE_S + round(job.save_s) + SAVE_MARGIN_S), "volumes": volumes}


def _pod(job: Job, container: Document, grace_s: int = GRACE_S) -> Document:
    """Services' links would be variables: those of a service named psgc would be taken for settings."""
    return {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": grace_s, "enableServiceLinks": False, "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }  # fmt: skip


def _container(job: Job, name: str, command: Sequence[str], own: Mapping[str, str], resources: Resources, port: int = 0) -> Document:
    """port: that it listens at; 0: at none."""
    shared = {
        "DMLC_NUM_WORKER": str(job.nodes), "DMLC_NUM_SERVER": str(job.servers), "DMLC_PS_ROOT_URI": job.root_host,
        "DMLC_PS_ROOT_PORT": str(SCHEDULER_PORT), "BYTEPS_FORCE_DISTRIBUTED": "1", **own, **job.settings,
    }  # fmt: skip
    container: Document = {
        "name": name, "image": job.image, "command": list(command),
        "env": [
            *({"name": variable, "value": text} for variable, text in shared.items()),
            {"name": "PSGC_TOKEN", "valueFrom": {"secretKeyRef": {"name": job.secret, "key": SECRET_KEY}}},
            {"name": "PSGC_RESTART", "valueFrom": {"fieldRef": {"fieldPath": RESTARTED}}},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    if asked := resources.document():
        container["resources"] = asked
    if port:
        container["ports"] = [{"name": name, "containerPort": port}]
        container["readinessProbe"] = {"tcpSocket": {"port": port}, **READINESS}
        container["livenessProbe"] = {"tcpSocket": {"port": port}, **LIVENESS}
    return container
