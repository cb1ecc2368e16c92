"""Compiles options to programs: the steps that each rank runs for one part, over groups of ranks, and which steps may start next. Pure."""
