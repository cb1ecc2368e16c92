"""``BytePSBasics``: the process's place in the job, as an object. BytePS loads a C library by the path that it is given; psgc has none."""

from __future__ import annotations

import os
import sysconfig

import psgc.torch as psgc


def get_ext_suffix() -> str:
    """How the names of Python's binary extensions end here."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Where BytePS would have its binary extension ``args`` of the package whose file is ``pkg_path``. psgc has none."""
    return os.path.join(os.path.dirname(pkg_path), *args[:-1], args[-1] + get_ext_suffix())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError for another framework's extension than PyTorch's, which needs none here."""
    del ext_env_var, pkg_path, args
    if "torch" not in ext_name:
        raise ImportError(f"{ext_name} is not there: psgc, under BytePS's name, is for PyTorch alone")


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
