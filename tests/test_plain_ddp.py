"""The way back: a DDP script without its one line of psgc is plain DDP, started as before."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.over_gloo import run_over_gloo
from tests.ports import free_port

ROOT = Path(__file__).parent.parent
LINE = "    psgc.ddp_hook().install()  # the one line: before the model is wrapped\n"


def losses(script: Path) -> list[str]:
    """What torchrun's two workers print."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(("PSGC_", "DMLC_", "BYTEPS_"))}
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), str(script)]
    done = run_over_gloo(command, env, cwd=str(ROOT))
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"rank \d: losses \[[^\]]*\]", done.stdout))


def test_without_its_one_line_the_example_is_plain_ddp_and_trains_to_the_same_losses(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "ddp_plain.py").read_text()
    assert text.count(LINE) == 1 and LINE.split("  #", maxsplit=1)[0].strip() in (ROOT / "docs" / "operations.md").read_text()
    plain = tmp_path / "plain.py"
    plain.write_text(text.replace(LINE, "").replace("import psgc.torch as psgc\n", ""))
    assert "psgc." not in plain.read_text().split('"""')[2]
    found = losses(plain)
    assert found == losses(ROOT / "examples" / "ddp_plain.py") and len(found) == 2
