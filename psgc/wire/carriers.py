"""The table of carriers that push to servers and pull from them. To add one, write its session and add its row.

It has names only, so that reading a setting loads no carrier; ``worker/connect.py`` loads one when it is used.
"""

from __future__ import annotations

from typing import Final

# Value of PSGC_WIRE -> the module that has the carrier's session (``psgc.worker.session``), as SESSION, whose ``open`` joins the job.
MODULES: Final[dict[str, str]] = {
    "psgc": "psgc.worker.cluster",
    "pslite": "psgc.worker.pslite.session",
}
