"""Rank 0 dies when everyone has joined, before the first step: its parameters are those that all ranks begin with (PSGC_ON_WORKER_LOSS=wait)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_worker_loss import TRAINS, WAIT

# Rank 0's first process dies before it sends anything, once all have its parameters, or once they have its optimizer's options, but not its state.
DIES = """
from psgc.torch.tensors import broadcast
send, sent = broadcast.broadcast_tensors, []
incarnation, where = int(os.environ["PSGC_INCARNATION"]), {where!r}
def sending(*args):
    if (where, len(sent)) in (("nothing", 0), ("options", 1)):
        os.kill(os.getpid(), signal.SIGKILL)
    send(*args)
    sent.append(args)
    if where == "parameters":
        os.kill(os.getpid(), signal.SIGKILL)
if psgc.rank() == 0 and incarnation == 1:
    broadcast.broadcast_tensors = sending
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(10 * psgc.rank() + incarnation)
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["lr"] = 0.5, incarnation if where == "options" else 0.5
for step in psgc.Elastic(model=model, optimizer=optimizer).steps(2):
    if step == 0:
        print("begins", *(value for parameter in model.parameters() for value in parameter.flatten().tolist()))
    optimizer.zero_grad()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
print("found", *(value for parameter in model.parameters() for value in parameter.flatten().tolist()))
"""


def run(launched: Any, folder: Path, where: str) -> tuple[int, list[str], str]:
    script = folder / "dies.py"
    script.write_text(TRAINS + DIES.replace("{where!r}", repr(where)))
    status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--workers", "3", "--", sys.executable, str(script), **WAIT))
    assert err.count("another process takes its place") == 1, err
    return status, sorted(out.splitlines()), err


@pytest.mark.parametrize(("where", "value"), [("nothing", 2.0), ("parameters", 1.0)])
def test_the_next_process_of_rank_0_gives_what_it_begins_with_or_takes_what_the_others_have(
    where: str, value: float, launched: Any, tmp_path: Path
) -> None:
    """The script makes other parameters each time. Nobody has begun yet: the optimizer's state is still to come."""
    status, out, err = run(launched, tmp_path, where)
    assert status == 0, err
    begins, found = [line for line in out if "begins" in line], [line for line in out if "found" in line]
    assert begins == [f"begins {value} {value} {value} {value}"] * 3, err
    assert len(found) == 3 and len(set(found)) == 1


def test_other_options_of_the_optimizer_than_the_others_have_end_the_job_with_a_line(launched: Any, tmp_path: Path) -> None:
    status, _, err = run(launched, tmp_path, "options")
    assert status == 1
    assert "rank 0 died once the others had this of it, and its next process has made another" in err.strip().splitlines()[-1], err
