#!/usr/bin/env bash
# One of the servers of a job's node, until the job ends: server.sh NUMBER SIZE COMMAND... (started by the batch script).
# It sees its part of the GPUs that Slurm gives the job on this node, SIZE of them.
# shellcheck disable=SC2086,SC2153  # the batch script exports GPUS and RUNNER, which is several words
set -euo pipefail

number=$1 size=$2
shift 2
if [ "$GPUS" -gt 0 ]; then
    IFS=, read -ra all <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((GPUS - 1)))}"
    CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${all[*]:number * size:size}")
    export CUDA_VISIBLE_DEVICES
fi
exec $RUNNER "$@"
