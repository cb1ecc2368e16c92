"""A worker that pushes changing tensors of odd sizes back to back and holds every result against the published tree, bit for bit.

Run by tests under ``psgc run``. Knows sessions and NumPy only, so that it starts fast; exits 1 at the first wrong element.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
import zlib
from typing import Any

import numpy as np
from array_buffer import ArrayBuffer
from pace import wait_for_readers

from psgc.codecs import BucketContext, Codec, Stream, parse_pair, parse_scheme
from psgc.codecs.codec import DTYPES
from psgc.config import Config
from psgc.layout import Declaration, TensorSpec
from psgc.worker.cluster import ClusterSession

SIZES = (1, 7, 63, 4097, 70001)
SERVER_RANK = 0xFFFFFFFF


def gradient(step: int, rank: int, tensor: int, numel: int, dtype: str) -> Any:
    """What ``rank`` contributes: different at every step, rank and tensor. A cut of a pool, which is drawn once."""
    values = pool(dtype)
    begin = zlib.crc32(f"{step} {rank} {tensor}".encode()) % (values.size - numel)
    return values[begin : begin + numel].copy()


@functools.cache
def pool(dtype: str) -> Any:
    rng, numel = np.random.default_rng(0), 1 << 20
    if dtype == "bool":
        return rng.random(numel) < 0.3
    if dtype == "bfloat16":
        return (rng.standard_normal(numel, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    kind = np.dtype(DTYPES[dtype])
    if kind.kind == "f":
        return rng.standard_normal(numel, np.float64 if dtype == "float64" else np.float32).astype(kind, copy=False)
    info = np.iinfo(kind)
    return rng.integers(info.min, info.max, numel, kind, endpoint=True)


def tree_sum(terms: list[Any], acc_dtype: Any) -> Any:
    """Left to right in blocks of 8 ranks, then the blocks left to right."""
    blocks = []
    for start in range(0, len(terms), 8):
        block = terms[start].astype(acc_dtype)
        for term in terms[start + 1 : start + 8]:
            block = block + term.astype(acc_dtype)
        blocks.append(block)
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total


def widen(values: Any, dtype: str) -> Any:
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values


def narrow(total: Any, dtype: str) -> Any:
    """The accumulator cast back to the tensor's dtype: round to nearest even, integers wrap."""
    if dtype == "bfloat16":
        bits = total.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if dtype == "bool":
        return total != 0
    return total.astype(DTYPES[dtype])


def plain(step: int, tensor: int, numel: int, dtype: str, size: int, mean: bool) -> Any:
    """The expected aggregate without compression."""
    acc = {"f": np.float64 if dtype == "float64" else np.float32}.get(np.dtype(DTYPES[dtype]).kind, np.int64)
    if dtype == "bfloat16":
        acc = np.float32
    total = tree_sum([widen(gradient(step, r, tensor, numel, dtype), dtype) for r in range(size)], acc)
    if mean:
        total = total / acc(size) if np.dtype(acc).kind == "f" else total // size
    return narrow(total, dtype)


class Compressed:
    """The two-sided algebra written out once more, rank by rank, for one tensor (float32, one part)."""

    def __init__(self, codec: str, tensor: int, numel: int, size: int, mean: bool) -> None:
        push, _, pull = codec.partition("/")
        self.pair = parse_pair(f"{push}/none" if pull == "relay" else codec)  # what is relayed reaches the workers as it is
        self.tensor, self.numel, self.size, self.layout = tensor, numel, size, layout_number(codec, tensor)
        self.divisor = np.float32(size if mean else 1)
        self.residuals = [np.zeros(numel, np.float32) for _ in range(size)]
        self.server = np.zeros(numel, np.float32)

    def step(self, step: int) -> Any:
        sent = []
        for rank in range(self.size):
            p = gradient(step, rank, self.tensor, self.numel, "float32")
            p = p + self.residuals[rank] if self.pair.push.feedback else p
            m = self._through(self.pair.push, p, step, rank)
            self.residuals[rank] = p - m
            sent.append(m)
        q = tree_sum(sent, np.float32) / self.divisor
        q = q + self.server if self.pair.pull.feedback else q
        d = self._through(self.pair.pull, q, step, SERVER_RANK)
        self.server = q - d
        return d

    def _through(self, codec: Codec, p: Any, step: int, rank: int) -> Any:
        out = np.zeros(codec.payload_bound(self.numel), np.uint8)
        encoded = codec.encode(p, None, 1.0, Stream(0, step, rank, 0, layout=self.layout), out)
        decoded = np.empty(self.numel, np.float32)
        codec.decode(out[: encoded.payload_bytes], self.numel, 0, self.numel, decoded)
        return decoded


