"""Manifests of ``psgc k8s render`` against the schemas that Kubernetes, JobSet and Kubeflow Trainer publish. No API server is asked: none is at hand."""

from __future__ import annotations

from typing import Any

import pytest

from psgc.launch.kubernetes.manifests import jobset, trainjob
from tests.launch.test_kubernetes import made

pytestmark = pytest.mark.integrations


def job_specs(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"].get("template", {}).get("spec", document["spec"])
    return [each["template"]["spec"] for each in spec["replicatedJobs"]]


@pytest.mark.parametrize("render", [jobset, trainjob])
def test_what_kubernetes_itself_reads_is_valid(render: Any) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    version = validator.latest_version()
    documents = render(made(plan="{}"))
    own = [document for document in documents if document["apiVersion"] == "v1"]
    own += [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
        for document in documents if document["kind"] in ("JobSet", "TrainingRuntime") for spec in job_specs(document)
    ]  # fmt: skip
    assert len(own) == 5
    for document in own:
        validator.validate(document, version, strict=True)


def same(one: Any, other: Any) -> None:
    """Whether a model keeps all that it was given: unknown fields would be dropped."""
    if isinstance(one, dict):
        assert set(one) <= set(other), set(one) - set(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            same(each, its)
    else:
        assert one == other


@pytest.mark.parametrize("servers", [0, 2])
def test_jobsets_and_trainjobs_are_what_their_published_models_read(servers: int) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    read = 0
    for document in (*jobset(made(servers=servers)), *trainjob(made(servers=servers))):
        if document["kind"] in kinds:
            same(document, kinds[document["kind"]].from_dict(document).to_dict())
            read += 1
    assert read == 3
