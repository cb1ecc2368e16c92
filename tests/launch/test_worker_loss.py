"""A worker's process that is killed in the middle of a real job is followed by another, and the training goes on (PSGC_ON_WORKER_LOSS=wait)."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.killing import Pace, children
from tests.launch.lost_machine import TwoMachines

ROOT = Path(__file__).parent.parent.parent
JOB = str(ROOT / "tests" / "jobs" / "lost_worker.py")
WAIT = {"PSGC_ON_WORKER_LOSS": "wait"}
TRAINS = (
    "import os, signal, torch\nimport psgc.torch as psgc\npsgc.init()\nmodel = torch.nn.Linear(3, 1)\n"
    "optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())\n"
)
SAYS = re.compile(r"rank (\d+) step (\d+) loss (\S+) pid (\d+)")
Found = tuple[
    int, list[tuple[int, int, str]], list[str], str
]  # status; rank, step and loss of each line; what ranks found at the end; stderr


def train(launched: Any, codec: str, steps: int, kills: int = 0, seed: int = 0, workers: int = 2, servers: int = 1, **env: str) -> Found:
    """Run the job, and kill a worker's process now and then, each once it has said a step that it has taken, and all ranks are there: whoever has the state
    must live."""
    options = ("--no-prefix", "--workers", str(workers), "--servers", str(servers))
    with Pace(ahead=2) as pace:
        popen = launched.psgc(
            "run", *options, "--", sys.executable, JOB, str(steps), codec, "0.01", **WAIT, **env, **(pace.env if kills else {})
        )
        rng, said, found, killed, last = random.Random(seed), [], [], set[int](), dict[int, int]()
        assert popen.stdout is not None
        wait = workers * rng.randint(1, 4)
        for line in popen.stdout:
            if " found " in line:
                found.append(line.split(" found ")[1].split()[0])
            if not (match := SAYS.match(line)):
                continue
            rank, step, loss, pid = int(match[1]), int(match[2]), match[3], int(match[4])
            said.append((rank, step, loss))
            last[rank] = pid
            wait -= 1
            if kills and wait <= 0 and killed.isdisjoint(last.values()) and step < steps - 2:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                kills, wait = kills - 1, workers * rng.randint(1, 4)
            pace.heard(step + 1)
        status, _, err = launched.end(popen)
    assert kills == 0, err
    return status, said, found, err


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_training_has_the_losses_and_parameters_of_one_whose_workers_live(launched: Any, transport: str) -> None:
    """Without a codec that keeps residuals, and with batches and dropout that follow from seed, rank and step."""
    losses, parameters = [], []
    for kills in (0, 3):
        status, said, found, err = train(launched, "none", 24, kills, seed=len(transport), PSGC_TRANSPORT=transport)
        assert status == 0, err
        assert len(found) == 2 and len(set(found)) == 1
        losses.append(sorted({(step, loss) for _, step, loss in said}))
        parameters.append(found[0])
        assert err.count("another process takes its place") == kills
        repeated = sum(count - 1 for count in Counter((rank, step) for rank, step, _ in said).values())
        assert repeated <= kills, "at most the step under way is taken again"
    assert losses[0] == losses[1] and len(losses[0]) == 24
    assert parameters[0] == parameters[1]


def test_with_residuals_all_ranks_keep_the_same_parameters(launched: Any) -> None:
    status, said, found, err = train(launched, "int8", 24, 3, seed=1, workers=3, servers=2, PSGC_TRANSPORT="tcp", PSGC_ENCRYPT="1")
    assert status == 0, err
    assert len(found) == 3 and len(set(found)) == 1
    assert len({(step, loss) for _, step, loss in said}) == 24, "every rank got the same mean of each step"


# The example, whose rank 1 dies once it has taken step 10.
DIES_AFTER_10 = """
import os, runpy, signal, sys
import psgc.torch as psgc
of_elastic = psgc.Elastic.steps
def steps(self, *counted):
    for step in of_elastic(self, *counted):
        yield step
        if step == 10 and psgc.rank() == 1 and not self.replaced:
            os.kill(os.getpid(), signal.SIGKILL)
