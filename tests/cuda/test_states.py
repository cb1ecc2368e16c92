"""Schemes of state on the GPU: payloads, results, residuals and what is saved, held against the CPU's bits over several steps."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from psgc.codecs import BucketContext, parse_scheme
from psgc.codecs.backends import cuda_state
from psgc.codecs.codec import Bytes
from psgc.errors import PayloadError
from tests.codecs.conftest import code_of_page
from tests.codecs.workers import Workers
from tests.cuda.against_cpu import assert_same, bits, narrowed, payload_tensor, status, tensor, values


class Mirrored(Workers):
    """A job on the CPU, each of whose workers has a state on the device that gets the same gradients and answers."""

    def __init__(self, text: str, numel: int, device: torch.device, dtype: torch.dtype = torch.float32, **arguments: Any) -> None:
        super().__init__(text, numel, 2, **arguments)
        self.device, self.dtype = device, dtype
        self.mirrors = [cuda_state(self.scheme, numel, device) for _ in range(2)]
        assert all(mirror is not None for mirror in self.mirrors), text
        self.kept = [None if residual is None else tensor(residual, device) for residual in self.residuals]
        self.answers: list[Bytes] = []

    def answer(self, index: int) -> Bytes:
        self.answers.append(super().answer(index))
        return self.answers[-1]

    def check_step(self, *seeds: int, skipping: tuple[int, ...] = ()) -> None:
        """One step with gradients of these seeds, on both."""
        grads = [tensor(values(self.numel, seed), self.device, self.dtype) for seed in seeds]
        before = [None if kept is None else kept.clone() for kept in self.kept]
        self.answers = []
        targets = self.synchronise([grad.cpu().float().numpy() for grad in grads], skipping)
        for rank, target in enumerate(grads):
            self._replay(rank, target, before[rank], rank in skipping)
            assert_same(bits(target), narrowed(targets[rank], self.dtype), f"{self.scheme.canonical}, step {self.step}: result")
            if before[rank] is not None:
                assert_same(
                    bits(self.kept[rank]), self.residuals[rank].view(np.uint32), f"{self.scheme.canonical}, step {self.step}: residual"
                )

    def _replay(self, rank: int, target: torch.Tensor, residual: torch.Tensor | None, skips: bool) -> None:
        mirror, sent = self.mirrors[rank], []
        size = mirror.scratch_bytes()
        scratch = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        for index, round_ in enumerate(mirror.rounds):
            if not skips:
                bound, wanted = round_.pair.push.payload_bound(round_.numel), self.sent[rank][index]
                out, state = torch.full((max(16, bound),), 0xA5, dtype=torch.uint8, device=self.device), status(self.device)
                mirror.encode(index, target, residual, self.rescale, self.stream(rank), out, state, scratch)
                assert state.tolist() == [0, wanted.size]
                sent.append(out[: wanted.size])
                assert_same(sent[-1].cpu().numpy(), wanted, f"{self.scheme.canonical}, step {self.step}: payload {index}")
            if index < len(mirror.rounds) - 1:
                mirror.take(index, payload_tensor(self.answers[index], self.device))
        pieces = [payload_tensor(piece, self.device) for piece in mirror.pieces(self.answers[-1])]
        mirror.apply(pieces, sent, target, None if skips else residual, self.rescale)
        self.kept[rank] = residual
        self.last = sent

    def check_add_back(self) -> None:
        """The last rank's last step is thrown away."""
        self.states[1].add_back(self.sent[1], self.residuals[1])
        self.mirrors[1].add_back(self.last, self.kept[1])
        assert_same(bits(self.kept[1]), self.residuals[1].view(np.uint32), f"{self.scheme.canonical}: residual with what was sent")

    def check_saved(self) -> None:
        """What is saved of each rank; and a new state that restores it saves the same."""
        for here, there in zip(self.states, self.mirrors, strict=True):
            wanted, found = here.saved, there.saved
            assert (wanted is None) == (found is None)
            if wanted is not None:
                assert_same(bits(found), np.asarray(wanted, np.float32).view(np.uint32), f"{self.scheme.canonical}: saved")
                again = cuda_state(self.scheme, self.numel, self.device)
                again.restore(found)
                assert torch.equal(again.saved, found)


@pytest.mark.parametrize(
    "text",
    [
        "int8", "int4/none", "randomk:ef=0", "int8/relay", "int8:momentum=nesterov", "int8:momentum=nesterov,mu=0,clip=3",
        "randomk:k=0.1,momentum=dgc,clip=90", "topk:k=0.1,momentum=dgc/relay", "int8:clip=90", "shared", "shared:ef=0",
    ],
)  # fmt: skip
def test_steps_of_two_workers_have_the_bits_of_the_cpu(device: torch.device, text: str) -> None:
    for numel, dtype in ((1, torch.float32), (4200 if "clip" in text else 500, torch.bfloat16)):  # a norm of two leaves
        job = Mirrored(text, numel, device, dtype, rescale=0.7)
        job.check_saved()
        job.check_step(1, 2)
        job.check_step(3, 4, skipping=(0,))
        job.check_step(5, 6)
        job.check_saved()
        if job.scheme.feedback:
            job.check_add_back()


def test_ef21_of_the_manual_has_the_bits_of_the_cpu(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ef21_scheme.py").write_text(code_of_page("ef21_scheme.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    scheme = importlib.import_module("ef21_scheme").Ef21Scheme
    monkeypatch.setattr("tests.codecs.workers.parse_scheme", lambda text, context: scheme(context, k=0.1))
    job = Mirrored("ef21", 600, device, rescale=0.5)
    for step in range(3):
        job.check_step(2 * step, 2 * step + 1, skipping=(0,) if step == 1 else ())
        job.check_saved()
    job.check_add_back()
    del sys.modules["ef21_scheme"]


def test_a_gradient_that_is_not_finite_is_flagged(device: torch.device) -> None:
    for text in ("shared", "int8:momentum=nesterov,clip=3", "topk:k=0.1,momentum=dgc"):
        there = cuda_state(parse_scheme(text, BucketContext("float32", 2)), 300, device)
        for special in ("nan", "inf"):
            out, state = torch.zeros(4096, dtype=torch.uint8, device=device), status(device)
            scratch = torch.empty(max(16, there.scratch_bytes()), dtype=torch.uint8, device=device)
            there.encode(0, tensor(values(300, 1, special), device), None, 1.0, Workers("none", 1, 1).stream(0), out, state, scratch)
            assert state[0] == 1, text


def test_an_answer_of_a_wrong_length_is_refused_before_it_goes_to_the_device(device: torch.device) -> None:
    for text in ("int8", "shared", "onebit/relay", "int8:momentum=nesterov"):
        there = cuda_state(parse_scheme(text, BucketContext("float32", 2)), 300, device)
        with pytest.raises(PayloadError):
            there.pieces(np.zeros(7, np.uint8))
