"""Whether compression pays: closed forms and what-if studies over plans."""
