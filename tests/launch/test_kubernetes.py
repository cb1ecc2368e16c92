"""``psgc k8s render`` prints a job's manifests, whose settings make a job. For published schemas see tests/integrations/test_kubernetes_schemas.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psgc.codecs import parse_scheme
from psgc.config import Config
from psgc.launch.job.clusters import completed
from psgc.launch.job.node_addresses import await_name
from psgc.launch.kubernetes import sizing
from psgc.launch.kubernetes.manifests import Job, Resources, jobset, trainjob
from psgc.launch.kubernetes.yaml_text import yaml_text
from tests.plan.commands import psgc

COMMAND = ("--", "python", "train.py", "--lr", "0.1")


def made(**more: Any) -> Job:
    given: dict[str, Any] = {
        "name": "bert", "image": "registry/bert:1", "command": ("python", "train.py"), "nodes": 3, "workers_per_node": 8, "servers": 2,
        "secret": "bert-token", "token": "0123", "worker": Resources(gpus=8), "server": Resources(cpu="2", memory="4Gi"), "shm": "8Gi", "restarts": 2,
        "save_s": 300.0, "settings": {"PSGC_CODEC": "int8"},
    }  # fmt: skip
    return Job(**{**given, **more})


def pods(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The pods of the documents, by the name of their Job."""
    spec = next(document["spec"] for document in documents if document["kind"] in ("JobSet", "TrainingRuntime"))
    spec = spec.get("template", {}).get("spec", spec)
    return {each["name"]: each["template"]["spec"]["template"]["spec"] for each in spec["replicatedJobs"]}


def settings(pod: Any) -> dict[str, str]:
    """The environment of a pod's container, as its kubelet makes it, with what is there in every pod of an indexed Job."""
    env = {each["name"]: each.get("value", "from elsewhere") for each in pod["containers"][0]["env"]}
    return {**env, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "PSGC_RESTART": "0"}


@pytest.mark.parametrize("render", [jobset, trainjob])
def test_each_pods_settings_make_a_job(render: Any) -> None:
    found = pods(render(made()))
    for name, pod in found.items():
        env = settings(pod)
        env |= completed(env, "bert-worker-0-1").settings
        config = Config.from_env({key: text for key, text in env.items() if key not in ("BYTEPS_LOCAL_SIZE",)}, role=env["DMLC_ROLE"])
        config.require_cluster()
        assert (config.nodes, config.servers, config.root_endpoint) == (3, 2, "tcp://bert-scheduler-0-0.bert:9000")
        assert config.notes == () and config.token
        if name in ("worker", "node"):
            assert (config.node, env["BYTEPS_LOCAL_SIZE"]) == (1, "8")


