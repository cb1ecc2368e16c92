"""A GPT trains on real text while one of its workers dies and comes back: 4 ranks, then 3, then 4, beside the same job undisturbed.

    python benchmarks/shrinking.py                               three seeds, with and without the death
    python benchmarks/shrinking.py --steps 150 --seeds 0 --json  a short look

PSGC_ON_WORKER_LOSS=shrink with psgc.torch.Elastic, on this machine alone. A step has the same 12 sequences whoever takes part: ranks deal them anew at each
change (``psgc.on_membership``). The last rank's process kills itself (SIGKILL) after a third of the steps, and the one that follows waits before it joins until
half are done. "fewer": steps that 3 ranks took; "loss": of validation at the end, in nats a byte. A job that does not shrink and grow again, or whose ranks end
with different parameters, ends the script.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from psgc.diagnostics.machine import machine
from psgc.launch.tables import print_table

RANKS: Final = 4
SEQUENCES: Final = 12  # a step, of all ranks: as many for each of 3 as of 4
CONTEXT: Final = 128
PATIENCE_S: Final = 600.0


class Failed(Exception):
    """A job that did not end as it should."""


@dataclass(frozen=True, slots=True)
class Row:
    seed: int
    disturbed: bool
    fewer: int
    loss: float


def worker(seed: int, steps: int, folder: Path, *, disturbed: bool) -> None:
    import torch
    from gpt_model import Gpt, GptConfig
    from text_data import batch_of, load_text

    import psgc.torch as psgc

    reached, first = folder / "reached", os.environ["PSGC_INCARNATION"] == "1"  # of this rank's processes
    if not first:
        _wait_for(reached)
    psgc.init()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Gpt(GptConfig())
    optimizer = psgc.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model.named_parameters())
    elastic = psgc.Elastic(model=model, optimizer=optimizer)
    share, sizes = [(0, 1)], {}

    @psgc.on_membership
    def deal(members: Any) -> None:
        share[0], sizes[members.step] = members.shard, len(members.ranks)

    text, held_out = load_text()
    for step in elastic.steps(steps):
        if disturbed and first and step == steps // 3 and psgc.rank() == RANKS - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == steps // 2 and psgc.rank() == 0:
            reached.touch()
        number, count = share[0]
        x, y = batch_of(text, SEQUENCES, CONTEXT, torch.Generator().manual_seed(1_000_000 * seed + step))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[number::count]).flatten(0, 1), y[number::count].flatten()).backward()
        optimizer.step()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    found: dict[str, Any] = {"digest": digest, "sizes": sizes}
    if psgc.rank() == 0:
        draw, total = torch.Generator().manual_seed(1), 0.0
        with torch.no_grad():
            for _ in range(8):
                x, y = batch_of(held_out, 16, CONTEXT, draw)
                total += float(torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())) / 8
        found["loss"] = total
    (folder / f"{psgc.rank()}.json").write_text(json.dumps(found))


def _wait_for(path: Path) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > limit:
            sys.exit(f"shrinking: {path.name} is not there after {PATIENCE_S:g} s")
        time.sleep(0.05)


def fewer(sizes: dict[int, int], steps: int) -> int:
    """In how many steps not all ranks took part. sizes: how many did, from the step on at which that changed."""
    changes = [*sorted(sizes), steps]
    return sum(after - at for at, after in itertools.pairwise(changes) if sizes[at] < RANKS)


def measure(seed: int, steps: int, *, disturbed: bool) -> Row:
    """One job. Raises Failed."""
    with tempfile.TemporaryDirectory(prefix="psgc-shrinking-") as name:
        folder, script = Path(name), str(Path(__file__).resolve())
        work = [
            sys.executable,
            script,
            "--work",
            name,
            "--seeds",
            str(seed),
            "--steps",
            str(steps),
            *(["--disturbed"] if disturbed else []),
        ]
        command = [sys.executable, "-m", "psgc.launch", "run", "--no-prefix", "--workers", str(RANKS), "--servers", "1", "--", *work]
        done = subprocess.run(
            command, env={**os.environ, "PSGC_ON_WORKER_LOSS": "shrink", "PSGC_LOG_LEVEL": "error"}, check=False, stdout=sys.stderr
        )
        results = [folder / f"{rank}.json" for rank in range(RANKS)]
        if done.returncode or not all(path.exists() for path in results):
            raise Failed(
                f"seed {seed}: the job ended with status {done.returncode}, and results of {sum(path.exists() for path in results)} ranks"
            )
        found = [json.loads(path.read_text()) for path in results]
    if len({one["digest"] for one in found}) > 1:
        raise Failed(f"seed {seed}: ranks ended with different parameters")
    missing = fewer({int(step): size for step, size in found[0]["sizes"].items()}, steps)
    if disturbed != bool(missing) or (disturbed and missing >= steps - steps // 3):
        raise Failed(
            f"seed {seed}: {missing} of {steps} steps were taken by fewer ranks; expected {'some, not all to the end' if disturbed else 'none'}"
        )
    return Row(seed, disturbed, missing, found[0]["loss"])


def summary(rows: Sequence[Row]) -> str:
    plain, changed = ([row.loss for row in rows if row.disturbed == which] for which in (False, True))
    if min(len(plain), len(changed)) < 2:
        return ""
    found = [f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}" for losses in (plain, changed)]
    return f"undisturbed {found[0]}, 4 -> 3 -> 4 {found[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--seeds", default="0,1,2", help="with commas (default: 0,1,2)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--disturbed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 9:
        parser.error(f"--steps {options.steps}: expected at least 9")
    seeds = [int(one) for one in options.seeds.split(",") if one.isdigit()]
    if not seeds or len(seeds) != len(options.seeds.split(",")):
        parser.error(f"--seeds {options.seeds}: expected numbers with commas between them")
    if options.work:
        worker(seeds[0], options.steps, options.work, disturbed=options.disturbed)
        return
    try:
        rows = [measure(seed, options.steps, disturbed=disturbed) for seed in seeds for disturbed in (False, True)]
    except Failed as error:
        sys.exit(f"shrinking: {error}")
    if options.json:
        print(json.dumps({"hardware": machine(), "steps": options.steps, "rows": [asdict(row) for row in rows]}))
        return
    body = [[str(row.seed), "4 -> 3 -> 4" if row.disturbed else "undisturbed", str(row.fewer), f"{row.loss:.4f}"] for row in rows]
    print_table(["seed", "ranks", "fewer", "loss"], body, title=f"{options.steps} steps; {machine()}")
    print(summary(rows))


if __name__ == "__main__":
    main()
