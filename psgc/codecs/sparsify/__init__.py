"""Building blocks of codecs that send only some elements: which elements, how many, and the coding of their indices."""
