"""What users' commands predict and recommend for models drawn from a seed, beside real jobs on the testbed.  Needs root, as the testbed does.

    python benchmarks/drawn_models.py --seed 7 [--models 12] [--gbps 0.05,0.2,2] [--rounds 6] [--out rows.jsonl]

For each model: ``psgc profile --script`` (codecs and links are measured with the first one). For each link: ``psgc plan --runnable``, and a job on two hosts
and a server's in which that plan, its codec, bf16 and none take turns (PSGC_VERIFY); then ``psgc verify --measured``, which predicts them and corrects the
profile. Predictions are of whole steps by what users get, by the corrected profile, and by the profile as the first link's steps have corrected it. A row
counts the plan as slower than the quicker one of its plain codec and none by what all three were measured to take in the same job. ``--out`` keeps each row
when it is done; the same command goes on from there. The seed is to be drawn when the model is finished.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))


from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table
from psgc.plan.inputs.cluster import TCP_SHARE, Cluster, Link
from psgc.plan.inputs.profile import load_profile

BENCHMARKS: Final = Path(__file__).parent
MODEL: Final = BENCHMARKS / "drawn_model.py"
CODECS: Final = "none,bf16,int8"
CODEC: Final = "int8"
WORKERS, SERVERS = 2, 1
SLOWER: Final = 0.05  # share by which a recommended plan may take longer than the quicker of its plain codec and none


class BenchmarkError(Exception):
    """What went wrong, in one line."""


def call(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(argv, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(argv[-6:])}: {(done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1]}")
    return done.stdout


def psgc(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    return call([sys.executable, "-m", "psgc.launch", *arguments], env)


def job(seed: int, index: int) -> list[str]:
    return [sys.executable, str(MODEL), str(seed), str(index)]


def profiled(seed: int, index: int, known: Path | None, path: Path) -> None:
    """A profile of the model. known: the first model's, whose times of codecs, carriers and links are this machine's, too."""
    costs = ["--codecs", CODECS, "--links", "--transport", "tcp"] if known is None else ["--no-codecs"]
    psgc("profile", "--script", "--workers", str(WORKERS), *costs, "-o", str(path), "--", *job(seed, index), env={"OMP_NUM_THREADS": "1"})
    if known is not None:
        of_machine, own = load_profile(str(known)), load_profile(str(path))
        path.write_text(json.dumps(replace(own, codecs=of_machine.codecs, carriers=of_machine.carriers, links=of_machine.links).to_json()))


def testbed_cluster(profile: Path, gbps: float) -> Cluster:
    """Hosts that share this machine's cores, and reach each other over limited links."""
    loopback, cores = load_profile(str(profile)).links["loopback"], len(os.sched_getaffinity(0))
    shared = cores < WORKERS + SERVERS
    inter = Link(gbps * TCP_SHARE, loopback.latency_us)
    return Cluster("testbed", WORKERS, 1, loopback, inter, servers=SERVERS, cores=cores, one_machine=shared, over_tcp=shared)


def measured(seed: int, index: int, gbps: float, rounds: int, plan: Path, folder: Path) -> tuple[Path, Path]:
    """What the job measured, and its timelines."""
    found, trace = folder / "measured.json", folder / "trace"
    bed = [
        sys.executable,
        str(BENCHMARKS / "testbed.py"),
        "--hosts",
        str(WORKERS + 1),
        "--gbps",
        str(gbps),
        "--job",
        "--servers",
        str(SERVERS),
    ]
    env = {
        "PSGC_PLAN": str(plan), "PSGC_VERIFY": str(found), "PSGC_VERIFY_ROUNDS": str(rounds), "PSGC_TRACE": str(trace), "PSGC_TRACE_START_STEP": "3",
        "PSGC_TRACE_END_STEP": "7",
    }  # fmt: skip
    call([*bed, "--", *job(seed, index)], env)
    return found, trace


def row(seed: int, index: int, gbps: float, rounds: int, profile: Path, first: Path, folder: Path) -> dict[str, Any]:
    """first: the profile as the model's first link has corrected it; written here, if it is not there yet."""
    cluster, plan, corrected = folder / "cluster.toml", folder / "plan.json", folder / "corrected.json"
    cluster.write_text(testbed_cluster(profile, gbps).to_toml())
    psgc("plan", "--runnable", "--profile", str(profile), "--cluster", str(cluster), "--codec", CODEC, "-o", str(plan), "--json")
    found, trace = measured(seed, index, gbps, rounds, plan, folder)
    where = ["--cluster", str(cluster), "--measured", str(found), "--trace", str(trace)]
    told = json.loads(psgc("verify", str(plan), "--profile", str(profile), *where, "-o", str(corrected), "--json"))
    by_another = {} if not first.exists() else _predicted_by(first, cluster, found, folder)
    if not first.exists():
        first.write_text(corrected.read_text())
    ms = {one["name"]: one["measured_ms"] for one in told["candidates"]}
    return {
        "model": call([*job(seed, index), "--describe"]).strip(), "index": index, "gbps": gbps, "factors": told["factors"],
        "slower": ms["plan"] / min(value for name, value in ms.items() if name in (CODEC, "none")) - 1,
        "candidates": [
            {
                "name": one["name"], "predicted_ms": one["predicted_ms"], "measured_ms": one["measured_ms"], "error": one["error"],
                "corrected_error": one["corrected_error"], "error_by_another_link": by_another.get(one["name"]),
            }
            for one in told["candidates"]
        ],
    }  # fmt: skip


