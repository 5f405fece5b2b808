#!/usr/bin/env bash
# Ray on one node of a job, until the job ends: node.sh head|worker HOST:PORT (see cluster.sh, which starts it).
set -euo pipefail

role=$1 address=$2
flags=(--block --disable-usage-stats "--num-gpus=$GPUS")
if [ -n "${IFACE:-}" ]; then
    own=$(ip -4 -o addr show dev "$IFACE" | awk '{ sub("/.*", "", $4); print $4; exit }')
    flags+=("--node-ip-address=$own")
fi
if [ "$role" = head ]; then
    # Sockets and logs lie on the node's own disk, not on a shared one.
    exec ray start --head "--port=${address#*:}" --include-dashboard=false "--temp-dir=/tmp/ray_$SLURM_JOB_ID" \
        "${flags[@]}"
fi
exec ray start "--address=$address" "${flags[@]}"
