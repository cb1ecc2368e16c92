"""The batch script by which Slurm starts a job: one psgc-launch on each node. Pure: it is text.

The job's secret is drawn when the job starts, on its first node, and handed on by srun; it is in no file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# PSGC_TOKEN of the user's shell counts first: sbatch hands the environment on.
TOKEN: Final = """export PSGC_TOKEN="${PSGC_TOKEN:-$(head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \\n')}\""""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """nodes: of the job. options: of sbatch, by their long names, without dashes; "" for one without a value. settings: further variables of all
    processes. launcher: path of psgc-launch on the nodes. outlives: whether the job goes on when Slurm loses one of its nodes."""

    nodes: int
    command: Sequence[str]
    launcher: str
    options: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    outlives: bool = False

    def script(self) -> str:
        # Appended to: a job that Slurm starts again keeps what it said before.
        options = {
            "nodes": str(self.nodes),
            "ntasks-per-node": "1",
            "job-name": "psgc",
            "output": "psgc-%j.log",
            "open-mode": "append",
            **({"no-kill": ""} if self.outlives else {}),
            **self.options,
        }
        # Slurm counts a lost node's task as one that has failed; launchers end a job that has failed by themselves.
        ends = "--no-kill --kill-on-bad-exit=0" if self.outlives else "--kill-on-bad-exit=1"
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH --{name}{f'={value}' if value else ''}" for name, value in options.items()),
                "set -eu",
                TOKEN,
                *(f"export {name}={shlex.quote(value)}" for name, value in self.settings.items()),
                f"exec srun {ends} {shlex.join([self.launcher, *self.command])}",
                "",
            ]
        )
