"""Rank 0's command line for all, as many training scripts hand it out: an object of a class."""

import argparse

import byteps.torch as bps

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

bps.init()
args.lr *= 1 + bps.rank()
args = bps.broadcast_object(args, root_rank=0)
print(f"rank {bps.rank()} lr {args.lr}", flush=True)
