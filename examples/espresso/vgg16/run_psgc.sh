#!/bin/sh
# vgg16 by DDP over psgc: run_psgc.sh [--full] [--steps N]; see ../run.sh.
exec "$(dirname "$0")/../run.sh" psgc vgg16 randomk:k=0.01 "$@"  # the paper: random-k
