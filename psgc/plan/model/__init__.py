"""What a plan is and what it costs: options, costs, the timeline of a step, problems and plans. Knows no method of choosing."""
