"""What every launcher refuses before it starts anything, so that a mistake is one line and no failure of processes that run.

``Config`` refuses settings that contradict each other. Here is what follows from the job besides: how many workers it has, on which machines its servers
are, what its command is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from psgc.config import Config
from psgc.errors import CodecError, ConfigError, UsageError
from psgc.launch.job.interpreter import check_spares


def check_job(
    config: Config, *, workers: int = 0, counted: str = "", shares: Mapping[str, int] | None = None, command: Sequence[str] = (), spares: int = 0
) -> None:  # fmt: skip
    """Raise ConfigError, CodecError or UsageError for what this job cannot have. config: of any of its processes. workers: of the whole job; 0: that is not
    known here. counted: how they were counted, where that may be wrong. shares: servers of each machine, by its name, as far as machines are known. command:
    of its workers, and spares: how many processes are to wait for their places on a machine."""
    config.require_cluster()
    if config.backup_workers and workers:
        from psgc.layout.backup import check_count

        check_count(config.backup_workers, workers, counted)
    if config.replicas:
        for machine, share in (shares or {}).items():
            _check_share(config, machine, share)
    if config.wire == "psgc":
        canonical(config.codec_given, config.servers)
    check_spares(command, spares, config.on_worker_loss)


def check_trace(config: Config) -> None:
    """Make the folder of timelines, before anything starts. Raises ConfigError if it cannot be made."""
    if folder := config.trace_folder:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder of timelines {folder} cannot be made: {error.strerror}; set PSGC_TRACE or BYTEPS_TRACE_DIR"
            ) from None


def canonical(codec: str, servers: int) -> str:
    """The canonical form of a codec's text; "" for none. Raises CodecError if it is none, or needs servers in a job without."""
    if not codec:
        return ""
    from psgc.codecs import parse_scheme
    from psgc.layout.collective import needs_servers, refusal

    scheme = parse_scheme(codec)
    if not servers and needs_servers(scheme):
        raise CodecError(refusal(scheme))
    return scheme.canonical


def check_codec_or_plan(verb: str, codec: str | None, plan: object) -> None:
    """Raise UsageError if a verb's flags name both."""
    if codec and plan:
        raise UsageError(f"{verb}: --codec {codec} and --plan {plan}: a plan names each bucket's codec; leave one of them out")


def _check_share(config: Config, machine: str, share: int) -> None:
    """Each server's standby is on another server's machine, and a machine has as many standbys as servers."""
    if 2 * share > config.servers:
        raise ConfigError(
            f"PSGC_REPLICAS=1, but {share} of {config.servers} servers are on {machine}: what they keep cannot all be kept elsewhere; have at most half of "
            f"the servers on one machine, or leave it at 0"
        )
