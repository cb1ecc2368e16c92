"""``psgc doctor --job``: each machine of a job says what it is (facts), the scheduler's compares (compare), and all are told (meeting)."""
