"""What users read: where in their script something happened, misspelt names, compilation, reports to the launcher, the machine in one line."""
