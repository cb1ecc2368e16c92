#!/bin/sh
# lstm by DDP over psgc: run_psgc.sh [--full] [--steps N]; see ../run.sh.
exec "$(dirname "$0")/../run.sh" psgc lstm onebit "$@"  # the paper: EFSignSGD
