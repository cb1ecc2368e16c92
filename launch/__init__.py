"""The commands ``psgc`` and ``psgc-launch``, and what they start. The only package that reads argv and prints."""
