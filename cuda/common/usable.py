"""Whether Triton can run kernels on this machine's GPUs. Before it compiles one, it builds a module of its own, which takes a C compiler and Python's headers.

Owns the question and what a user is told. Imports triton when it is asked.
"""

from __future__ import annotations

import functools
import subprocess
from typing import Final

LEAST: Final = (3, 6)  # older ones lack what the kernels are written in, or have not been tried


@functools.cache
def why_not() -> str:
    """Why kernels cannot run here, in one line; empty if they can. Asked with a GPU; the first time on a machine takes seconds."""
    try:
        import triton
        from triton.runtime import driver

        if tuple(int(part) for part in triton.__version__.split(".")[:2]) < LEAST:
            return f"triton is {triton.__version__}; {'.'.join(map(str, LEAST))} or newer expected: install a newer torch"
        driver.active.get_current_target()  # builds the module
    except ImportError as error:
        return f"triton cannot be imported ({error}): pip install triton"
    except subprocess.CalledProcessError as error:
        return f"triton's C compiler failed ({' '.join(map(str, error.cmd[:1]))}, status {error.returncode}): install Python's headers, as python3-dev"
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        missing = ": install gcc, or name a C compiler in CC" if "C compiler" in said else ""
        return f"triton cannot be used ({type(error).__name__}: {said}){missing}"
    return ""
