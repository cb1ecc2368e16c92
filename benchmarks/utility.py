"""Whether compression pays, as ``psgc whatif`` says and as it is: DDP with its hooks, and psgc, at three links.  Needs root (``testbed.py``).

    python benchmarks/utility.py [--out rows.jsonl] [--links 0.1,1,unlimited] [--repeats 3] [--json]

Two hosts, each with a worker (and, for psgc, a server beside it), train the demo's GPT. What DDP's hooks save is asked of the closed model of
"On the Utility of Gradient Compression" (``psgc whatif --cases``), what psgc's codecs save of the timeline (``psgc whatif --profile``). Both
get what was measured without a network: backward (``psgc profile``), what encoding and decoding take (a hook's, the difference that it
makes to a worker alone; a codec's, the profile's), and the rate of the link. Systems take turns, ``--repeats`` rounds of
them, so that a machine that becomes slower does so for all. ``--out`` keeps each link when it is done; the same command goes on from there. A
verdict counts as right or wrong only where the measured gain is beyond the noise: its 95 % interval, from the rounds' iterations by bootstrap,
does not contain zero; and where the answer is not "a tie".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from testbed import JOB_PORT, Member, Testbed, TestbedError, psgc_job, run_members

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table
from psgc.plan.inputs.cluster import TCP_SHARE, Cluster, Link
from psgc.plan.inputs.profile import Profile, load_profile
from psgc.plan.whatif.closed_form import powersgd_bytes

HOSTS: Final = 2
RANK: Final = 4  # PowerSGD's
WARM_UP: Final = 4  # iterations: PowerSGD begins with the third
STEPS: Final = 10  # of one system in one round
# what is asked about, and what it is compared with
BASELINE: Final = {
    "ddp fp16": "ddp none",
    "ddp powersgd": "ddp none",
    "psgc bf16": "psgc none",
    "psgc int8": "psgc none",
    "psgc onebit": "psgc none",
}
SYSTEMS: Final = (*dict.fromkeys(BASELINE.values()), *BASELINE)
RESAMPLES: Final = 2000
SCRIPT: Final = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one link. Milliseconds of an iteration; gains as shares of the baseline's iteration: what is predicted, with its margin,
    and what is measured, with the ends of its 95 % interval. verdict: psgc's sentence."""

    link: str
    system: str
    baseline_ms: float
    system_ms: float
    predicted: float
    margin: float
    measured: float
    low: float
    high: float
    verdict: str

    @property
    def judged(self) -> str:
        """right, wrong, or why it can be neither."""
        if self.low <= 0 <= self.high:
            return "within the noise"
        if abs(self.predicted) <= self.margin:
            return "called a tie"
        return "right" if (self.predicted > 0) == (self.measured > 0) else "wrong"


class UtilityError(Exception):
    """What went wrong, in one line."""


# in the workers' processes