if os.environ["DIES"] == "1":
    psgc.Elastic.steps = steps
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_example_goes_on(launched: Any) -> None:
    found = []
    for kills in (0, 1):
        script = (sys.executable, "-c", DIES_AFTER_10, str(ROOT / "examples" / "train_elastic.py"), "--steps", "60")
        status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", *script, **WAIT, DIES=str(kills)))
        assert status == 0, err
        assert err.count("another process takes its place") == kills
        found.append(re.findall(r"^(?:step|weights) .*", out, re.M))
    assert len(found[0]) == 7 and found[0] == found[1]


def workers_of(popen: Any) -> list[int]:
    """Of a job with one server."""
    _guardian, _scheduler, _server, *workers = children(popen)
    return workers


# A schedule whose rates follow from one another, momentum, two updates a step of which the first has come; what is synchronised after it is the rank's step.
AFTER_ITS_UPDATE = """
optimizer.param_groups[0]["momentum"] = 0.9
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
elastic = psgc.Elastic(model=model, optimizer=optimizer, scheduler=schedule, seed=1)
updates = 0
for step in elastic.steps(8):
    for turn in range(2):
        optimizer.zero_grad()
        model(torch.rand(4, 3)).square().mean().backward()
        optimizer.step()
        if turn == 0:
            schedule.step()
            if psgc.rank() == 1 and step == DIES and not elastic.replaced:
                os.kill(os.getpid(), signal.SIGKILL)
            WAITS
print(f"rank {psgc.rank()} found", [f"{value:.9g}" for p in model.parameters() for value in p.flatten().tolist()], optimizer.param_groups[0]["lr"])
"""
WAITS = {
    "push_pull": "assert psgc.push_pull(torch.full((5,), step + psgc.rank()), average=False, name='late').tolist() == [2 * step + 1] * 5",
    "barrier": "psgc.barrier()",
    "handle": "psgc.push_pull_async(torch.full((5,), step + psgc.rank()), average=False, name='late')",
}


@pytest.mark.parametrize("waits", WAITS)
def test_a_worker_that_dies_between_its_update_and_what_follows_in_the_step_is_followed_by_another(
    waits: str, launched: Any, tmp_path: Path
) -> None:
    """Its update stands, and is not made twice. The others rest in their wait for it, where their state can be read."""
    found = []
    for dies in (-1, 3):
        script = tmp_path / f"late{dies}.py"
        script.write_text(TRAINS + AFTER_ITS_UPDATE.replace("DIES", str(dies)).replace("WAITS", WAITS[waits]))
        status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **WAIT))
        assert status == 0, err
        assert err.count("another process takes its place") == (dies >= 0)
        found.append(sorted(line.partition("found")[2] for line in out.splitlines() if "found" in line))
    assert found[0] == found[1] and len(set(found[0])) == 1 and len(found[0]) == 2


# Hooks of the update, of which some are registered before Elastic's own: what they keep in buffers, and what they change of parameters and rates.
HOOKED = """
model.register_buffer("average", torch.zeros(1, 3))
model.register_buffer("count", torch.zeros(()))
def decay(*_):
    model.weight.data.mul_(0.9)
def follow(*_):
    model.average.mul_(0.5).add_(model.weight.data)
def count(*_):
    model.count.add_(1)
    model.bias.data.mul_(0.9)
    optimizer.param_groups[0]["lr"] *= 0.9
optimizer.register_step_pre_hook(decay), optimizer.register_step_post_hook(follow)
elastic = psgc.Elastic(model=model, optimizer=optimizer, seed=1)
optimizer.register_step_post_hook(count)
for step in elastic.steps(6):
    optimizer.zero_grad()
    model(torch.rand(4, 3)).square().mean().backward()
    optimizer.step()
    if psgc.rank() == 1 and step == DIES and not elastic.replaced:
        os.kill(os.getpid(), signal.SIGKILL)
    psgc.push_pull(torch.ones(2), name="late")
print("found", [f"{value:.9g}" for t in model.state_dict().values() for value in t.flatten().tolist()], optimizer.param_groups[0]["lr"])
"""


# Layers that synchronise in each of a step's micro-batches, of which the last one has not come.
NORMALISES = """
torch.manual_seed(0)
layers = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)
model = psgc.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(*layers))
optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=4)
elastic = psgc.Elastic(model=model, optimizer=optimizer, seed=1)
for step in elastic.steps(5):
    optimizer.zero_grad()
    for batch in range(4):
        if psgc.rank() == 1 and (step, batch) == (DIES, 3) and not elastic.replaced:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.rand(4, 3)).square().mean().backward()
    optimizer.step()
print("found", [f"{value:.9g}" for t in model.state_dict().values() for value in t.flatten().tolist()])
"""