def _predicted_by(corrected: Path, cluster: Path, found: Path, folder: Path) -> dict[str, float]:
    """The errors of the candidates' steps as ``psgc simulate`` predicts them by a profile that another link has corrected."""
    errors = {}
    profile = load_profile(str(corrected)).corrected
    for one in json.loads(found.read_text())["candidates"]:
        layout = folder / "layout.json"
        layout.write_text(json.dumps(one["plan"]))
        answer = json.loads(psgc("simulate", "--profile", str(corrected), "--cluster", str(cluster), "--plan", str(layout), "--json"))
        step_ms = answer["step_ms"] + (profile.forward_us or 0.0) / 1e3
        errors[one["name"]] = step_ms / (statistics.median_low(window["step_us"] for window in one["windows"]) / 1e3) - 1
    return errors


def run(seed: int, models: int, links: Sequence[float], rounds: int, out: Path | None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out is not None and out.exists() else []
    done = {(each["index"], each["gbps"]) for each in rows}
    with tempfile.TemporaryDirectory(prefix="psgc-drawn-") as name:
        known: Path | None = None
        for index in range(models):
            left = [gbps for gbps in links if (index, gbps) not in done]
            if not left:
                continue
            folder = Path(name) / str(index)
            folder.mkdir()
            profile = folder / "profile.json"
            profiled(seed, index, known, profile)
            known = known or profile
            for gbps in left:
                place = folder / f"{gbps:g}"
                place.mkdir()
                rows.append(row(seed, index, gbps, rounds, profile, folder / "first.json", place))
                print(f"{rows[-1]['model']}, {gbps:g} Gbit/s: done", file=sys.stderr)
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the errors of all candidates' steps, and of the recommended plans."""

    def of(name: str) -> dict[str, float]:
        errors = [one[name] for each in rows for one in each["candidates"] if one[name] is not None]
        sizes = sorted(map(abs, errors))
        if not sizes:
            return {}
        nine = sizes[min(len(sizes) - 1, -(-9 * len(sizes) // 10) - 1)]
        return {
            "median": statistics.median(sizes),
            "nine_of_ten": nine,
            "worst": sizes[-1],
            "low": sum(error < 0 for error in errors) / len(errors),
        }

    slower = [each["slower"] for each in rows]
    return {
        "users": of("error"), "verified": of("corrected_error"), "by_another_link": of("error_by_another_link"),
        "plans": len(slower), "plans_slower": sum(each > SLOWER for each in slower), "slowest": max(slower, default=0.0),
    }  # fmt: skip


def tell(rows: Sequence[Mapping[str, Any]], hardware: str) -> None:
    body = [
        [each["model"], f"{each['gbps']:g}", one["name"], f"{one['predicted_ms']:,.1f}", f"{one['measured_ms']:,.1f}", f"{one['error']:+.1%}",
         f"{one['corrected_error']:+.1%}", "" if one["error_by_another_link"] is None else f"{one['error_by_another_link']:+.1%}",
         f"{each['slower']:+.1%}" if one["name"] == "plan" else ""]
        for each in rows for one in each["candidates"]
    ]  # fmt: skip
    head = ["model", "Gbit/s", "", "predicted ms", "measured ms", "error", "verified", "by another link", "beside the best"]
    print_table(head, body, title=hardware)
    found = summary(rows)
    for name, what in (("users", "as users get them"), ("verified", "after verify"), ("by_another_link", "corrected by another link")):
        if one := found[name]:
            print(
                f"errors {what}: median {one['median']:.1%}, nine of ten within {one['nine_of_ten']:.1%}, worst {one['worst']:.1%}, {one['low']:.0%} too low"
            )
    print(f"recommended plans more than {SLOWER:.0%} slower than the plain codec or none: {found['plans_slower']} of {found['plans']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--models", type=int, default=12)
    parser.add_argument("--gbps", default="0.05,0.2,2", help="of every host's link, with commas between them")
    parser.add_argument("--rounds", type=int, default=6, help="windows of 5 steps of each candidate")
    parser.add_argument("--out", type=Path, help="JSON lines: a row is added when it is done, and not measured again")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    options = parser.parse_args()
    try:
        links = [float(word) for word in options.gbps.split(",")]
    except ValueError:
        parser.error(f"--gbps {options.gbps}: expected numbers with commas between them")
    try:
        rows = run(options.seed, options.models, links, options.rounds, options.out)
    except BenchmarkError as error:
        sys.exit(f"drawn_models: {error}")
    if options.json:
        print(json.dumps({"hardware": machine(), "rows": rows, **summary(rows)}))
    else:
        tell(rows, machine())


if __name__ == "__main__":
    main()
