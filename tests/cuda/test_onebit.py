"""`onebit` on the GPU, with both scales."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.against_cpu import Pair, values

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def test_it_has_the_bytes_of_the_cpu(device: torch.device) -> None:
    for number, text in enumerate(("onebit", "onebit:ef=0,scale=unit")):
        pair = Pair(text, device)
        pair.check_all(values(63, number, "zeros"), FLOATS[number:][:1])
        pair.check_all(values(4097 + 77 * number, number, "zeros"), FLOATS[number:][:1], payloads=2 + number)
    pair = Pair("onebit:ef=0", device)
    pair.check_encode(values(1, 1), torch.float16)
    pair.check_finish(values(1, 1), 3)


def test_blocks_that_overflow_or_are_not_finite_are_those_of_the_cpu(device: torch.device) -> None:
    for special in ("denormal", "huge", "nan", "inf", "nothing"):
        x = values(300, 2, special)
        Pair("onebit", device).check_encode(x, torch.float32, with_residual=special != "denormal")
        Pair("onebit:ef=0,scale=unit", device).check_encode(x, torch.float32)
        if special in ("huge", "nan"):
            Pair("onebit", device).check_finish(x, 1)


def test_eight_payloads_are_added_from_left_to_right(device: torch.device) -> None:
    for text in ("onebit", "onebit:ef=0,scale=unit"):
        pair = Pair(text, device)
        pair.check_fold([pair.cpu_payload(values(4200, seed)) for seed in range(8)], 4200)
        assert pair.check_serve(pair, [pair.cpu_payload(values(700, seed)) for seed in range(8)], 700, 8)


def test_programs_that_take_several_blocks_write_the_same_bytes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from psgc.cuda.signs import onebit  # imports triton, which may be missing where this test is skipped

    monkeypatch.setattr(onebit, "WIDE_FROM", 1)
    pair = Pair("onebit", device)
    for special in ("", "huge"):
        pair.check_encode(values(3 * 4096 + 5, 1, special), torch.bfloat16)