def test_a_worker_dies_in_the_last_of_many_forwards_of_layers_that_synchronise(launched: Any, tmp_path: Path) -> None:
    """Its successor runs all of them again, and gets what each had."""
    found = []
    for dies in (-1, 3):
        script = tmp_path / f"normalises{dies}.py"
        script.write_text(TRAINS[: TRAINS.index("model =")] + NORMALISES.replace("DIES", str(dies)))
        status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **WAIT))
        assert status == 0, err
        assert err.count("another process takes its place") == (dies >= 0)
        found += [line for line in out.splitlines() if "found" in line]
    assert len(found) == 4 and len(set(found)) == 1, found


def test_hooks_of_an_update_that_is_left_out_run(launched: Any, tmp_path: Path) -> None:
    found = []
    for dies in (-1, 3):
        script = tmp_path / f"hooked{dies}.py"
        script.write_text(TRAINS.replace("model =", "torch.manual_seed(0)\nmodel =") + HOOKED.replace("DIES", str(dies)))
        status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **WAIT))
        assert status == 0, err
        assert err.count("another process takes its place") == (dies >= 0)
        found.append([line for line in out.splitlines() if "found" in line])
    assert len(found[0]) == 2 and len({*found[0], *found[1]}) == 1, found


def test_a_worker_that_dies_in_an_update_that_synchronizes_ends_the_job_with_its_line(launched: Any, tmp_path: Path) -> None:
    """Its successor would have to begin in the middle of an update."""
    script = tmp_path / "within.py"
    script.write_text(
        TRAINS + "def within(optimizer, args, kwargs):\n"
        "    if step == 3 and psgc.rank() == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    psgc.push_pull(torch.ones(3), name='norm')\n"
        "elastic = psgc.Elastic(model=model, optimizer=optimizer)\noptimizer.register_step_pre_hook(within)\n"
        "for step in elastic.steps(8):\n    optimizer.zero_grad()\n    model(torch.ones(3)).sum().backward()\n    optimizer.step()\n"
    )
    status, _, err = launched.end(launched.psgc("run", "--", sys.executable, str(script), **WAIT, PSGC_DEAD_S="3"))
    assert status != 0
    assert "rank 1 died while the update of SGD was synchronized on rank 0, and no other process can begin" in err, err


def test_a_loop_that_is_left_by_break_skips_the_last_meeting(launched: Any, tmp_path: Path) -> None:
    """Nobody is there any more who could give a worker's successor the state; after the last step all ranks meet, and it gets it."""
    for ends, goes_on in (("break", False), ("continue", True)):
        script = tmp_path / f"{ends}.py"
        script.write_text(
            TRAINS + "elastic = psgc.Elastic(model=model, optimizer=optimizer)\nfor step in elastic.steps(4):\n"
            "    optimizer.zero_grad()\n    model(torch.ones(3)).sum().backward()\n    optimizer.step()\n"
            "    if step == 3 and psgc.rank() == 1 and not elastic.replaced:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
            f"    if step == 3:\n        {ends}\n"
        )
        status, _, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **WAIT))
        assert (status == 0) == goes_on, err
        assert goes_on or "no other worker is left to give it the job's state" in err, err


# A job that goes on from what codecs kept in an earlier one, as its checkpoint says.
RESUMED = """
import pathlib, sys
torch.manual_seed(0)
saved = pathlib.Path(sys.argv[1]) / f"residuals-{psgc.rank()}.pt"
resumes = saved.exists()
if resumes:
    optimizer.load_residual_state_dict(torch.load(saved))
elastic = psgc.Elastic(model=model, optimizer=optimizer, seed=1)
for step in elastic.steps(6):
    optimizer.zero_grad()
    model(torch.rand(4, 3)).square().mean().backward()
    if resumes and psgc.rank() == 1 and step == DIES and not elastic.replaced:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
if not resumes:
    torch.save(optimizer.residual_state_dict(), saved)
print("found", [f"{value:.9g}" for p in model.parameters() for value in p.flatten().tolist()])
"""


