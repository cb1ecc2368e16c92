"""Real text that every machine with Python has: the standard library's source files, split into train and validation by file."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

LIMIT_BYTES = 6_000_000
VALIDATION_OF = 10  # every tenth file, by a hash of its name, is for validation


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """(train, validation) as uint8 [bytes]; the same on every rank, and on every machine with the same Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "tests", "__pycache__"} & set(p.relative_to(root).parts))
    split: dict[bool, bytearray] = {True: bytearray(), False: bytearray()}
    for path in files:
        name = path.relative_to(root).as_posix()
        held_out = hashlib.sha256(name.encode()).digest()[0] % VALIDATION_OF == 0
        if len(split[held_out]) < LIMIT_BYTES:
            split[held_out] += path.read_bytes()
    return torch.frombuffer(split[False], dtype=torch.uint8), torch.frombuffer(split[True], dtype=torch.uint8)


def batch_of(text: torch.Tensor, count: int, context: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, target), each int64 [count, context], from random places."""
    starts = torch.randint(len(text) - context - 1, (count,), generator=generator)
    rows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]
