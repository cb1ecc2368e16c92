"""The residuals of error feedback: how they are kept between steps, saved and restored."""
