# shellcheck shell=bash
# Read by sft.sbatch and rl.sbatch: a Ray cluster on nodes of the job, and the end of the job.
#
# From the environment, for instance `sbatch --export=ALL,GPUS=4 ...`:
#   GPUS   GPUs of a node that Ray gets, and a server uses (default: 8, as --gpus-per-node says below)
#   IFACE  network interface between the nodes, such as ib0 or bond0 (default: what Ray, NCCL and gloo choose)
#   VENV   Cairn's environment, at one path on all nodes (default: .venv in the folder of sbatch)

: "${SLURM_JOB_ID:?this is a batch script: sbatch configs/slurm/sft.sbatch}"
cd "${SLURM_SUBMIT_DIR:?}" || exit 1
# shellcheck disable=SC1091
. "${VENV:-.venv}/bin/activate"
export UV_NO_SYNC=1 GPUS="${GPUS:-8}"

# Cairn hands variables of NCCL and gloo to its workers. Without them each node chooses an interface for itself,
# and may well choose one (docker0, a management network) that the others don't reach.
[ -z "${IFACE:-}" ] || export NCCL_SOCKET_IFNAME="$IFACE" GLOO_SOCKET_IFNAME="$IFACE"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address="${nodes[0]}:$((20000 + SLURM_JOB_ID % 20000))" # Ray's; the job runs on its first node

secret() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# The token of this job's Ray cluster: in a file that only you can read, in a folder that all nodes share.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/.ray_token_$SLURM_JOB_ID"
(umask 077 && secret > "$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT

# start_ray NODE...: Ray on these nodes, the first of which is the batch script's; it ends with the job.
start_ray() {
    local head=$1 count=$# rest
    shift
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" configs/slurm/node.sh head "$address" &
    for _ in {1..120}; do
        if (exec 3<> "/dev/tcp/${address/://}") 2> /dev/null; then
            rest=$(IFS=,; echo "$*")
            [ -z "$rest" ] ||
                srun --overlap --nodes=$# --ntasks=$# --nodelist="$rest" configs/slurm/node.sh worker "$address" &
            python configs/slurm/wait_for_nodes.py "$address" "$count" # a run refuses a cluster that is too small
            return
        fi
        sleep 1
    done
    echo "Ray does not listen at $address" >&2
    exit 1
}

# run COMMAND...: run it to its end. A minute's notice of Slurm's (USR1, see --signal) has it save and stop, and the
# job is queued again; TERM and INT (scancel --batch --signal=TERM JOB) have it save and stop, and that was all.
# Exit code 75 means stopped after saving: --ckpt.resume auto goes on from there.
run() {
    local code again=no
    "$@" &
    local command=$!
    trap 'again=yes; kill -TERM $command' USR1
    trap 'kill -TERM $command' TERM INT
    while code=0; wait "$command" || code=$?; kill -0 "$command" 2> /dev/null; do :; done # a trap ends `wait` too
    trap '' USR1 TERM INT
    if [ "$code" -gt 128 ]; then
        code=0
        wait "$command" || code=$?
    fi
    echo "$1 ended with exit code $code"
    if [ "$code" = 75 ] && [ "$again" = yes ]; then
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    exit "$code"
}
