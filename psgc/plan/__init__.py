"""Plans: how tensors are fused into buckets, which codec and which groups or servers each bucket uses, and whether compression pays. All of it is pure.

``inputs`` reads jobs and clusters, ``model`` lists the options and their costs, ``methods`` choose a plan, ``report`` presents it, ``whatif``
compares settings. Each folder imports only from the folders before it.
"""
