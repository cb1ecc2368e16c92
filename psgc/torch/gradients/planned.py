"""The files of a planned job: the plan that an optimizer's gradients travel by (PSGC_PLAN), and the layout they got (PSGC_LAYOUT_OUT).

Each rank reads its own copy of the plan; the scheduler checks that all are the same.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from psgc.config import Config
from psgc.errors import UsageError
from psgc.layout import Layout
from psgc.plan.model.plan import Plan
from psgc.plan.planfile.runtime import load_runnable, plan_of
from psgc.torch.tensors.codec_text import codec_text

logger = logging.getLogger(__name__)


def configured_plan(config: Config, compression: str | None) -> Plan | None:
    """The plan that the job was started with. Raises UsageError for one that cannot be run, or beside a codec that the script names."""
    if not config.plan:
        return None
    if codec_text(compression, "float32") != "none":
        raise UsageError(f"compression is {compression!r}, but PSGC_PLAN={config.plan} names each bucket's codec; leave one of the two out")
    return load_runnable(config.plan)


def write_layout(path: str, layout: Layout) -> None:
    """The layout as a plan, in a file. Raises UsageError where it cannot be written."""
    try:
        Path(path).write_text(json.dumps(plan_of(layout).to_json(), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"PSGC_LAYOUT_OUT={path}: {error.strerror}") from None
    logger.info("layout written path=%s buckets=%d", path, len(layout.buckets))
