"""What quantizing codecs are made of: blocks that share a scale, and how their elements become codes."""
