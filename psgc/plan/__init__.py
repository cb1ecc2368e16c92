"""Plans: which buckets, which codec, over which groups and servers, and whether compression pays at all. All of it pure.

``inputs`` are jobs and clusters, ``model`` says what options there are and what they cost, ``methods`` choose, ``report`` tells, ``whatif`` asks.
Each folder imports from those before it only.
"""
