"""How times, sizes, buckets and options are written for people: in tables, traces and reports."""

from __future__ import annotations

from typing import Final

from psgc.plan.model.options import Option
from psgc.plan.model.plan import PlannedBucket

SHORT: Final = {
    "all_reduce": "ar", "reduce_scatter": "rs", "reduce": "red", "all_gather": "ag", "all_to_all": "a2a", "gather": "ga", "broadcast": "bc",
    "comp": "enc", "decomp": "dec",
}  # fmt: skip


def ms(us: float) -> str:
    """Microseconds as milliseconds, three digits or more: ``12.3``, ``1,234``."""
    value = us / 1e3
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    """``12%``; ``1.2%`` below 10."""
    return f"{share:.0%}" if abs(share) >= 0.0995 else f"{share:.1%}"


def longer(share: float) -> str:
    """A share of time in words: longer, or less below zero."""
    return f"{percent(abs(share))} {'longer' if share >= 0 else 'less'}"


def counted(number: int, thing: str) -> str:
    """``1 bucket``, ``2 buckets``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def gigabytes(nbytes: float) -> str:
    """``32.1 GB``, ``498 MB``."""
    return f"{nbytes / 1e9:,.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.3g} MB"


def elements(numel: float) -> str:
    """``850``, ``4.1K``, ``23.4M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if numel >= size:
            return f"{numel / size:.3g}{unit}"
    return f"{numel:g}"


def tensors_text(tensors: tuple[str, ...], most: int = 200) -> str:
    """The tensor, or ``first .. last (n)``, each name with ``most`` letters at most."""
    first, last = (_clipped(name, most) for name in (tensors[0], tensors[-1]))
    return first if len(tensors) == 1 else f"{first} .. {last} ({len(tensors)})"


def _clipped(name: str, most: int) -> str:
    """The last ``most`` letters of the name, which identify it better than the first."""
    return name if len(name) <= most else f"\u2026{name[1 - most :]}"


def option_text(option: Option) -> str:
    """The option with its operations abbreviated (``SHORT``): ``intra.rs enc@gpu inter.ag.c dec@gpu intra.ag``."""
    return " ".join(_short(action) for action in option)


def _short(action: str) -> str:
    if "@" in action:
        verb, _, device = action.partition("@")
        return f"{SHORT[verb]}@{device}"
    level, operation, *payload = action.split(".")
    return ".".join((level, SHORT.get(operation, operation), *payload))


def bucket_title(number: int, bucket: PlannedBucket) -> str:
    """The bucket's place in the plan and its tensors."""
    return f"{number}: {tensors_text(bucket.tensors)}"
