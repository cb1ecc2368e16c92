"""Connections between members and the scheduler, and how a member finds out whether the scheduler is alive."""
