"""The verbs of ``psgc``: one file a verb, with its flags and what it prints. ``launch/cli.py`` has the table of them."""
