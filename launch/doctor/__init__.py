"""``psgc doctor --job``: each machine of a job collects facts about itself, the scheduler's machine compares them, and all machines get the findings."""