@pytest.mark.parametrize("dies", [0, 3])
def test_a_worker_dies_in_a_job_that_has_loaded_residuals(dies: int, launched: Any, tmp_path: Path) -> None:
    """Its successor, whose script loads them, too, begins without."""
    script = tmp_path / "resumed.py"
    script.write_text(TRAINS + RESUMED.replace("DIES", str(dies)))
    for deaths in (0, 1):
        command = ("run", "--no-prefix", "--", sys.executable, str(script), str(tmp_path))
        status, out, err = launched.end(launched.psgc(*command, PSGC_CODEC="onebit", PSGC_MIN_COMPRESS_BYTES="0", **WAIT))
        assert status == 0, err
        assert err.count("another process takes its place") == deaths
        found = [line for line in out.splitlines() if "found" in line]
        assert len(found) == 2 and len(set(found)) == 1, found


def test_a_worker_that_dies_again_and_again_without_a_step_ends_the_job_with_its_line(launched: Any, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        TRAINS + "for step in psgc.Elastic(model=model, optimizer=optimizer).steps(100):\n"
        "    if step == 2 and psgc.rank() == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    optimizer.zero_grad()\n    model(torch.ones(3)).sum().backward()\n    optimizer.step()\n"
    )
    status, _, err = launched.end(launched.psgc("run", "--", sys.executable, str(script), **WAIT))
    assert status == 128 + signal.SIGKILL, err
    assert re.search(r"worker 1 has ended \d+ times in \d+ s and completed no step in between, so it is not started again$", err, re.M), err
    assert re.search(r"psgc run: rank 1 was killed by SIGKILL \(pid \d+\)$", err.strip()), err


def test_a_script_without_elastic_ends_with_a_line_that_names_it(launched: Any, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        TRAINS + "while True:\n    model(torch.ones(3)).sum().backward()\n    optimizer.step()\n    print('step', flush=True)\n"
    )
    popen = launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **WAIT)
    launched.read_until(popen, "step")
    os.kill(workers_of(popen)[1], signal.SIGKILL)
    status, _, err = launched.end(popen)
    assert status == 1
    last = err.strip().splitlines()[-1]
    assert (
        "rank 1 ended with UsageError: this process has taken the place of rank 1's, which died, and has not the job's state yet" in last
    ), err
    assert "psgc.torch.Elastic" in last


def test_what_is_synchronised_before_the_loop_is_refused_in_the_first_process(launched: Any, tmp_path: Path) -> None:
    script = tmp_path / "before.py"
    script.write_text(
        TRAINS
        + "psgc.push_pull(torch.ones(3), name='size')\nfor step in psgc.Elastic(model=model, optimizer=optimizer).steps(3):\n    pass\n"
    )
    status, _, err = launched.end(launched.psgc("run", "--", sys.executable, str(script), **WAIT))
    assert status == 1
    assert "Elastic: something was synchronised before its steps" in err.strip().splitlines()[-1], err


# A GAN whose halves are groups of one optimizer, with two updates a step, and a moving average among the model's parameters.
GAN = """
import os, signal, torch
import psgc.torch as psgc
psgc.init()
torch.manual_seed(0)
model = torch.nn.ModuleDict({"g": torch.nn.Linear(2, 1), "d": torch.nn.Linear(2, 1), "average": torch.nn.Linear(2, 1).requires_grad_(False)})
optimizer = psgc.DistributedOptimizer(torch.optim.SGD([{"params": model[one].parameters()} for one in "gd"], lr=0.1, momentum=0.9), model.named_parameters())
elastic = psgc.Elastic(model=model, optimizer=optimizer, seed=1)
for step in elastic.steps(6):
    for one, other in ("dg", "gd"):
        model[one].requires_grad_(True), model[other].requires_grad_(False)
        optimizer.zero_grad()
        (model[one](torch.rand(4, 2)) * model[other](torch.rand(4, 2))).mean().backward()
        if (step, one) == DIES and psgc.rank() == 1 and not elastic.replaced:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        for average, parameter in zip(model["average"].parameters(), model["d"].parameters()):
            average.data.mul_(0.5).add_(parameter.data)
    model.requires_grad_(True)["average"].requires_grad_(False)
print("found", [f"{value:.9g}" for p in model.parameters() for value in p.flatten().tolist()])
"""


