#!/bin/sh
# gpt2 by DDP alone: run_baseline.sh [--full] [--steps N]; see ../run.sh.
exec "$(dirname "$0")/../run.sh" baseline gpt2 none "$@"
