"""Tests of operations in the shape of BytePS's own: each has a job of its own in this process, whose scheduler and server a decorator starts by bpslaunch."""

import copy
import itertools
import os
import subprocess
import sys
import threading
import unittest

import byteps.torch as bps
import torch


class MetaTest(type):
    BASE_ENV = {  # noqa: RUF012
        "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1234", "BYTEPS_MIN_COMPRESS_BYTES": "0",
        "OMP_NUM_THREADS": "1", "BYTEPS_FORCE_DISTRIBUTED": "1", "BYTEPS_PARTITION_BYTES": "2147483647",
    }  # fmt: skip
    BASE_ENV.update(os.environ)
    SCHEDULER_ENV = copy.copy(BASE_ENV)
    SCHEDULER_ENV.update(DMLC_ROLE="scheduler")
    SERVER_ENV = copy.copy(BASE_ENV)
    SERVER_ENV.update(DMLC_ROLE="server")

    def __new__(cls, name, bases, members):
        for key, value in members.items():
            if key.startswith("test_") and callable(value):
                members[key] = cls.launch_bps(value)
        os.environ.update(cls.BASE_ENV)
        os.environ.update(NVIDIA_VISIBLE_DEVICES="0", DMLC_WORKER_ID="0", DMLC_ROLE="worker", BYTEPS_LOCAL_RANK="0", BYTEPS_LOCAL_SIZE="1")
        return type(name, bases, members)

    @classmethod
    def launch_bps(cls, func):
        def wrapper(*args, **kwargs):
            def run(env):
                subprocess.check_call(args=["bpslaunch"], shell=True, stdout=sys.stdout, stderr=sys.stderr, env=env)

            scheduler = threading.Thread(target=run, args=(cls.SCHEDULER_ENV,), daemon=True)
            server = threading.Thread(target=run, args=(cls.SERVER_ENV,), daemon=True)
            scheduler.start()
            server.start()
            bps.init()
            func(*args, **kwargs)
            bps.shutdown()
            scheduler.join()
            server.join()
            print("bps shutdown", flush=True)

        return wrapper


class TorchTest(unittest.TestCase, metaclass=MetaTest):
    def test_push_pull(self):
        for count, (dtype, dim) in enumerate(itertools.product([torch.float16, torch.float32, torch.float64], [1, 2, 3])):
            tensor = torch.randn((17,) * dim).type(dtype)
            before = tensor.clone()
            bps.declare(f"tensor_{count}")
            bps.synchronize(bps.byteps_push_pull(tensor, name=f"tensor_{count}"))
            assert torch.equal(before, tensor)

    def test_a_temporary_tensor(self):
        for _ in range(3):
            values = torch.randn(2)
            assert torch.equal(bps.synchronize(bps.byteps_push_pull(values.clone(), name="tmp")), values)

    def test_initialised_already(self):
        bps.init()
        assert (bps.rank(), bps.size()) == (0, 1)


if __name__ == "__main__":
    unittest.main()
