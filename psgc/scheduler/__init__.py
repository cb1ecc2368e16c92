"""The scheduler: keeps the job together. membership.py and rendezvous.py are pure; loop.py does the I/O."""
