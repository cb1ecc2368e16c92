"""Every line of psgc's log says which job and which member says it, as text or as JSON, and a script's own logging is respected."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from psgc.config import Config
from psgc.diagnostics.lines import JSON_BEGINS, Lines, Speaker, joined, log_own
from psgc.launch.supervision.relay import Relay

JOB = Config(root_host="here", root_port=9, nodes=2, node=1, job=77)


def line(config: Config, as_json: bool = False, index: int = -1, error: bool = False) -> str:
    speaker = Speaker(config)
    if index >= 0:
        speaker.index = index
    record = logging.LogRecord("psgc.x", logging.WARNING, __file__, 1, "waits for %s", ("server 0",), None)
    if error:
        try:
            raise ValueError("as the test wants it")
        except ValueError as raised:
            record.exc_info = (ValueError, raised, raised.__traceback__)
    return Lines(speaker, as_json).format(record)


def test_a_line_says_job_and_member_before_and_after_it_has_joined() -> None:
    assert " job=77 worker=node1.0 WARNING psgc.x: waits for server 0" in line(JOB)
    assert line(JOB, index=3).endswith(" job=77 rank=3 WARNING psgc.x: waits for server 0")
    server = Config(role="server", root_host="here", root_port=9, job=77)
    assert " job=77 server WARNING " in line(server)
    assert " job=77 server=1 WARNING " in line(server, index=1)
    assert " job=77 scheduler WARNING " in line(Config(role="scheduler", job=77))
    assert " rank=0 WARNING " in line(Config())
    assert "job=" not in line(Config()), "a process that is alone is in no job"


def test_a_line_in_json_is_one_object_with_who_said_it() -> None:
    text = line(JOB, as_json=True, index=3, error=True)
    assert text.startswith(JSON_BEGINS)
    assert "\n" not in text
    found = json.loads(text)
    assert (found["job"], found["role"], found["rank"], found["level"], found["message"]) == (
        77,
        "worker",
        3,
        "WARNING",
        "waits for server 0",
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"])
    assert "ValueError: as the test wants it" in found["exception"]
    assert json.loads(line(JOB, as_json=True))["rank"] is None


@pytest.fixture
def scripts_logging() -> Iterator[io.StringIO]:
    """A script that has set up logging, in its own format."""
    root, psgc = logging.getLogger(), logging.getLogger("psgc")
    before, kept = root.handlers[:], psgc.handlers[:]
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("mine %(message)s"))
    root.handlers, psgc.handlers = [handler], []
    yield out
    root.handlers, psgc.handlers = before, kept


def test_a_scripts_own_logging_keeps_its_format_unless_a_format_is_asked_for(
    scripts_logging: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    log_own(JOB)
    logging.getLogger("psgc.x").warning("one")
    assert scripts_logging.getvalue() == "mine one\n"
    log_own(Config(root_host="here", root_port=9, nodes=2, job=77, log_format="json"))
    joined(1)
    logging.getLogger("psgc.x").warning("two")
    assert scripts_logging.getvalue() == "mine one\n", "once is enough"
    assert json.loads(capsys.readouterr().err)["rank"] == 1


def test_a_launcher_puts_no_name_before_what_is_to_stay_json() -> None:
    out = io.BytesIO()
    Relay("[worker 0]", out).feed(f'hello\n{line(JOB, as_json=True)}\n{{"a": 1}}\n'.encode())
    first, second, third = out.getvalue().decode().splitlines()
    assert (first, third) == ("[worker 0] hello", '[worker 0] {"a": 1}')
    assert json.loads(second)["job"] == 77


@pytest.mark.timeout(300)
def test_every_line_of_every_role_is_json_and_of_one_job(make_job: Callable[..., Any]) -> None:
    job = make_job(env={"PSGC_LOG_FORMAT": "json", "PSGC_LOG_LEVEL": "info"})
    job.whole("--steps", "3", job="trains.py")
    assert set(job.end().values()) == {0}, job.text()
    said = [json.loads(text) for process in job.processes for text in process.text.splitlines()]
    assert {each["job"] for each in said} == {int(job.job_id)}
    assert {"scheduler", "server=0", "rank=0", "worker=node1.0"} <= {each["psgc"] for each in said}
