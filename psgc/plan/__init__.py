"""Plans: which buckets, which codec, which way through groups and servers, and whether compression pays at all. All of it pure.

``options`` has the ways that one bucket can go, ``utility`` the closed model of what compression can gain.
"""
