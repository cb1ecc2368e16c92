#!/bin/sh
# ugatit by DDP over psgc: run_psgc.sh [--full] [--steps N]; see ../run.sh.
exec "$(dirname "$0")/../run.sh" psgc ugatit topk:k=0.01 "$@"  # the paper: DGC, which is top-k with momentum correction
