"""Explains a plan: assessment, reasons, drawings, traces and the HTML report."""
