"""The GPU side of codecs that send every element as a float: `none`, `bf16` and `fp16`."""
