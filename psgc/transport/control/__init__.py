"""Connections between members and the scheduler, and what a member can tell of the scheduler's life."""
