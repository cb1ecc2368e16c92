"""``auto``: chooses codec or plan of a running job from the job's own measurements. Pure."""
