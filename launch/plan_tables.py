"""A plan as tables on a terminal: its buckets, its step beside others', the bound, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psgc.launch.tables import print_table, print_text
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.report.assessment import Assessment
from psgc.plan.report.incomparable import incomparable
from psgc.plan.report.sentences import about_held_back, about_memory, about_quality, about_running, from_best, verdict, verified
from psgc.plan.report.wording import SHORT, elements, longer, ms, option_text, tensors_text

MOST_ROWS: Final = 40
MOST_LETTERS: Final = 28  # of a tensor's name: two lines a bucket on a terminal of 80 columns


def print_plan(assessed: Assessment) -> None:
    """Print the buckets, the comparison with other methods, the notes and the verdict."""
    _print_buckets(assessed.found.buckets)
    _print_methods(assessed)
    for note in assessed.job.notes:
        print_text(note, "note: ")
    found = assessed.found
    print_text(f"chosen in {ms(found.select_us)} ms from {found.options_considered} options a bucket; {from_best(assessed)}")
    for line in (
        *about_quality(assessed),
        *about_memory(found.buckets),
        about_running(assessed),
        *about_held_back(assessed),
        verified(assessed.problem),
        verdict(assessed),
    ):
        print_text(line)


def _print_buckets(buckets: Sequence[PlannedBucket]) -> None:
    """The buckets in the plan's order; only the largest if there are more than MOST_ROWS."""
    shown = sorted(sorted(range(len(buckets)), key=lambda number: -buckets[number].numel)[:MOST_ROWS])
    rows = [_row(number, buckets[number]) for number in shown]
    print_table(["", "tensors", "elements", "parts", "codec", "option"], rows)
    if len(shown) < len(buckets):
        print(f"and {len(buckets) - len(shown)} smaller buckets")
    words = {word: short for word, short in SHORT.items() if any(_stands(short, row[-1]) for row in rows)}
    print(", ".join(f"{short} {word}" for word, short in words.items()))


def _row(number: int, bucket: PlannedBucket) -> list[str]:
    tensors = tensors_text(bucket.tensors, MOST_LETTERS)
    return [str(number), tensors, elements(bucket.numel), str(bucket.parts), bucket.codec, option_text(bucket.option)]


def _stands(short: str, option: str) -> bool:
    return short in option.replace("@", " ").replace(".", " ").split()


def _print_methods(assessed: Assessment) -> None:
    """The step time of each method's plan, the shortest first, and how this plan compares."""
    step, rows = assessed.found.step_us, []
    for name, us in sorted(assessed.steps_us.items(), key=lambda item: item[1]):
        rows.append([name, ms(us), "" if name == assessed.method or not us else longer(step / us - 1)])
    print_table(["plan by", "step, ms", "this plan takes"], rows)
    for line in incomparable(assessed.rivals):
        print_text(line)