def work(system: str, steps: int, out: Path) -> None:
    """One worker: rank 0 writes when each iteration ended."""
    import torch
    from gpt_model import Gpt, GptConfig
    from text_data import batch_of, load_text
    from torch.nn import functional as F  # noqa: N812

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GptConfig()
    model = Gpt(config)
    run, optimizer, rank, leave = join(system, model)
    text, _ = load_text()
    generator = torch.Generator().manual_seed(rank)
    ends = []
    for _ in range(steps + 1):
        x, y = batch_of(text, 8, config.context, generator)
        optimizer.zero_grad()
        F.cross_entropy(run(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        ends.append(time.monotonic())
    if rank == 0:
        out.write_text(json.dumps(ends))
    leave()


def join(system: str, model: Any) -> tuple[Any, Any, int, Any]:
    """The model to call, the optimizer to step, the rank, and what ends the job."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    name, _, codec = system.partition(" ")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name == "psgc":
        import psgc.torch as psgc

        psgc.init()
        optimizer = psgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=codec)
        return model, optimizer, psgc.rank(), psgc.shutdown
    dist.init_process_group("gloo")
    # one bucket for PowerSGD: over gloo, several mix up their collectives (each waits for its own before it starts the next)
    run = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=26 if codec == "powersgd" else None)
    if codec == "fp16":
        run.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if codec == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        run.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return run, optimizer, dist.get_rank(), dist.destroy_process_group


# in the benchmark's own process


def iterations_ms(system: str, hosts: int, gbps: float | None, steps: int = STEPS) -> list[float]:
    """Every iteration of a job after the first ones."""
    with tempfile.TemporaryDirectory(prefix="psgc-utility-") as folder, Testbed(hosts, gbps) as bed:
        out = Path(folder) / "ends.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--work", system, "--steps", str(WARM_UP + steps), "--to", str(out)]
        if run_members(bed, members(bed, system, command)):
            raise UtilityError(f"{system} on {hosts} hosts failed; what it said is above")
        ends = json.loads(out.read_text())
    return [(later - earlier) * 1e3 for earlier, later in pairwise(ends[WARM_UP:])]


def members(bed: Testbed, system: str, command: Sequence[str]) -> list[Member]:
    hosts = len(bed.addresses)
    if system.startswith("psgc"):
        return psgc_job(bed, command, servers=hosts, server_hosts=0, extra={"PSGC_LOG_LEVEL": "error"})
    env = {
        **os.environ, "MASTER_ADDR": bed.addresses[0], "MASTER_PORT": str(JOB_PORT), "WORLD_SIZE": str(hosts), "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return [Member(f"rank {rank}", rank, command, {**env, "RANK": str(rank)}) for rank in range(hosts)]


def psgc(*arguments: str) -> str:
    """What ``psgc`` says. Raises UtilityError with its last words."""
    done = subprocess.run([sys.executable, "-m", "psgc.launch", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UtilityError(f"psgc {arguments[0]}: {(done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1]}")
    return done.stdout


def take_profile(path: Path) -> Profile:
    codecs = ",".join(system.partition(" ")[2] for system in SYSTEMS if system.startswith("psgc"))
    job = [sys.executable, str(SCRIPT), "--steps", "1000"]
    psgc("profile", "--script", "--workers", str(HOSTS), "--codecs", codecs, "--links", "--transport", "tcp", "-o", str(path), "--", *job)
    return load_profile(str(path))


@dataclass(frozen=True, slots=True)
class Known:
    """What is measured without a network. encode_ms: by hook, what it makes an iteration of a worker alone longer."""

    profile: Profile
    path: Path
    encode_ms: Mapping[str, float]


def measure_alone(repeats: int) -> dict[str, float]:
    """What each hook of DDP adds to an iteration of a worker that has nobody to send to."""
    hooks = [system for system in SYSTEMS if system.startswith("ddp") and system in BASELINE]
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for system in ("ddp none", *hooks):
            times.setdefault(system, []).extend(iterations_ms(system, 1, None))
    return {system: max(0.0, statistics.median(times[system]) - statistics.median(times["ddp none"])) for system in hooks}


def cores_of_a_host(hosts: int) -> int:
    """Those that the testbed keeps for each host; where there are too few all hosts see all of them."""
    cores = len(os.sched_getaffinity(0))
    return cores // hosts or cores


def predict(system: str, gbps: float, known: Known, folder: Path) -> tuple[float, float, str]:
    """The gain as a share of an iteration, its margin, and the verdict."""
    if system.startswith("ddp"):
        return predict_hook(system, gbps, known, folder)
    profile = known.profile
    loopback = profile.links["loopback"]
    cluster = folder / "testbed.toml"
    inter = Link(gbps, loopback.latency_us)
    cluster.write_text(
        Cluster("testbed", HOSTS, 1, loopback, inter, servers=HOSTS, servers_on_nodes=True, cores=cores_of_a_host(HOSTS)).to_toml()
    )
    question = ["--profile", str(known.path), "--cluster", str(cluster), "--codec", system.partition(" ")[2], "--json"]
    answer = json.loads(psgc("whatif", *question))
    # of backward and synchronization, where an iteration has the forward pass, too
    share = answer["sync_ms"] / (answer["sync_ms"] + (profile.forward_us or 0.0) / 1e3)
    return answer["gain"] * share, answer["margin"] * share, answer["verdict"]


def predict_hook(system: str, gbps: float, known: Known, folder: Path) -> tuple[float, float, str]:
    """By the closed model."""
    profile, encode_ms = known.profile, known.encode_ms[system]
    shapes = [tensor.shape or (tensor.numel,) for tensor in profile.tensors]
    backward_ms, whole = profile.backward_us / 1e3, 4 * profile.numel
    common = {"gpus": HOSTS, "bw_gbps": gbps, "alpha_us": profile.links["loopback"].latency_us, "grad_bytes": whole}

    def methods(bandwidth: float, gamma: float, encode: float) -> list[dict[str, Any]]:
        at = {**common, "bw_gbps": bandwidth, "gamma": gamma}
        sync = {**at, "method": "sync", "t_backward_ms": backward_ms}
        if system == "ddp fp16":  # which overlaps as fp32 does; its casts are part of the backward pass
            return [sync, {**at, "method": "sync_compressed", "ratio": 2, "t_backward_ms": backward_ms + encode / gamma}]
        p, q, plain = powersgd_bytes(shapes, RANK)
        return [
            sync,
            {**at, "method": "powersgd", "P_bytes": p + plain, "Q_bytes": q, "encode_decode_ms": encode, "t_backward_ms": backward_ms},
        ]

    varied = [
        (gbps, 1.07, encode_ms),
        (gbps * 0.9, 1.07, encode_ms),
        (gbps * 1.1, 1.07, encode_ms),
        (gbps, 1.0, encode_ms),
        (gbps, 1.1, encode_ms),
    ]
    runs = [method for setting in varied for method in methods(*setting)]
    cases = [
        {"id": str(n), "quantity": "time_ms", "inputs": {"run": run}, "expect": {"op": "gt", "value": 0}} for n, run in enumerate(runs)
    ]
    path = folder / "cases.json"
    path.write_text(json.dumps({"cases": cases}))
    values = [case["value"] for case in json.loads(psgc("whatif", "--cases", str(path), "--json"))["cases"]]
    forward_ms = (profile.forward_us or 0.0) / 1e3
    gains = [(values[at] - values[at + 1]) / (values[at] + forward_ms) for at in range(0, len(values), 2)]
    margin = max(0.005, *(abs(gain - gains[0]) for gain in gains))
    return gains[0], margin, f"{values[0]:.0f} ms without, {values[1]:.0f} ms with"


def interval(baseline: Sequence[float], system: Sequence[float]) -> tuple[float, float, float]:
    """The gain in the median, and the ends of its 95 % interval by bootstrap."""
    draw = random.Random(0)

    def gain(one: Sequence[float], other: Sequence[float]) -> float:
        return 1 - statistics.median(other) / statistics.median(one)

    gains = sorted(gain(draw.choices(baseline, k=len(baseline)), draw.choices(system, k=len(system))) for _ in range(RESAMPLES))
    return gain(baseline, system), gains[RESAMPLES * 25 // 1000], gains[RESAMPLES * 975 // 1000 - 1]


def link_title(gbps: float | None) -> str:
    return "unlimited" if gbps is None else f"{gbps:g} Gbit/s"


def done_before(out: Path | None) -> dict[str, list[Row]]:
    """By link, what the file has; a link that was cut off when the run was interrupted does not count."""
    found: dict[str, dict[str, Row]] = {}
    for line in out.read_text().splitlines() if out is not None and out.exists() else ():
        try:
            read = json.loads(line)
            row = Row(**{field.name: read[field.name] for field in fields(Row)})
            found.setdefault(row.link, {})[row.system] = row
        except (ValueError, KeyError):
            continue
    return {link: [rows[system] for system in BASELINE] for link, rows in found.items() if rows.keys() == BASELINE.keys()}


def rows_at(gbps: float | None, known: Known, repeats: int, folder: Path) -> list[Row]:
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for system in SYSTEMS:
            times.setdefault(system, []).extend(iterations_ms(system, HOSTS, gbps))
    most = known.profile.links["loopback"].gbps
    rate = most if gbps is None else min(gbps * TCP_SHARE, most)
    rows = []
    for system, baseline in BASELINE.items():
        predicted, margin, verdict = predict(system, rate, known, folder)
        measured, low, high = interval(times[baseline], times[system])
        medians = [statistics.median(times[one]) for one in (baseline, system)]
        rows.append(Row(link_title(gbps), system, medians[0], medians[1], predicted, margin, measured, low, high, verdict))
    return rows


def tell(rows: Sequence[Row], hardware: str) -> None:
    body = [
        [
            row.link, row.system, f"{row.baseline_ms:,.0f}", f"{row.system_ms:,.0f}", f"{row.predicted:+.0%} +-{row.margin:.0%}",
            f"{row.measured:+.0%}", f"{row.low:+.0%} to {row.high:+.0%}", row.judged,
        ]
        for row in rows
    ]  # fmt: skip
    print_table(["link", "system", "without, ms", "with, ms", "predicted gain", "measured", "95 %", "verdict"], body, title=hardware)


def run(options: argparse.Namespace) -> list[Row]:
    links = [None if text == "unlimited" else float(text) for text in options.links.split(",")]
    found = done_before(options.out)
    left = [gbps for gbps in links if link_title(gbps) not in found]
    if not left:
        return [row for gbps in links for row in found[link_title(gbps)]]
    with tempfile.TemporaryDirectory(prefix="psgc-utility-") as name:
        folder = Path(name)
        path = folder / "profile.json"
        known = Known(take_profile(path), path, measure_alone(options.repeats))
        for gbps in left:
            found[link_title(gbps)] = made = rows_at(gbps, known, options.repeats, folder)
            if options.out:
                with options.out.open("a") as file:
                    file.writelines(json.dumps({**asdict(row), "judged": row.judged}) + "\n" for row in made)
    return [row for gbps in links for row in found[link_title(gbps)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="0.1,1,unlimited", help="Gbit/s of every host's link, each way")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of all systems at a link")
    parser.add_argument("--out", type=Path, help="JSON lines: a link's are added when it is done, and not measured again")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.steps, options.to)
        return
    try:
        rows = run(options)
    except (UtilityError, TestbedError) as error:
        sys.exit(f"utility: {error}")
    if options.json:
        print(json.dumps({"hardware": machine(), "rows": [{**asdict(row), "judged": row.judged} for row in rows]}))
    else:
        tell(rows, machine())


if __name__ == "__main__":
    main()
