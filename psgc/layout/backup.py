"""Which layouts can have steps that do not wait for every rank (PSGC_BACKUP_WORKERS). Pure."""

from __future__ import annotations

from typing import Final

from psgc.codecs import CodecPair
from psgc.codecs.relay import RelayCodec
from psgc.errors import ConfigError, UsageError
from psgc.layout.records import Layout

NAME: Final = "PSGC_BACKUP_WORKERS"


def check_backup(layout: Layout) -> None:
    """Raise UsageError, or ConfigError for their number, for a layout whose steps cannot be closed without ``layout.backup`` ranks."""
    if not layout.backup:
        return
    asked = f"{NAME}={layout.backup}"
    check_count(layout.backup, layout.workers)
    if any(bucket.over_groups for bucket in layout.buckets):
        raise UsageError(
            f"{asked}: {layout.name!r} has options over groups of ranks, whose collectives await every rank; use a plan in which every rank pushes to servers, "
            f"or unset it"
        )
    if layout.members or any(bucket.members for bucket in layout.buckets):
        raise UsageError(f"{asked}: {layout.name!r} is of some of the job's ranks; unset it")
    for bucket, part in {bucket.codec: (bucket, part) for bucket, part in layout.parts()}.values():
        rounds = layout.scheme(bucket).rounds(part.numel)
        why = "takes several rounds, which belong to one step" if len(rounds) > 1 else _refusal(rounds[0].pair)
        if why:
            raise UsageError(f"{asked}: codec {bucket.codec} of {layout.name!r} {why}; use none, bf16, int8, onebit or topk, or unset it")


def check_count(backup: int, workers: int, counted: str = "") -> None:
    """Raise ConfigError if a step would wait for nobody. counted: how the workers were counted, where that may be wrong."""
    if backup >= workers:
        raise ConfigError(
            f"{NAME}={backup}, but the job has {workers} worker{'s' * (workers > 1)}{counted and f' ({counted})'}: a step waits for at least one; expected "
            f"less than {workers}"
        )


def _refusal(pair: CodecPair) -> str:
    """Why payloads of one step cannot be added to the next one's sum; "" if they can."""
    if isinstance(pair.pull, RelayCodec):
        return "has workers add up what servers forward"
    if pair.adder is not None or pair.pull.of_sums:
        return "draws the same random places on all ranks, anew in each step"
    if pair.push.feedback and not pair.pull.feedback:
        return "has workers take back what a step that was not applied had of them, and servers cannot say which step that was"
    return ""
