"""Options as programs: the steps that each rank takes for one part, over groups of ranks, and what may start next. Pure."""
