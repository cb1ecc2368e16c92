"""``BytePSBasics``: the process's place in the job, as an object. BytePS loads a C library by the path that it is given; psgc has none."""

from __future__ import annotations

import psgc.torch as psgc


class BytePSBasics:
    """The functions of ``byteps.torch`` as methods. The constructor's arguments have no effect."""

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        del pkg_path, args

    def init(self, lazy: bool = True) -> None:
        psgc.init(lazy)

    def shutdown(self) -> None:
        psgc.shutdown()

    def suspend(self) -> None:
        psgc.suspend()

    def resume(self, num_workers: int, num_servers: int, global_rank: int, context: object = None) -> None:
        psgc.resume(num_workers, num_servers, global_rank, context)

    def size(self) -> int:
        return psgc.size()

    def local_size(self) -> int:
        return psgc.local_size()

    def rank(self) -> int:
        return psgc.rank()

    def local_rank(self) -> int:
        return psgc.local_rank()
