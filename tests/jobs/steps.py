"""A worker that runs steps and, where told, misbehaves at one of them. Run by tests; its arguments are the fault script."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import numpy as np
from array_buffer import ArrayBuffer

from psgc.config import Config
from psgc.errors import PsgcError
from psgc.layout import Declaration, TensorSpec
from psgc.worker.cluster import ClusterSession


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--numel", type=int, default=5000)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--pause-s", type=float, default=0.05)
    parser.add_argument("--die-at", type=int, default=0, help="kill -9 itself in that step, with the push under way")
    parser.add_argument("--leave-at", type=int, default=0, help="leave in order before that step")
    parser.add_argument("--stall-at", type=int, default=0, help="never come to that step")
    parser.add_argument("--hold-at", type=int, default=0, help="wait before that step until the file --go exists")
    parser.add_argument("--go")
    parser.add_argument("--nan-at", type=int, default=0, help="push a NaN in that step")
    parser.add_argument("--until", help="file that ends the job before the next step, once it exists")
    parser.add_argument("--check-sums", action="store_true", help="every rank pushes the step number; the mean must be that")
    options = parser.parse_args()
    session = None
    try:
        session = ClusterSession.open(Config.from_env())
        return steps(session, options)
    except PsgcError as error:
        print(f"psgc: {error}")
        return 1
    finally:  # as psgc.torch does at exit
        if session is not None:
            session.close()


def steps(session: ClusterSession, options: argparse.Namespace) -> int:
    spec = TensorSpec("layer.weight", (options.numel,), "float32")
    buffer = ArrayBuffer(np.zeros(options.numel, np.float32))
    declaration = Declaration("gradients", "adhoc", (spec,), options.codec, True)
    for step in range(1, options.steps + 1):
        if step == options.leave_at or (options.until and os.path.exists(options.until)):
            break
        if step == options.stall_at:
            time.sleep(1000)
        while step == options.hold_at and not os.path.exists(options.go):
            time.sleep(0.02)
        buffer.array[:] = step
        if step == options.nan_at:
            buffer.array[options.numel // 2] = np.nan
        ticket = session.submit_named(declaration, buffer)
        if step == options.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        session.wait([ticket])
        print(f"step {step}: nan {int(np.isnan(buffer.array).sum())} of {options.numel}, first {buffer.array[0]}", flush=True)
        if options.check_sums and not (buffer.array == step).all():
            print(f"WRONG at step {step}: {buffer.array[buffer.array != step][:3]}")
            return 1
        time.sleep(options.pause_s)
    print(f"ended {session.statistics()}")
    session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
