"""``psgc collect``: one archive of all hosts that can be reached, with what a bug report needs and without the job's secrets."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.launch.observing.bundle import MASK, Bundle, Secrets, told
from psgc.launch.verbs.collect import GZIP, _entries, collect
from tests.observe.test_top import be_outside
from tests.plan.commands import psgc

TOKEN = 'a"long\\secret-of-the-job'
OTHER = "hub-credential-1234"


def files_of(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as opened:
        return {entry.name: file.read() for entry in opened if (file := opened.extractfile(entry)) is not None}


@pytest.mark.timeout(300)
def test_what_a_report_needs_is_in_the_archive_and_no_file_has_a_secret(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    env = {
        "PSGC_TOKEN": TOKEN,
        "HF_TOKEN": OTHER,
        "HOME_OF_NOBODY": "private-matter",
        "PSGC_TRACE": str(trace),
        "PSGC_TRACE_END_STEP": "12",
    }
    job = make_job(env=env)
    workers = job.whole("--until", str(tmp_path / "enough"), job="trains.py")
    be_outside(monkeypatch, job, token=TOKEN)
    log = tmp_path / "train.log"
    log.write_text(
        f"started with PSGC_TOKEN={TOKEN}\nhttp://host/?token=drawn-for-the-page\nhub said {OTHER}\nTOKEN: {json.dumps(TOKEN)}\nline of the log\n"
    )
    ssh = tmp_path / "ssh"  # reaches every host but one: here, as if it were there
    ssh.write_text(
        '#!/bin/sh\nfor last; do case "$last" in gone) echo "ssh: no route to gone" >&2; exit 255;; esac; done\nexec sh -c "$last"\n'
    )
    ssh.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("far slots=1\ngone slots=1\n")
    while not (trace / "rank0.json").is_file():
        assert workers[0].popen.poll() is None, job.text()
    output = tmp_path / "bundle.tar.gz"
    done = psgc(
        "collect", "-o", str(output), "--pid", str(workers[0].popen.pid), "--log", str(log), "--hostfile", str(hosts), "--ssh", str(ssh)
    )
    (tmp_path / "enough").touch()
    assert set(job.end().values()) == {0}, job.text()
    assert done.returncode == 0, done.stderr
    assert "gone: ssh: no route to gone" in done.stderr
    files = files_of(output)
    for name, content in files.items():
        for secret in (TOKEN, json.dumps(TOKEN)[1:-1], OTHER, "drawn-for-the-page", "private-matter"):
            assert secret.encode() not in content, name
    assert b"line of the log" in files[next(name for name in files if name.endswith("train.log"))]
    assert any(name.startswith("traces/") and name.endswith("rank0.json") for name in files)
    assert json.loads(files["status.json"])["complete"] is True
    assert json.loads(files["doctor.json"])["checks"]
    assert json.loads(files["versions.json"])["packages"]["torch"]
    (configuration, *_) = json.loads(files["configuration.json"])
    assert configuration["environment"]["PSGC_TOKEN"] == MASK
    assert configuration["environment"]["DMLC_NUM_WORKER"] == "2"
    there = json.loads(files["hosts/far/configuration.json"])
    words = {word for each in there for word in each["command"]}
    assert {"scheduler", "server"} <= words
    assert any(word.endswith("trains.py") for word in words)
    assert {each["environment"]["PSGC_JOB"] for each in there if "PSGC_JOB" in each["environment"]} == {job.job_id}


def test_a_secret_is_left_out_wherever_it_is_and_names_stay() -> None:
    secrets = Secrets()
    secrets.learn({"PSGC_TOKEN": "abcdef", "WANDB_API_KEY": "0123456789", "PSGC_STATUS_TOKEN": "xyz", "PSGC_CODEC": "int8"})
    bundle = Bundle(secrets)
    bundle.add("logs/of-abcdef", b"abcdef 0123456789 int8 password=hunter2 Token: t0k int8")
    assert bundle.names == [f"logs/of-{MASK}"]
    assert secrets.without(b"abcdef 0123456789 int8 password=hunter2 Token: t0k int8") == (
        b"(left out) (left out) int8 password=(left out) Token: (left out) int8"
    )
    assert told({"PSGC_TOKEN": "a", "PSGC_JOB": "7", "HOME": "/home/me", "AWS_SECRET": "b"}) == {"PSGC_TOKEN": MASK, "PSGC_JOB": "7"}


def test_a_host_whose_shell_prints_or_whose_archive_is_damaged_spoils_no_other_host() -> None:
    bundle = Bundle(Secrets())
    bundle.add("first.txt", random.Random(1).randbytes(20_000))
    bundle.add("second.txt", random.Random(2).randbytes(20_000))
    archive = bundle.close()
    names = ["first.txt", "second.txt"]
    for before in (b"", b"Welcome to far\n", b"\x1f\x8b Welcome\n"):
        entries, why = _entries(before + archive)
        assert ([name for name, _ in entries], why) == (names, "")
    entries, why = _entries(archive[: len(archive) * 3 // 4])
    assert [name for name, _ in entries] == names[:1]
    assert why.startswith("its archive is damaged (") and why.endswith("; 1 file(s) of it could be read")
    for damaged in (archive[:12], GZIP, GZIP + b"no archive", archive[:200] + bytes(400) + archive[600:]):
        entries, why = _entries(damaged)
        assert why.startswith("its archive is damaged") and "\n" not in why
    assert _entries(b"Welcome to far\nand more\n") == ([], "it sent no archive, but 'Welcome to far'")
    assert _entries(b"") == ([], "it sent no archive")


def test_a_bundle_is_written_though_one_host_sends_no_archive_and_another_a_truncated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle(Secrets())
    bundle.add("first.txt", b"as it was there")
    archive = bundle.close()
    sent = {"welcomes": b"Welcome\n" + archive, "truncated": archive[:40], "silent": b""}
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in sent))
    monkeypatch.setattr("psgc.launch.verbs.collect._part", lambda host, job, ssh: (sent[host.name], ""))
    monkeypatch.setattr("psgc.launch.verbs.doctor.examine", dict)
    monkeypatch.setattr("psgc.launch.verbs.collect._status", lambda pid: {})
    output = tmp_path / "bundle.tar.gz"
    collect(output=str(output), pid=None, job="1", hostfile=str(tmp_path / "hosts"), ssh="ssh", log=None)
    files = files_of(output)
    assert files["hosts/welcomes/first.txt"] == b"as it was there"
    notes = files["notes.txt"].decode().splitlines()
    assert [note.partition(" (")[0] for note in notes if note.startswith("truncated")] == ["truncated: its archive is damaged"]
    assert "silent: it sent no archive" in notes and not any(note.startswith("welcomes") for note in notes)


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    for arguments, text in (
        (("--log", str(tmp_path / "none")), "there is no such file"),
        (("--pid", "4194304"), "no such process"),
        (("--output", str(tmp_path / "no" / "folder.tar.gz")), "its folder cannot be written to"),
        (("--hostfile", str(tmp_path / "none")), "cannot be read"),
    ):
        done = psgc("collect", *arguments)
        assert done.returncode == 2, done.stderr
        assert text in done.stderr
        assert done.stderr.count("\n") == 1


def test_an_archive_on_stdout_is_nothing_but_that(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "psgc.launch", "collect", "-o", "-", "--job", "1"], capture_output=True, check=False, cwd=tmp_path
    )
    (tmp_path / "it.tar.gz").write_bytes(done.stdout)
    assert {"versions.json", "doctor.json", "status.json", "notes.txt"} <= files_of(tmp_path / "it.tar.gz").keys()
