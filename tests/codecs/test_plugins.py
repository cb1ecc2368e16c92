"""Codecs of other packages: found by entry point, refused where they cannot work, and the same code on every member of a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from psgc.codecs import parse_codec, parse_pair, parse_scheme, registry
from psgc.codecs.catalogue import catalogue
from psgc.codecs.codec import Codec
from psgc.codecs.common.sources import source_digest
from psgc.codecs.registry import plugin_codecs
from psgc.codecs.scheme import BucketContext, Scheme
from psgc.errors import CodecError
from psgc.launch.verbs import codecs

Install = Callable[..., Path]
CONTEXT = BucketContext(shapes=((40, 30),))


@pytest.fixture
def installed(install: Install, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """As ``install``, but this process finds the package, too."""
    folders = []

    def put(*arguments: Any) -> Path:
        folders.append(install(*arguments))
        monkeypatch.syspath_prepend(str(folders[-1]))
        registry._plugin_class.cache_clear()
        return folders[-1]

    yield put
    forget(*folders)


def forget(*folders: Path) -> None:
    """What was imported from these folders is imported anew."""
    registry._plugin_class.cache_clear()
    for name, module in list(sys.modules.items()):
        if any(Path(getattr(module, "__file__", None) or "/").is_relative_to(folder) for folder in folders):
            del sys.modules[name]


CAST = "from psgc.codecs.cast import Bf16Codec\n\n\nclass Mine(Bf16Codec):\n    name = 'mine'\n    codec_id = 40000\n"


def test_a_codec_of_another_package_is_found_by_its_name(installed: Install) -> None:
    installed("tools", "2.5", {"mine": "mine_codec:Mine"}, {"mine_codec.py": CAST})
    codec = parse_codec("mine")
    assert codec.canonical == f"mine@{source_digest(type(codec), Codec)}"
    assert parse_codec(codec.canonical, "float16").dtype == "float16"
    assert plugin_codecs() == {"mine": "tools 2.5"}
    assert parse_pair("mine/none").canonical == f"{codec.canonical}/none"
    assert parse_scheme(f"{codec.canonical}/relay").canonical == f"{codec.canonical}/relay"


def test_the_command_line_lists_it_with_its_distribution(
    installed: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed("tools", "2.5", {"mine": "mine_codec:Mine"}, {"mine_codec.py": CAST})
    for own in ("registered_codecs", "registered_schemes", "kit_codecs"):  # which have tests of their own
        monkeypatch.setattr(f"psgc.codecs.catalogue.{own}", tuple)
    codecs.codecs(as_json=True)
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["name"], entry["distribution"], entry["ratio_fp32"]) == ("mine", "tools 2.5", 2)
    monkeypatch.setenv("COLUMNS", "250")
    codecs.codecs()
    assert f"{entry['canonical']} (tools 2.5)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "text", "words"),
    [
        ("mine_codec:Mine", "import no_such_module", "of tools 2.5: mine_codec:Mine cannot be loaded: ModuleNotFoundError"),
        ("mine_codec:Mine", "1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("mine_codec:Yours", CAST, "cannot be loaded: AttributeError"),
        ("mine_codec:Mine", "Mine = 3", "mine_codec:Mine is no subclass of psgc.codecs.Codec"),
        ("mine_codec:Mine", "from psgc.codecs import Codec as Mine", "with all of its methods"),
        ("mine_codec:Mine", CAST.replace("'mine'", "'other'"), "the class calls itself 'other'"),
        ("mine_codec:Mine", CAST.replace("40000", "7"), "codec_id is 7; ids of other packages' codecs lie from 32768 to 65535"),
    ],
)  # fmt: skip
def test_what_is_no_codec_is_refused_and_named(installed: Install, entry: str, text: str, words: str) -> None:
    installed("tools", "2.5", {"mine": entry}, {"mine_codec.py": text})
    with pytest.raises(CodecError, match=words) as caught:
        parse_codec("mine")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["int8", "shared", "relay"])
def test_a_name_of_psgcs_own_is_refused(installed: Install, name: str) -> None:
    installed("tools", "2.5", {name: "mine_codec:Mine"}, {"mine_codec.py": CAST})
    for look in (plugin_codecs, lambda: parse_codec("mine")):
        with pytest.raises(CodecError, match=f"codec {name}: tools 2.5 has one of this name, but so has psgc; rename it"):
            look()


def test_one_name_of_two_packages_is_refused(installed: Install) -> None:
    installed("tools", "2.5", {"mine": "mine_codec:Mine"}, {"mine_codec.py": CAST})
    installed("gear", "1.0", {"mine": "gear_codec:Mine"}, {"gear_codec.py": CAST})
    with pytest.raises(CodecError, match=r"codec mine: (tools 2.5|gear 1.0) has one of this name, but so has (tools 2.5|gear 1.0)"):
        parse_codec("mine")


def test_an_unknown_name_says_what_there_is(installed: Install) -> None:
    installed("tools", "2.5", {"mine": "mine_codec:Mine"}, {"mine_codec.py": CAST})
    with pytest.raises(CodecError, match=r"unknown codec 'yours'; choose one of none, .*mine; one of another package has to be installed"):
        parse_codec("yours")


def test_other_code_under_a_name_is_refused(installed: Install) -> None:
    installed("tools", "2.5", {"mine": "mine_codec:Mine"}, {"mine_codec.py": CAST})
    with pytest.raises(CodecError, match=r"codec mine: another member of the job has code of digest 0123456789ab, here is [0-9a-f]{12};"):
        parse_codec("mine@0123456789ab")
    with pytest.raises(CodecError, match="codec bf16: another member of the job has code of digest 0123456789ab, here is psgc;"):
        parse_codec("bf16@0123456789ab")


def test_the_digest_covers_the_folder_of_a_package_and_the_file_of_a_module(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(folder: Path) -> str:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            forget()
            canonical = parse_codec("mine").canonical
        forget(folder)
        return canonical

    files = {"pack/__init__.py": "", "pack/mine_codec.py": CAST, "pack/helper.py": "x = 1", "mine_codec.py": CAST, "other.py": "y = 1"}
    changed = {**files, "pack/helper.py": "x = 2", "other.py": "y = 2"}
    for module, same in (("pack.mine_codec", False), ("mine_codec", True)):
        first, second, third = (digest(install("tools", "2.5", {"mine": f"{module}:Mine"}, f)) for f in (files, files, changed))
        assert first == second
        assert (first == third) == same


def test_a_scheme_of_another_package_is_found_by_its_name_and_compared_by_its_sources(installed: Install, kit_package: Path) -> None:
    installed(
        "schemes", "1.0", {"lowrank": "kit_examples:LowRankScheme"}, {"kit_examples.py": (kit_package / "kit_examples.py").read_text()}
    )
    scheme = parse_scheme("lowrank:rank=2", CONTEXT)
    canonical = f"lowrank@{source_digest(type(scheme), Scheme)}:rank=2"
    assert scheme.canonical == canonical == parse_scheme(canonical, CONTEXT).canonical
    assert [round_.numel for round_ in scheme.rounds(1200)] == [2 * 40, 2 * 30], "two rounds"
    with pytest.raises(CodecError, match="codec lowrank: another member of the job has code of digest 0123456789ab"):
        parse_scheme("lowrank@0123456789ab", CONTEXT)
    with pytest.raises(CodecError, match="codec lowrank answers by a rule of its own: write 'lowrank', not 'lowrank/none'"):
        parse_scheme("lowrank/none", CONTEXT)
    with pytest.raises(CodecError, match="codec lowrank answers by a rule of its own: write 'lowrank' by itself, not as one of a pair"):
        parse_scheme("int8/lowrank")
    assert catalogue()[-1]["name"] == "lowrank", "psgc codecs measures it, too"


BREAKS = f"{CAST.replace('mine', 'breaks').replace('40000', '40001')}\n    def encode(self, *given):\n        raise OSError('no disk')\n"


def test_codecs_that_do_not_work_are_told_beside_the_list_of_the_others(installed: Install, capsys: pytest.CaptureFixture[str]) -> None:
    installed("broken", "0.1", {"absent": "no_such_module:Absent"}, {})
    installed("gear", "1.0", {"breaks": "breaks_codec:Mine"}, {"breaks_codec.py": BREAKS})
    installed("tools", "2.5", {"mine": "mine_codec:Mine"}, {"mine_codec.py": CAST})
    with pytest.raises(typer.Exit) as ended:
        codecs.codecs(as_json=True)
    out, err = capsys.readouterr()
    assert ended.value.exit_code == 2
    assert [entry["name"] for entry in json.loads(out) if "distribution" in entry] == ["mine"]
    assert sorted(err.splitlines()) == [
        "psgc: codec absent of broken 0.1: no_such_module:Absent cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
        "psgc: codec breaks of gear 1.0: OSError: no disk",
    ]
    with pytest.raises((CodecError, OSError)):
        catalogue()


def with_path(job: Any, folder: Path) -> Any:
    job.env["PYTHONPATH"] = f"{folder}:{Path(__file__).parents[2]}"
    return job


def test_a_job_runs_them_by_their_names(make_job: Callable[..., Any], kit_package: Path) -> None:
    codecs = ("threshold", "levels3/none", "threshold:tau=0.5/levels3:ef=1", "halves/relay", "mxfp4", "ef21:k=0.1")
    job = with_path(make_job(nodes=2, servers=1), kit_package)
    workers = job.whole("--steps", "8", "--codec", *codecs)
    assert set(job.end().values()) == {0}, job.text()
    assert all(worker.text.count(" 0 wrong") == len(codecs) for worker in workers), job.text()


@pytest.mark.parametrize("member", ["scheduler", "server", "worker"])
def test_a_member_with_other_code_ends_the_job_in_one_line(
    make_job: Callable[..., Any], kit_package: Path, other_kit_package: Path, member: str
) -> None:
    job = with_path(make_job(nodes=2, servers=1), kit_package)
    other = {"PYTHONPATH": f"{other_kit_package}:{Path(__file__).parents[2]}"}
    job.scheduler(**(other if member == "scheduler" else {}))
    job.server(**(other if member == "server" else {}))
    for node in range(2):
        job.worker(node, "--steps", "3", "--codec", "threshold", **(other if member == "worker" and node else {}))
    statuses = job.end()
    assert all(statuses.values()), job.text()
    line = "codec threshold: another member of the job has code of digest"
    assert all(line in process.last_line for process in job.processes if process.name.startswith("worker")), job.text()


def test_a_member_without_the_package_ends_the_job_in_one_line(make_job: Callable[..., Any], kit_package: Path) -> None:
    job = with_path(make_job(nodes=2, servers=1), kit_package)
    job.scheduler()
    job.server(PYTHONPATH=str(Path(__file__).parents[2]))
    workers = [job.worker(node, "--steps", "3", "--codec", "threshold") for node in range(2)]
    assert all(job.end().values()), job.text()
    assert all("server 0: unknown codec 'threshold'" in worker.last_line for worker in workers), job.text()
