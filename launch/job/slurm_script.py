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

ENDING: Final = ("exec srun --kill-on-bad-exit=1 LAUNCH",)
# Slurm counts a lost node's task as one that has failed: the first node's launcher says what became of the job. Launchers end one that has failed. The traps
# keep the shell until srun has ended, which gets the signals as well.
OUTLIVING: Final = (
    "trap : TERM USR1 USR2",
    "export PSGC_STATUS_FILE=$(mktemp)",
    """trap 'rm -f "$PSGC_STATUS_FILE"' EXIT""",
    "srun --no-kill --kill-on-bad-exit=0 LAUNCH || true",
    """status=$(cat "$PSGC_STATUS_FILE")""",
    """exit "${status:-1}\"""",
)


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
        launch = shlex.join([self.launcher, *self.command])
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH --{name}{f'={value}' if value else ''}" for name, value in options.items()),
                "set -eu",
                TOKEN,
                *(f"export {name}={shlex.quote(value)}" for name, value in self.settings.items()),
                *(line.replace("LAUNCH", launch) for line in (OUTLIVING if self.outlives else ENDING)),
                "",
            ]
        )
