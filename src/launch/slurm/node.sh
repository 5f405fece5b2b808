#!/usr/bin/env bash
# Ray on one node of a job, until the job ends: node.sh head|worker HOST:PORT (started by the batch script).
# shellcheck disable=SC2153  # the batch script exports GPUS, CPUS, INTERFACE and RUNNER
set -euo pipefail

role=$1 address=$2
flags=(--block --disable-usage-stats "--num-gpus=$GPUS")
[ -z "$CPUS" ] || flags+=("--num-cpus=$CPUS")
if [ -n "$INTERFACE" ]; then
    own=$(ip -4 -o addr show dev "$INTERFACE" | awk '{ sub("/.*", "", $4); print $4; exit }')
    flags+=("--node-ip-address=$own")
fi
if [ "$role" = head ]; then
    # Sockets and logs lie on the node's own disk, not on a shared one.
    exec $RUNNER ray start --head "--port=${address#*:}" --include-dashboard=false \
        "--temp-dir=/tmp/ray_$SLURM_JOB_ID" "${flags[@]}"
fi
exec $RUNNER ray start "--address=$address" "${flags[@]}"
