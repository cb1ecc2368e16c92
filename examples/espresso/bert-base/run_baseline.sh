#!/bin/sh
# bert-base by DDP alone: run_baseline.sh [--full] [--steps N]; see ../run.sh.
exec "$(dirname "$0")/../run.sh" baseline bert-base none "$@"
