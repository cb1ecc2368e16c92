"""A worker under Elastic, of which the lowest rank that takes part saves every third step as docs/operations.md says, and which goes on from such a file. Run
by tests.

elastic_saves.py FOLDER STEPS [FILE]        or, instead of FILE, "dies": rank 0 dies after its first file and does not come back
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

import psgc.torch as psgc
from psgc.errors import UsageError


def main() -> None:
    folder, total, dies = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["dies"]
    resume = [] if dies else sys.argv[3:]
    while dies and int(os.environ.get("PSGC_INCARNATION", "1")) > 1:
        time.sleep(1)
    torch.set_num_threads(1)
    early = psgc.Checkpoints(folder)
    psgc.init()
    torch.manual_seed(psgc.rank())
    model = torch.nn.Linear(20, 3)
    optimizer = psgc.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model.named_parameters())
    for refused in (lambda: psgc.Checkpoints(folder), lambda: early.save(1, {}), lambda: early.async_save(1, {})):
        try:
            refused()
        except UsageError as error:
            print(error, flush=True)
        else:
            raise AssertionError("not refused")
    first = 0
    if resume:
        saved = torch.load(resume[0])
        first = saved["steps"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    taking_part = [0]

    @psgc.on_membership
    def told(members: psgc.Members) -> None:
        taking_part[:] = members.ranks

    elastic = psgc.Elastic(model=model, optimizer=optimizer)
    for step in elastic.steps(total, first):
        if dies and step == 4 and psgc.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        draw = torch.Generator().manual_seed(10 * step + psgc.rank())
        optimizer.zero_grad()
        model(torch.randn(4, 20, generator=draw)).square().mean().backward()
        optimizer.step()
        if psgc.rank() == taking_part[0] and (step + 1) % 3 == 0:
            path = f"{folder}/checkpoint-{step + 1}.pt"
            with psgc.saving():
                torch.save({"steps": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path + ".part")
                os.replace(path + ".part", path)
    print(
        "weights", hashlib.sha256(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()).hexdigest(), flush=True
    )
    psgc.shutdown()


if __name__ == "__main__":
    main()
