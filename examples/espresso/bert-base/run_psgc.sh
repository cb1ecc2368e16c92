#!/bin/sh
# bert-base by DDP over psgc: run_psgc.sh [--full] [--steps N]; see ../run.sh.
exec "$(dirname "$0")/../run.sh" psgc bert-base randomk:k=0.01 "$@"  # the paper: random-k