@pytest.mark.parametrize("half", "dg")
def test_two_halves_that_one_optimizer_trains_in_turn_go_on_where_they_were(half: str, launched: Any, tmp_path: Path) -> None:
    found = []
    for dies in (-1, 3):
        script = tmp_path / f"gan{dies}.py"
        script.write_text(GAN.replace("DIES", repr((dies, half))))
        status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **WAIT))
        assert status == 0, err
        assert err.count("another process takes its place") == (dies >= 0)
        found.append([line for line in out.splitlines() if "found" in line])
    assert len(found[0]) == 2 and len({*found[0], *found[1]}) == 1, found


# Weight decay and momentum move a parameter that no rank uses in a step where zero_grad() has left zeros, and not where it has left None.
UNUSED_NOW_AND_THEN = """
second = torch.nn.Linear(3, 1)
both = torch.nn.ModuleList([model, second])
sgd = torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
optimizer = psgc.DistributedOptimizer(sgd, both.named_parameters())
elastic = psgc.Elastic(model=both, optimizer=optimizer, seed=1)
for step in elastic.steps(8):
    CLEAR
    (model(torch.rand(4, 3)) + (second(torch.rand(4, 3)) if step < 2 else 0)).square().mean().backward()
    if psgc.rank() == 1 and step == DIES and not elastic.replaced:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
print(f"rank {psgc.rank()} found", [f"{value:.9g}" for p in both.parameters() for value in p.flatten().tolist()])
"""


@pytest.mark.parametrize("set_to_none", [False, True])
def test_whether_a_gradient_is_zeros_or_none_is_known_to_the_process_that_follows(launched: Any, tmp_path: Path, set_to_none: bool) -> None:
    found = []
    for dies in (-1, 4):
        script = tmp_path / f"unused{dies}.py"
        script.write_text(TRAINS + UNUSED_NOW_AND_THEN.replace("DIES", str(dies)).replace("CLEAR", f"optimizer.zero_grad({set_to_none})"))
        status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), PSGC_FUSE_BYTES="1", **WAIT))
        assert status == 0, err
        assert err.count("another process takes its place") == (dies >= 0)
        found.append(sorted(line.partition("found")[2] for line in out.splitlines() if "found" in line))
    assert found[0] == found[1] and len(set(found[0])) == 1 and len(found[0]) == 2


def test_gradients_that_add_up_from_step_to_step_are_refused(launched: Any, tmp_path: Path) -> None:
    """Another process would not have what is in them."""
    script = tmp_path / "adds.py"
    script.write_text(TRAINS + UNUSED_NOW_AND_THEN.replace("DIES", "-1").replace("CLEAR", "pass"))
    status, _, err = launched.end(launched.psgc("run", "--", sys.executable, str(script), **WAIT))
    assert status == 1
    last = err.strip().splitlines()[-1]
    assert (
        "still has what an earlier step left in p.grad" in last and "call optimizer.zero_grad() in each step before backward()" in last
    ), err


# The second layer runs before the first has run; a process that begins later runs them in order.
DROPPED_AT_FIRST = """
model = torch.nn.ModuleDict({"first": psgc.SyncBatchNorm(3), "second": psgc.SyncBatchNorm(3), "last": model})
optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
elastic = psgc.Elastic(model=model, optimizer=optimizer, seed=1)
for step in elastic.steps(6):
    optimizer.zero_grad()
    inputs = torch.rand(4, 3)
    inputs = model["first"](inputs) if step else inputs
    model["last"](model["second"](inputs.square() + 1)).square().mean().backward()
    if psgc.rank() == 1 and step == DIES and not elastic.replaced:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
print("found", [f"{value:.9g}" for p in (*model.parameters(), *model.buffers()) for value in p.flatten().tolist()])
"""


def test_layers_that_have_first_run_in_another_order_are_known_to_the_process_that_follows(launched: Any, tmp_path: Path) -> None:
    found = []
    for dies in (-1, 3):
        script = tmp_path / f"dropped{dies}.py"
        script.write_text(TRAINS + DROPPED_AT_FIRST.replace("DIES", str(dies)))
        status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **WAIT))
        assert status == 0, err
        assert err.count("another process takes its place") == (dies >= 0)
        found.append([line for line in out.splitlines() if "found" in line])
    assert len(found[0]) == 2 and len({*found[0], *found[1]}) == 1, found


