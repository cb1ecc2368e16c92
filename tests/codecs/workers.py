"""Some workers and a server that synchronise one part as the protocol does, but by plain calls."""

from __future__ import annotations

import numpy as np

from psgc.codecs import BucketContext, Scheme, SchemeState, Stream, parse_scheme
from psgc.codecs.codec import F32, Bytes
from psgc.codecs.relay import RelayCodec, join_payloads

RESCALE = 0.3


class Workers:
    """Some workers at a part. rescale: of the residuals, in every step."""

    def __init__(
        self, text: str, numel: int, workers: int, *, mean: bool = True, shapes: tuple[tuple[int, ...], ...] = (), rescale: float = RESCALE
    ) -> None:
        self.scheme: Scheme = parse_scheme(text, BucketContext("float32", workers, mean, shapes))
        self.numel, self.count, self.mean, self.rescale = numel, workers, mean, rescale
        self.states: list[SchemeState] = [self.scheme.new_state(numel) for _ in range(workers)]
        self.residuals = [np.zeros(numel, np.float32) if self.scheme.feedback else None for _ in range(workers)]
        self.sent: list[list[Bytes]] = []
        self.step = 0
        self.nonfinite = False  # whether the server flagged a round of the last step

    def stream(self, rank: int) -> Stream:
        return Stream(seed=3, step=self.step, rank=rank, bucket=1)

    def synchronise(self, grads: list[F32], skipping: tuple[int, ...] = ()) -> list[F32]:
        """One step; what each worker's gradient becomes. skipping: ranks that have no gradient, and still get the result."""
        self.step += 1
        self.nonfinite = False
        self.sent = [[] for _ in self.states]
        targets = [grad.copy() for grad in grads]
        rounds = self.scheme.rounds(self.numel)
        for index, round_ in enumerate(rounds):
            for rank, state in enumerate(self.states):
                if rank in skipping:
                    continue
                out = np.zeros(round_.pair.push.payload_bound(round_.numel), np.uint8)
                encoded = state.encode(index, targets[rank], self.residuals[rank], self.rescale, self.stream(rank), out)
                assert not encoded.nonfinite
                round_.pair.push.validate(out[: encoded.payload_bytes], round_.numel)
                self.sent[rank].append(out[: encoded.payload_bytes])
            answer = self.answer(index)
            for rank, state in enumerate(self.states):
                if index < len(rounds) - 1:
                    state.take(index, answer)
                else:
                    residual = None if rank in skipping else self.residuals[rank]
                    state.apply(answer, self.sent[rank], targets[rank], residual, self.rescale)
        return targets

    def answer(self, index: int) -> Bytes:
        round_ = self.scheme.rounds(self.numel)[index]
        push, pull = round_.pair.push, round_.pair.pull
        payloads = [sent[index] for sent in self.sent if sent]
        out = np.zeros(pull.payload_bound(round_.numel), np.uint8)
        if isinstance(pull, RelayCodec):
            return out[: join_payloads(payloads, out)]
        acc = np.zeros(round_.numel, push.acc_dtype)
        for first in range(0, len(payloads), 8):
            push.fold(payloads[first : first + 8], round_.numel, 0, round_.numel, acc, first == 0)
        divisor = self.count if self.mean and round_.divides else 1
        encoded = pull.finish(acc, round_.numel, 0, round_.numel, divisor, None, None, 1.0, self.stream(99), out)
        self.nonfinite |= encoded.nonfinite
        return out[: encoded.payload_bytes]


def conservation(job: Workers, grads: list[F32], before: list[F32], got: F32) -> float:
    """Largest difference between mean of what came in, and what came out plus what was kept."""
    came_in = np.mean([g.astype(np.float64) + np.float64(np.float32(job.rescale)) * r for g, r in zip(grads, before, strict=True)], axis=0)
    kept = np.mean([r.astype(np.float64) for r in job.residuals if r is not None], axis=0)
    return float(np.abs(came_in - got - kept).max())
