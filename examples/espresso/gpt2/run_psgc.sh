#!/bin/sh
# gpt2 by DDP over psgc: run_psgc.sh [--full] [--steps N]; see ../run.sh.
exec "$(dirname "$0")/../run.sh" psgc gpt2 onebit "$@"  # the paper: EFSignSGD