# A moving average's weights are swapped in for an evaluation, in which the other rank dies, or the average itself is evaluated.
EVALUATES = """
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
elastic = psgc.Elastic(model=model, optimizer=optimizer, extra={"average": average}, seed=1)
def swap(values):
    for parameter, value in zip(model.parameters(), values):
        parameter.data.copy_(value)
for step in elastic.steps(8):
    optimizer.zero_grad()
    model(torch.rand(4, 3)).square().mean().backward()
    optimizer.step()
    average.update_parameters(model)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    if SWAPS:
        swap(average.module.parameters())
    loss = (model if SWAPS else average)(torch.ones(4, 3)).square().mean().detach()
    if psgc.rank() == 1 and step == DIES and not elastic.replaced:
        os.kill(os.getpid(), signal.SIGKILL)
    psgc.push_pull(loss, name="evaluated")
    swap(kept)
print("found", [f"{value:.9g}" for p in (*model.parameters(), *average.parameters()) for value in p.flatten().tolist()])
"""


@pytest.mark.parametrize("swaps", [True, False])
def test_weights_that_are_swapped_where_another_process_gets_them_end_the_job_with_a_line(
    swaps: bool, launched: Any, tmp_path: Path
) -> None:
    found = []
    for dies in (-1, 3):
        script = tmp_path / f"evaluates{dies}.py"
        script.write_text(TRAINS + EVALUATES.replace("DIES", str(dies)).replace("SWAPS", str(swaps)))
        status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **WAIT))
        if swaps and dies >= 0:
            assert status == 1
            last = err.strip().splitlines()[-1]
            assert "was changed beside optimizer.step(), and again after rank 1's next process was given it" in last, err
            assert "use a copy of the model" in last
            return
        assert status == 0, err
        found.append([line for line in out.splitlines() if "found" in line])
    assert len(found[0]) == 2 and len({*found[0], *found[1]}) == 1, found


def test_a_second_optimizer_in_the_loop_is_refused(launched: Any, tmp_path: Path) -> None:
    """What it trains would not get to another process."""
    script = tmp_path / "second.py"
    script.write_text(
        TRAINS + "second = torch.nn.Linear(3, 1)\n"
        "another = psgc.DistributedOptimizer(torch.optim.SGD(second.parameters(), lr=0.1), second.named_parameters())\n"
        "for step in psgc.Elastic(model=model, optimizer=optimizer).steps(3):\n"
        "    for net, of in ((second, another), (model, optimizer)):\n        net(torch.ones(3)).sum().backward()\n        of.step()\n"
    )
    status, _, err = launched.end(launched.psgc("run", "--", sys.executable, str(script), **WAIT))
    assert status == 1
    assert "Elastic: gradients of a second DistributedOptimizer were averaged in its loop" in err.strip().splitlines()[-1], err


def test_a_worker_that_dies_while_the_others_prepare_is_followed_by_another(launched: Any, tmp_path: Path) -> None:
    """Rank 0 has no Elastic yet when the new process asks it for the state."""
    script, asks = tmp_path / "prepares.py", tmp_path / "asks"
    script.write_text(
        TRAINS + "import time\nfirst = psgc.current_session().incarnation == 1\n"
        f"asks = {str(asks)!r}\n"
        "if psgc.rank() == 1 and first:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if psgc.rank() == 1:\n    open(asks, 'w').close()\n"
        "else:\n    while not os.path.exists(asks):\n        time.sleep(0.1)\n    time.sleep(4)\n"
        "for step in psgc.Elastic(model=model, optimizer=optimizer).steps(3):\n"
        "    optimizer.zero_grad()\n    model(torch.ones(3)).sum().backward()\n    optimizer.step()\n"
        "print('found', [f'{value:.9g}' for p in model.parameters() for value in p.flatten().tolist()])\n"
    )
    status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **WAIT))
    assert status == 0, err
    assert err.count("another process takes its place") == 1
    found = [line for line in out.splitlines() if "found" in line]
    assert len(found) == 2 and len(set(found)) == 1


