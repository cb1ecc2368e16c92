"""A learner that trains a small model around a syncer. Run by tests: python learner.py STEPS SLEEP_S [more settings as name=value]

Prints "begins", "step N LOSS M answers" now and then, and at the end "ended LOSS STAYED DIGEST". With until=FILE, it ends sooner when that file is there.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc


def counted(outside: Any) -> list[int]:
    """Has the fragments of whose pushes the answers were taken from now on."""
    found, client = list[int](), outside._client
    took = client.took

    def note(fragment: int, held: Any) -> None:
        found.append(fragment)
        took(fragment, held)

    client.took = note
    return found


def main() -> None:
    steps, sleep_s = int(sys.argv[1]), float(sys.argv[2])
    given = dict(text.partition("=")[::2] for text in sys.argv[3:])
    until = Path(given.pop("until", "/there/is/none"))
    more: dict[str, Any] = {name: int(text) if text.isdigit() else text for name, text in given.items()}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(steps)
    loss = torch.zeros(1)
    with psgc.Decoupled(model, inner, every=5, codec="int4", fragments=2, **more) as outside:
        answers = counted(outside)
        print("begins", flush=True)
        for step in range(1, steps + 1):
            if until.exists():
                break
            x = torch.randn(16, 12, generator=draw)
            outside.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
            loss.backward()
            outside.step()
            time.sleep(sleep_s)
            if step % 5 == 0:
                print(f"step {step} {loss.item():.3f} {len(answers)} answers", flush=True)
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())).hexdigest()[:12]
    print(f"ended {loss.item():.3f} {outside.stayed} {digest}", flush=True)


main()