class Shared:
    """Integers in shared scales, for all ranks at once."""

    def __init__(self, codec: str, tensor: int, numel: int, size: int, mean: bool) -> None:
        self.tensor, self.numel, self.divisor, self.layout = tensor, numel, size if mean else 1, layout_number(codec, tensor)
        self.ranks = range(size)
        self.residuals = [np.zeros(numel, np.float32) for _ in self.ranks] if codec == "shared" else None

    def step(self, step: int) -> Any:
        grads = [gradient(step, rank, self.tensor, self.numel, "float32") for rank in self.ranks]
        streams = [Stream(0, step, rank, 0, layout=self.layout) for rank in self.ranks]
        from psgc.codecs.shared import reference_step  # loads kernels that other codecs do without

        aggregate, kept = reference_step(grads, self.residuals, 1.0, streams, self.divisor)
        self.residuals = kept or None
        return aggregate


class Differences:
    """EF21, rank by rank: compressed differences from each rank's estimate, and the mean of the estimates."""

    def __init__(self, codec: str, tensor: int, numel: int, size: int, mean: bool) -> None:
        k = codec.partition("k=")[2]
        self.inner = Compressed(f"topk:ef=0,k={k}/none", tensor, numel, size, mean)
        self.inner.layout = layout_number(codec, tensor)
        self.estimates, self.aggregate = [np.zeros(numel, np.float32) for _ in range(size)], np.zeros(numel, np.float32)

    def step(self, step: int) -> Any:
        inner, sent = self.inner, []
        for rank, estimate in enumerate(self.estimates):
            grad = gradient(step, rank, inner.tensor, inner.numel, "float32")
            sent.append(inner._through(inner.pair.push, grad - estimate, step, rank))
            self.estimates[rank] = estimate + sent[-1]
        self.aggregate = self.aggregate + tree_sum(sent, np.float32) / inner.divisor
        return self.aggregate


def tensor_name(codec: str, tensor: int, dtype: str) -> str:
    return f"{codec}.t{tensor}.{dtype}"


def layout_number(codec: str, tensor: int) -> int:
    """The place in random streams of the layout that a tensor by itself is."""
    return zlib.crc32(tensor_name(codec, tensor, "float32").encode())


def compare(session: ClusterSession, codec: str, options: argparse.Namespace, chaos: random.Random, before: int) -> int:
    """Run the steps with one codec, after so many with others; how many results were wrong."""
    names = [(index, numel, dtype) for dtype in options.dtypes.split(",") for index, numel in enumerate(SIZES)]
    mean = not options.sum
    buffers = {
        (index, dtype): ArrayBuffer(np.zeros(numel, parse_scheme(codec, BucketContext(dtype)).array_dtype)) for index, numel, dtype in names
    }
    model = Shared if codec.startswith("shared") else Differences if codec.startswith("ef21") else Compressed
    models = {index: model(codec, index, numel, session.size, mean) for index, numel, _ in names}
    wrong = 0
    for step in range(1, options.steps + 1):
        wait_for_readers(before + step)
        order = list(names)
        chaos.shuffle(order)
        if options.delay_ms:
            time.sleep(chaos.random() * options.delay_ms / 1000)
        tickets = []
        for index, numel, dtype in order:
            buffers[index, dtype].array[:] = gradient(step, session.rank, index, numel, dtype)
            spec = TensorSpec(tensor_name(codec, index, dtype), (numel,), dtype)
            declaration = Declaration(spec.name, "adhoc", (spec,), codec, mean)
            tickets.append(session.submit_named(declaration, buffers[index, dtype]))
        session.wait(tickets)
        for index, numel, dtype in names:
            want = plain(step, index, numel, dtype, session.size, mean) if codec == "none" else models[index].step(step)
            wrong += differ(buffers[index, dtype].array, want, f"{codec} step {step} tensor {index} {dtype}")
        if options.say:
            print(f"step {step}", flush=True)
    return wrong


def differ(got: Any, want: Any, what: str) -> bool:
    """Whether a result is not to the bit what it should be; if so, it is said."""
    if got.tobytes() == want.tobytes():
        return False
    bad = int((got.view(np.uint8) != want.view(np.uint8)).argmax()) // got.itemsize
    print(f"WRONG {what} element {bad}: got {got[bad]}, want {want[bad]}", file=sys.stderr)
    return True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--codec", nargs="+", default=["none"], help="several are run one after the other")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--sum", action="store_true", help="the sum, not the mean")
    parser.add_argument("--say", action="store_true", help="each step's number, once it is over")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="each worker sleeps up to so long before a step")
    options = parser.parse_args()
    session = ClusterSession.open(Config.from_env())
    if not session.config.servers:
        from psgc.torch.collectives.groups import job_groups

        session.groups_of = functools.partial(job_groups, session)
    chaos = random.Random(session.rank)
    wrong = 0
    for number, codec in enumerate(options.codec):
        found = compare(session, codec, options, chaos, number * options.steps)
        print(f"rank {session.rank}: {codec}: {options.steps} steps, {found} wrong, {session.statistics()}", flush=True)
        wrong += found
    session.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
