"""``python -m psgc.launch.pages.env``: docs/env.md, made from the tables in psgc/variables.py; a test compares the two."""

from __future__ import annotations

from dataclasses import fields

from psgc.config import Config
from psgc.variables import LAUNCHER_VARIABLES, OF_OTHERS, VARIABLES, WITHOUT_EFFECT

HEAD = """# Settings

Made by `python -m psgc.launch.pages.env > docs/env.md` from the tables in `psgc/variables.py`; only `psgc/config.py` reads them.

`psgc run` sets the variables of the job's topology (`DMLC_*`); with `psgc-launch` set them yourself, to the same values on every machine except for
`DMLC_ROLE`, `DMLC_WORKER_ID` and `DMLC_SERVER_ID`. An unknown name, or one without effect, causes a warning at start, which suggests the
name that was probably meant. A misspelt name of the topology (`DMLC_PS_ROOT_URL`) is refused unless the right one is set, too, because it would
change the job. Roles: w worker, s server, c scheduler.

| variable | also read as | roles | default | meaning |
|---|---|---|---|---|
"""
LAUNCHER = """
`psgc-launch` reads these, too. Without `BYTEPS_LOCAL_SIZE` it starts one worker for each entry of `NVIDIA_VISIBLE_DEVICES` or
`CUDA_VISIBLE_DEVICES`, else one; it changes neither: a worker takes the device of its local rank.

With `DMLC_NUM_WORKER=1` the job runs on one machine, as with bpslaunch: `NVIDIA_VISIBLE_DEVICES=0,1 DMLC_NUM_WORKER=1 psgc-launch python
train.py` starts two workers, a scheduler and `DMLC_NUM_SERVER` servers (default 1); `DMLC_ROLE` may be missing, and an address is
ignored. Launchers of the roles scheduler and server then report that they are not needed, and end. With `BYTEPS_FORCE_DISTRIBUTED=1` on all
machines, the workers use the scheduler and the servers that you start. A single worker sends nothing.

| variable | meaning |
|---|---|
"""
TAIL = """
## Variables that launchers set for workers

`psgc run` and `psgc-launch` set torch.distributed's variables for each worker, so that scripts and libraries that read them
(`init_process_group()`, Hugging Face Trainer, Lightning, Accelerate: [integrations.md](integrations.md)) see the job's ranks. psgc itself reads the
variables above.

| variable | value |
|---|---|
| `RANK`, `WORLD_SIZE` | this worker's rank, and workers in the job: psgc's own, numbered node by node |
| `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | this worker's number on its node, and workers there |
| `GROUP_RANK` | the node's number |
| `MASTER_ADDR` | `psgc run`, and `psgc-launch` with one node: 127.0.0.1; with several: the scheduler's address |
| `MASTER_PORT` | `psgc run`, and `psgc-launch` with one node: a free port; with several: `DMLC_PS_ROOT_PORT` + 1 |
| `OMP_WAIT_POLICY` | `passive`, unless it is set: threads that spin take cores from other processes |
| `OMP_NUM_THREADS` | unless it is set: for several workers on a machine, each one's share of the cores |

`psgc-launch` keeps the values that you have set, except `RANK` and `LOCAL_RANK` if it starts several workers; `psgc run` keeps
`MASTER_ADDR` and `MASTER_PORT`, unless the shell is a worker of another job (`RANK` is set). Rank 0 listens at `MASTER_ADDR`: if the
scheduler runs on another machine than node 0, set `MASTER_ADDR` to node 0's address on every machine. A node does not know how many
workers other nodes have, and assumes as many as its own. If that is wrong, set `PSGC_NODE_SIZES` to the same value on every
machine; `psgc.torch.ddp_hook` refuses a `WORLD_SIZE` that differs from the job's.

Under `torchrun` without `DMLC_*` the workers start the scheduler and the servers themselves (`PSGC_SERVERS=embedded`, [clusters.md](clusters.md#torchrun)), and
`GROUP_RANK`, `GROUP_WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are used. With
`DMLC_PS_ROOT_PORT` (and `DMLC_NUM_SERVER`) workers join a scheduler and servers that you have started.

Without a scheduler's address, or with `DMLC_NUM_WORKER=1` and one local rank, a process is a job of one worker and sends nothing. If the
environment describes several workers (`DMLC_NUM_WORKER` or `WORLD_SIZE` above 1, several local ranks, `BYTEPS_FORCE_DISTRIBUTED`) but no address, or
an address but no `DMLC_NUM_WORKER`, `init()` raises an error instead of training alone.

## BytePS's settings without effect here

| variable | why |
|---|---|
"""

OTHERS = """
Psgc does not warn of these:

| variables | why |
|---|---|
"""


def render() -> str:
    """The whole page."""
    defaults = {f.name: f.default for f in fields(Config)}
    rows = []
    for v in VARIABLES:
        aliases = ", ".join(f"`{alias}`" for alias in v.aliases)
        default = defaults[v.field]
        shown = "" if default in ("", -1, 0, ()) and not isinstance(default, float) else f"`{default}`"
        meaning = f"{v.meaning} ({v.parse.__doc__})" if v.parse.__doc__ != "text" else v.meaning
        rows.append(f"| `{v.name}` | {aliases} | {v.roles} | {shown} | {meaning} |")
    without = [f"| `{name}` | {why} |" for name, why in sorted(WITHOUT_EFFECT.items())]
    others: dict[str, list[str]] = {}
    for name, why in OF_OTHERS.items():
        others.setdefault(why, []).append(f"`{name}`")
    ignored = [f"| {', '.join(names)} | {why} |" for why, names in others.items()]
    launcher = [f"| `{name}` | {meaning} |" for name, meaning in sorted(LAUNCHER_VARIABLES.items())]
    return (
        HEAD
        + "\n".join(rows)
        + "\n"
        + LAUNCHER
        + "\n".join(launcher)
        + "\n"
        + TAIL
        + "\n".join(without)
        + "\n"
        + OTHERS
        + "\n".join(ignored)
        + "\n"
    )


if __name__ == "__main__":
    print(render(), end="")