# The process in rank 1's place says that it prepares, or that it is connected to take the state, and waits there until the scheduler has been killed.
HELD_UP = """
import time
from psgc.torch.elastic.handover import Channel
taken, takes = {held!r}, Channel.take
def hold(said):
    print(said, flush=True)
    while not os.path.exists(taken):
        time.sleep(0.05)
def take(self, places):
    if not os.path.exists(taken):
        number = elastic._taken.number
        hold("takes")
        while elastic._taken.number == number:
            time.sleep(0.05)
    return takes(self, places)
Channel.take = take
if {window!r} == "prepares" and psgc.current_session().incarnation > 1:
    hold("prepares")
elastic = psgc.Elastic(model=model, optimizer=optimizer, seed=1)
for step in elastic.steps(6):
    if step == 3 and psgc.rank() == 1 and not elastic.replaced:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.rand(4, 3)).square().mean().backward()
    optimizer.step()
print("found", [f"{{value:.9g}}" for p in model.parameters() for value in p.flatten().tolist()])
"""


@pytest.mark.parametrize("window", ["prepares", "takes"])
def test_a_scheduler_that_dies_before_another_process_has_the_state_changes_nothing(launched: Any, tmp_path: Path, window: str) -> None:
    script, held = tmp_path / "held_up.py", tmp_path / "held"
    script.write_text(TRAINS + HELD_UP.format(held=str(held), window=window))
    popen = launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), **WAIT)
    launched.read_until(popen, window)
    os.kill(children(popen)[1], signal.SIGKILL)
    held.touch()
    status, out, err = launched.end(popen)
    assert status == 0, err
    assert "it is started again and goes on from its journal" in err
    found = [line for line in out.splitlines() if "found" in line]
    assert len(found) == 2 and len(set(found)) == 1, out
    assert "could not get the state" not in err, "a handover that another one follows has not failed"


def test_a_second_elastic_is_refused_when_it_is_made(launched: Any, tmp_path: Path) -> None:
    """The others would ask the one and the new process the other."""
    script = tmp_path / "two.py"
    script.write_text(
        TRAINS + "psgc.Elastic(model=model, optimizer=optimizer)\nsecond = torch.nn.Linear(3, 1)\n"
        "another = psgc.DistributedOptimizer(torch.optim.SGD(second.parameters(), lr=0.1), second.named_parameters())\n"
        "psgc.Elastic(model=second, optimizer=another)\n"
    )
    status, _, err = launched.end(launched.psgc("run", "--", sys.executable, str(script), **WAIT))
    assert status == 1
    assert "this process has a psgc.torch.Elastic already" in err.strip().splitlines()[-1], err


def test_servers_and_workers_that_are_killed_in_turn_change_nothing(launched: Any) -> None:
    found = []
    for kills in (False, True):
        with Pace(ahead=2) as pace:
            popen = launched.psgc(
                "run", "--no-prefix", "--servers", "2", "--", sys.executable, JOB, "24", "none", "0.02", **WAIT, **pace.env
            )
            said, victims, after = 0, list[int](), set[str]()
            assert popen.stdout is not None
            for line in popen.stdout:
                if " found " in line:
                    after.add(line.split(" found ")[1].split()[0])
                if not (match := SAYS.match(line)):
                    continue
                if not said and kills:
                    _guardian, _scheduler, *servers = map(int, children(popen)[:4])
                    victims = [0, servers[0], 0, servers[1]]  # 0: the worker that speaks
                said += 1
                if said % 8 == 0 and victims:
                    os.kill(victims.pop(0) or int(match[4]), signal.SIGKILL)
                pace.heard(int(match[2]) + 1)
            status, _, err = launched.end(popen)
        assert status == 0 and not victims, err
        found.append(after)
    assert len(found[0]) == 1 and found[0] == found[1]


