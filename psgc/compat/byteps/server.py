"""A server or a scheduler, by DMLC_ROLE: importing this module serves until the job ends, as BytePS's launcher relies on.

Unlike there, a job that fails ends the interpreter with a status that is not 0."""

import sys

from psgc.config import Config
from psgc.launch.job.role import run_role

if status := run_role("scheduler" if Config.from_env().role == "scheduler" else "server"):
    sys.exit(status)
