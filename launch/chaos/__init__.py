"""``psgc chaos``: kills, stops, cuts and slows members of a job by a seeded schedule, and checks what the policies promise."""
