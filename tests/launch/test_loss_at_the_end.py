"""A worker that dies when the others have come to the end and gone: nobody can take its place, and the job is over (PSGC_ON_WORKER_LOSS=shrink)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.launch.test_supervisor import SHRINKS, TELLING
from tests.launch.test_worker_loss import TRAINS

# GONE: a file with the pid of the one that ends first, whose launcher has seen its end once nothing of it is left in /proc.
WAITS = "while not os.path.exists({gone!r}): time.sleep(0.05)\nwhile os.path.exists('/proc/' + open({gone!r}).read()): time.sleep(0.05)\n"
LEAVES = "open({gone!r} + '~', 'w').write(str(os.getpid())); os.rename({gone!r} + '~', {gone!r})\n"
TRAINED = (
    "elastic = psgc.Elastic(model=model, optimizer=optimizer)\nfor step in elastic.steps(4):\n"
    "    optimizer.zero_grad()\n    model(torch.ones(3)).sum().backward()\n    optimizer.step()\n"
)


def test_who_takes_the_place_when_the_others_have_gone_is_not_waited_for_without_a_limit(launched: Any, tmp_path: Path) -> None:
    gone = str(tmp_path / "pid")
    first = TELLING + "tell('joined', rank=0)\n" + LEAVES.format(gone=gone)
    second = TELLING + "import signal; tell('joined', rank=1)\nif os.environ['PSGC_INCARNATION'] != '1': time.sleep(1e6)\n"
    second += WAITS.format(gone=gone) + "os.kill(os.getpid(), signal.SIGKILL)"
    popen = launched.python("-c", SHRINKS.format(name="first", grace_s=0.5, first=first, second=second))
    status, _, err = launched.end(popen)  # else it hangs
    assert status == 0, err
    assert "another process takes its place" in err and "the workers have ended; ending second, too" in err, err


def test_a_job_whose_last_worker_dies_after_its_training_is_over(launched: Any, tmp_path: Path) -> None:
    """Rank 0 has ended in order, and rank 1 dies before its own shutdown()."""
    script, gone = tmp_path / "dies.py", str(tmp_path / "pid")
    script.write_text(
        f"import time\n{TRAINS}if int(os.environ['PSGC_INCARNATION']) > 1:\n    print('joined again')\n{TRAINED}"
        f"if psgc.rank() == 0:\n    {LEAVES.format(gone=gone)}    psgc.shutdown()\n    print('ended')\n"
        f"else:\n    {WAITS.format(gone=gone).replace(chr(10), chr(10) + '    ')}os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    status, out, err = launched.end(launched.psgc("run", "--no-prefix", "--", sys.executable, str(script), PSGC_ON_WORKER_LOSS="shrink"))
    assert status == 0, err
    assert out == "ended\n", (out, err)
    assert "another process takes its place" in err
