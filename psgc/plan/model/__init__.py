"""The model of plans and their costs: options, costs, the timeline of a step, problems and plans. Does not choose plans."""
