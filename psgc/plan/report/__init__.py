"""A plan explained: assessment, reasons, drawings, traces, the report."""