def test_an_error_of_the_script_is_not_repeated(launched: Any, tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(
        "import psgc.torch as psgc\npsgc.init()\nif psgc.rank() == 1:\n    raise ValueError('no such shard')\npsgc.barrier()\n"
    )
    status, _, err = launched.end(launched.psgc("run", "--", sys.executable, str(script), **WAIT))
    assert status == 1
    assert "takes its place" not in err
    assert err.strip().splitlines()[-1].startswith("psgc run: rank 1 ended with ValueError: no such shard"), err


@pytest.mark.parametrize(
    ("servers", "env", "words"),
    [
        ("0", {}, "DMLC_NUM_SERVER=0: workers that exchange among themselves cannot go on without one"),
        ("1", {"PSGC_ASYNC": "1"}, "PSGC_ASYNC=1"),
    ],
)
def test_what_cannot_wait_is_refused_before_anything_starts(launched: Any, servers: str, env: dict[str, str], words: str) -> None:
    status, _, err = launched.end(launched.psgc("run", "--servers", servers, "--", sys.executable, JOB, "3", "none", "0", **WAIT, **env))
    assert status == 2, err
    assert "PSGC_ON_WORKER_LOSS=wait" in err and words in err and len(err.strip().splitlines()) == 1, err


@pytest.mark.parametrize(
    "call",
    ["psgc.broadcast_parameters(model.state_dict())", "psgc.DistributedDataParallel(model)", "psgc.ddp_hook()", "psgc.CrossBarrier(model, optimizer)",
     "psgc.DiLoCo(model, optimizer, every=2)", "psgc.broadcast_object(3)"],
)  # fmt: skip
def test_what_another_process_could_not_take_part_in_is_refused(launched: Any, tmp_path: Path, call: str) -> None:
    script = tmp_path / "calls.py"
    begin = "import torch\nimport psgc.torch as psgc\npsgc.init()\nmodel = torch.nn.Linear(3, 1)\n"
    script.write_text(f"{begin}optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{call}\n")
    status, _, err = launched.end(launched.psgc("run", "--", sys.executable, str(script), **WAIT))
    assert status == 1
    assert (
        "under PSGC_ON_WORKER_LOSS=wait a process that takes a dead worker's place could not take part; " in err.strip().splitlines()[-1]
    ), err


ALONE = """
import os, sys, time
import torch
import psgc.torch as psgc
from psgc.errors import UsageError
psgc.init()
model = torch.nn.Linear(3, 1)
optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

@psgc.on_membership
def told(members):
    for call in (lambda: psgc.push_pull(torch.ones(2), name="told"), lambda: psgc.push_pull_async(torch.ones(2)), psgc.barrier):
        try:
            call()
        except UsageError as error:
            print(error, flush=True)
    open(f"{sys.argv[1]}{psgc.rank()}", "w").close()
    while not all(os.path.exists(f"{sys.argv[1]}{rank}") for rank in range(2)):
        time.sleep(0.01)
    model(torch.ones(3)).sum().backward()  # which ends the job

next(psgc.Elastic(model=model, optimizer=optimizer).steps(2))
"""


def test_nothing_is_synchronised_where_a_process_in_a_dead_ones_place_is_told_alone(launched: Any, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), str(tmp_path / "told"), **WAIT))
    says = "on_membership's callback: a process that takes a dead worker's place is told alone, at its first step"
    assert (status, out.count(says)) == (1, 6), (out, err)
    assert says in err.strip().splitlines()[-1], err


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_many_kills_at_random_steps(launched: Any, seed: int) -> None:
    rng = random.Random(seed)
    workers, servers = rng.choice([(2, 1), (3, 1), (3, 2), (4, 2)])
    make: Callable[[int], Found] = lambda kills: train(  # noqa: E731
        launched, "none", 60, kills, seed, workers, servers, PSGC_TRANSPORT=rng.choice(["shm", "tcp"])
    )
    plain, killed = make(0), make(6)
    assert plain[0] == killed[0] == 0, killed[3]
    assert {(step, loss) for _, step, loss in plain[1]} == {(step, loss) for _, step, loss in killed[1]}
    assert set(plain[2]) == set(killed[2]) and len(set(killed[2])) == 1


def test_a_machine_that_is_lost_is_followed_by_another_with_its_number(launched: Any) -> None:
    """Somebody starts another."""
    with Pace() as pace:
        machines = TwoMachines(launched, pace, (sys.executable, JOB, "30", "none", "0.02"), WAIT)
        first = machines.lose_the_second()
        ends = [launched.end(popen) for popen in (first, machines.node(1), *machines.services)]
    assert [status for status, _, _ in ends] == [0, 0, 0, 0], ends
    found = {match for _, out, _ in ends[:2] for match in re.findall(r"found (\w+)", out)}
    assert len(found) == 1 and "rank 1 found" in ends[1][1] and "replaced True" in ends[1][1], ends
