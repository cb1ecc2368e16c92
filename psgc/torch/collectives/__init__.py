"""Collectives between the workers of a job, without servers: the groups of psgc.program.groups, by the carriers that carriers.py lists."""