def test_the_pods_are_found_by_the_names_that_the_headless_service_gives_them() -> None:
    (body,) = [document for document in jobset(made()) if document["kind"] == "JobSet"]
    assert body["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "bert", "publishNotReadyAddresses": True}
    assert [each["name"] for each in body["spec"]["replicatedJobs"]] == ["scheduler", "server", "worker"]
    assert body["spec"]["replicatedJobs"][2]["dependsOn"] == [{"name": "scheduler", "status": "Ready"}]


def test_the_job_is_done_when_its_workers_are_and_starts_anew_as_a_whole() -> None:
    (body,) = [document for document in jobset(made()) if document["kind"] == "JobSet"]
    assert body["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["worker"]}
    assert body["spec"]["failurePolicy"] == {"maxRestarts": 2}
    for each in body["spec"]["replicatedJobs"]:
        assert each["template"]["spec"]["backoffLimit"] == 0
    assert {pod["restartPolicy"] for pod in pods(jobset(made())).values()} == {"Never"}


@pytest.mark.parametrize("render", [jobset, trainjob])
def test_nobody_is_root_and_the_secret_is_a_secret(render: Any) -> None:
    documents = render(made())
    for pod in pods(documents).values():
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        (token,) = [each for each in container["env"] if each["name"] == "PSGC_TOKEN"]
        assert token["valueFrom"] == {"secretKeyRef": {"name": "bert-token", "key": "token"}}
        assert pod["enableServiceLinks"] is False, "a service named psgc would set PSGC_PORT"
    assert "0123" not in json.dumps([document for document in documents if document["kind"] != "Secret"])
    assert [document["kind"] for document in render(made(token=""))].count("Secret") == 0


def test_scheduler_and_servers_are_probed_where_they_listen_and_workers_have_time_to_save() -> None:
    found = pods(jobset(made()))
    for name, port in (("scheduler", 9000), ("server", 9100)):
        (container,) = found[name]["containers"]
        assert container["readinessProbe"]["tcpSocket"] == container["livenessProbe"]["tcpSocket"] == {"port": port}
        patience = container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"]
        assert patience > Config().dead_s, "psgc itself finds what hangs, and says why"
    assert found["worker"]["terminationGracePeriodSeconds"] > 300
    assert found["worker"]["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]
    assert found["worker"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_a_plan_goes_along_and_workers_read_it() -> None:
    documents = jobset(made(plan='{"version": 1}', settings={}))
    (plan,) = [document for document in documents if document["kind"] == "ConfigMap"]
    assert plan["data"] == {"plan.json": '{"version": 1}'}
    worker = pods(documents)["worker"]
    assert (
        settings(worker)["PSGC_PLAN"] == "/etc/psgc/plan.json" and {"name": "plan", "configMap": {"name": "bert-plan"}} in worker["volumes"]
    )


def test_without_servers_there_is_no_pod_of_them() -> None:
    assert list(pods(jobset(made(servers=0)))) == ["scheduler", "worker"]


@pytest.mark.parametrize(
    ("parameters", "servers", "workers", "codec", "held"),
    [(1e6, 1, 2, "none", "1Gi"), (1e9, 1, 8, "none", "46Gi"), (1e9, 4, 8, "none", "12Gi"), (1e9, 1, 8, "int8", "23Gi")],
)
def test_a_servers_memory_follows_from_what_it_holds(parameters: float, servers: int, workers: int, codec: str, held: str) -> None:
    assert sizing.memory(parameters, servers, workers, parse_scheme(codec)) == held


def test_a_servers_cores_follow_from_its_link() -> None:
    assert [sizing.cpu(gbit) for gbit in (1, 10, 25, 100)] == ["2", "2", "4", "11"]


def test_yaml_is_read_back_as_it_was() -> None:
    """With a reader of what is written here: mappings, lists and JSON's scalars."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    odd = ["yes", "1", "a: b", "- c", "", "null", "NO", "1.5", "-x", "#", "a b", "ü", 'quote"', "new\nline", "8Gi", "0x1", "1e3", "~", "@"]
    for document in (
        *jobset(made()),
        *trainjob(made(plan="{}")),
        {"a": odd, "b": {}, "c": [], "d": [[1, [2, "no"]], {"e": True, "f": None}], "on": 1},
    ):
        assert list(yaml.safe_load_all(yaml_text([document]))) == [document]


def test_the_verb_prints_documents_and_draws_a_secret_each_time() -> None:
    first, second = (psgc("k8s", "render", "--name", "bert", "--image", "r/bert", "-N", "2", "--codec", "int8", *COMMAND) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout != second.stdout and first.stdout.count("\n---\n") == 1
    assert "command:\n" in first.stdout and '- "0.1"\n' in first.stdout and "value: int8\n" in first.stdout
    assert "kind: TrainJob" in psgc("k8s", "render", "--kind", "trainjob", *COMMAND).stdout


def test_with_a_plan_its_tensors_count_and_its_servers(tmp_path: Path) -> None:
    done = psgc(
        "plan",
        "--profile",
        "bert-base",
        "--cluster",
        "cloud-4xa10g-40g",
        "--codec",
        "int8",
        "--runnable",
        "-o",
        str(tmp_path / "plan.json"),
    )
    if done.returncode:
        pytest.skip(done.stderr)
    found = psgc("k8s", "render", "--plan", str(tmp_path / "plan.json"), *COMMAND)
    assert found.returncode == 0 and "kind: ConfigMap" in found.stdout, found.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "no command given"),
        (("--kind", "pods", *COMMAND), "--kind pods: choose one of jobset, trainjob"),
        (("--name", "Bert", *COMMAND), "--name Bert: expected up to 40 small letters"),
        (("--server-memory", "8 GB", *COMMAND), "--server-memory 8 GB: expected a quantity"),
        (("-N", "0", *COMMAND), "--nodes 0: expected a number, at least 1"),
        (("--parameters", "nan", *COMMAND), "--parameters nan: expected a number, at least 1"),
        (("--parameters", "inf", *COMMAND), "--parameters inf: expected a number, at least 1"),
        (("--link-gbit", "nan", *COMMAND), "--link-gbit nan: expected a number, at least 0"),
        (("--link-gbit", "inf", *COMMAND), "--link-gbit inf: expected a number, at least 0"),
        (("--codec", "no-such", *COMMAND), "no-such"),
        (("--plan", "no-such.json", *COMMAND), "no-such.json"),
    ],
)
def test_wrong_usage_is_a_line_and_status_2(flags: tuple[str, ...], said: str) -> None:
    done = psgc("k8s", "render", *flags)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert said in done.stderr


def test_in_kubernetes_a_launcher_waits_until_the_schedulers_name_can_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod has no name before it has an address."""
    times, said = iter(range(1000)), list[str]()

    def lookup(host: str, _: None) -> list[Any]:
        looked.append(host)
        if len(looked) < 4:
            raise OSError(-2, "Name or service not known")
        return []

    looked: list[str] = []
    monkeypatch.setattr("psgc.launch.job.node_addresses.socket.getaddrinfo", lookup)
    monkeypatch.setattr("psgc.launch.job.node_addresses.time.sleep", lambda _: None)
    await_name("bert-scheduler-0-0.bert", 100, 2, said.append, now=lambda: float(next(times)))
    assert looked == ["bert-scheduler-0-0.bert"] * 4
    assert said and "waiting until DMLC_PS_ROOT_URI=bert-scheduler-0-0.bert can be looked up (Name or service not known)" in said[0]
    monkeypatch.setattr("psgc.launch.job.node_addresses.socket.getaddrinfo", lambda *_: (_ for _ in ()).throw(OSError(-2, "unknown")))
    await_name("nowhere", 10, 100, said.append, now=lambda: float(next(times)))  # ends after its limit
