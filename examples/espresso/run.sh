#!/bin/sh
# What the models' run_baseline.sh and run_psgc.sh have in common: run.sh baseline|psgc MODEL CODEC [flags of train.py]
# WORKERS, SERVERS: processes, 2 and 1 by default; CODEC: in place of the paper's; LINK_MBIT: a simulated link of so many Mbit/s for each process of psgc.
set -eu
here=$(dirname "$0")
python="${PYTHON:-python3}"
kind=$1 model=$2 codec=${CODEC:-$3}
shift 3
case $kind in
baseline) # DDP alone, uncompressed, over gloo
	exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${WORKERS:-2}" "$here/train.py" "$model" "$@"
	;;
psgc)
	exec "$python" -m psgc.launch run --workers "${WORKERS:-2}" --servers "${SERVERS:-1}" --codec "$codec" \
		${LINK_MBIT:+--link-mbit "$LINK_MBIT"} -- "$python" "$here/train.py" "$model" "$@" --psgc
	;;
*)
	echo "run.sh: $kind: expected baseline or psgc" >&2
	exit 2
	;;
esac
