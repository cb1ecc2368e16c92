"""``auto`` over real processes, in trainings as users write them: each switches, ends with the same weights on every rank, and learns what the uncompressed
training learns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOB = str(Path(__file__).parent / "job_auto_cases.py")
# By case, the choices in order: candidates take turns, and the first one runs again before it leaves. Of the codecs that are safe, and of a plan over servers,
# the table says which is the quickest. A GAN's two halves are so small that blocks of int4 hold weights and biases, of which it loses too much.
PLAN, INT4 = "none plan none plan", "none int4 int8 int4 none int4"
OVER_SERVERS = {
    "plain": PLAN, "short": "none", "exactly_measured": "none", "gan": PLAN, "accumulation": PLAN, "checkpointing": PLAN,
    "unfreezing": f"none plan {PLAN} {PLAN}", "scaled": PLAN, "one_tensor": PLAN, "bf16": PLAN, "raising": PLAN, "resumed": f"{PLAN} {PLAN}",
    "based": PLAN, "by_hand": PLAN,
}  # fmt: skip
WITHOUT_SERVERS = {
    "gan": "none plan int8 bf16 int8 plan none plan", "accumulation": INT4, "unfreezing": f"none plan {INT4} {INT4}", "scaled": INT4, "raising": INT4,
}  # fmt: skip
SAID = re.compile(r"^case (\w+): (.*); losses (\S+) (\S+); from (\S+); weights (\w+); \S+ s$", re.MULTILINE)


def run(job: Any, expected: dict[str, str]) -> str:
    """What rank 0 said, after what holds for every case. expected: by case, its choices."""
    workers = job.whole(*expected, job=JOB)
    assert set(job.end().values()) == {0}, job.text()
    first, second = (SAID.findall(worker.text) for worker in workers)
    for found in (first, second):
        assert {case: choices for case, choices, *_ in found} == expected
    for (case, choices, mine, uncompressed, begun, weights), of_second in zip(first, second, strict=True):
        assert weights == of_second[5], f"{case}: every rank has the same weights"
        assert math.isclose(float(mine), float(uncompressed), rel_tol=0.25, abs_tol=0.02), (case, mine, uncompressed)
        assert case == "gan" or float(mine) < float(begun) or choices == "none", (case, mine, begun)
    return str(workers[0].text)


@pytest.mark.timeout(300)
def test_trainings_over_servers_learn_what_they_learn_uncompressed_and_say_what_was_found(make_job: Callable[..., Any]) -> None:
    env = {"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_LOG_LEVEL": "info"}
    said = run(make_job(env=env), OVER_SERVERS)
    assert re.search(r"auto, step \d+: 2 parameters were added: uncompressed again, and measuring anew", said)
    # A GAN's discriminator has three backwards an iteration (of 20, 50 and 30 % of its gradients' time), of which the last brings the generator's 30 %, too.
    assert "a step takes 442.0 ms by none" in said
    for steps in (7, 8):
        assert not re.search(rf"auto, step {steps}: (trying|.* stays)", said)


@pytest.mark.timeout(300)
def test_trainings_without_servers_do_too(make_job: Callable[..., Any]) -> None:
    run(make_job(servers=0, env={"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_LOG_LEVEL": "info"}), WITHOUT_SERVERS)


@pytest.mark.timeout(300)
@pytest.mark.integrations
def test_pefts_adapters_learn_what_they_learn_uncompressed(make_job: Callable[..., Any]) -> None:
    pytest.importorskip("peft", reason="lacks peft")
    run(make_job(env={"PSGC_MIN_COMPRESS_BYTES": "0"}), {"lora": PLAN})


@pytest.mark.timeout(300)
def test_a_job_that_ends_before_it_was_measured_says_so(make_job: Callable[..., Any]) -> None:
    job = make_job(env={"PSGC_PLAN": "auto"})
    workers = job.whole("short", job=JOB)
    assert set(job.end().values()) == {0}, job.text()
    line = "optimizer0: auto, step 7: the job ended before it was measured, which takes 9 steps: none throughout"
    assert [worker.text.count(line) for worker in workers] == [1, 0]
