"""What psgc's own codecs save and lose at their default parameters: see ``catalogue.Figures``.

Measured by ``python -m psgc.launch.pages.codecs --figures``, which rewrites this file; a test measures them again.
"""

from __future__ import annotations

from typing import Final

FIGURES: Final[dict[str, tuple[float, float, float]]] = {
    "none": (4194304, 0.0, 0.0),
    "bf16": (2097152, 2.76e-06, 2.79e-06),
    "fp16": (2097152, 4.32e-08, 4.3e-08),
    "int8": (1064960, 4.82e-05, 0.000299),
    "onebit": (132096, 0.363, 0.591),
    "topk": (54515, 0.915, 0.648),
    "int4": (557056, 0.0137, 0.0509),
    "fp8": (1064960, 0.000683, 0.000541),
    "dithering": (540672, 0.0318, 0.17),
    "blocktopk": (42032, 0.987, 0.943),
    "randomk": (41952, 0.99, 0.99),
    "tbq": (278528, 0.349, 0.575),
    "shared": (1589248.0, 4.82e-05, 0.000299),
    "powersgd": (32768.0, 0.992, 0.992),
    "topk2bit": (23504, 0.881, 0.652),
    "dct64": (42992, 0.931, 0.931),
    "sparseloco": (23508.0, 0.881, 0.652),
    "demo": (42996.0, 0.931, 0.931),
}
