"""What a running job tells of itself: timelines of each member, and figures that members report."""
