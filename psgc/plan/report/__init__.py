"""What is told of a plan: assessment, reasons, drawings, traces, the report."""
