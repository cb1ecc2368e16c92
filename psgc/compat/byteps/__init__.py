"""psgc under BytePS's name: ``import byteps.torch as bps``. PyTorch only; TensorFlow's and MXNet's modules do not exist here.

Reached by PYTHONPATH, as `psgc run --as-byteps` sets it, or installed as the package ``psgc-byteps``, which is refused beside BytePS itself.
"""

import sys
from pathlib import Path

from psgc import __version__ as psgc_version  # noqa: F401 - for scripts that ask

__version__ = "0.2.5"  # BytePS's last, whose interface this is: scripts compare it

if Path(__file__).parts[-4:-2] != ("psgc", "compat"):  # installed: nobody has asked for psgc by a flag
    from psgc.compat.byteps.conflict import refusal

    if why := refusal(sys.path):
        raise ImportError(why)
