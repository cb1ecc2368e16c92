"""Observation of a running job: timelines of its members, and figures that members report."""
