if [ -n "$INTERFACE" ]; then # else each node chooses an interface, perhaps one that the others don't reach
    export NCCL_SOCKET_IFNAME="$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"
fi

secret() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# on COUNT NODES COMMAND...: the command once on each of so many nodes, until the job ends.
on() {
    local count=$1 names=$2
    shift 2
    srun --overlap --nodes="$count" --ntasks="$count" --nodelist="$names" ${CPUS:+"--cpus-per-task=$CPUS"} "$@" &
}

# start_ray NODE...: a Ray cluster on these nodes, the first of which is the batch script's. Its token is in a
# file that only the user can read, in the run directory, which all nodes share.
start_ray() {
    local head=$1 count=$#
    shift
    address="$head:$((20000 + SLURM_JOB_ID % 12768))" # below the ports that Linux gives to connections
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/ray_token_$SLURM_JOB_ID"
    (umask 077 && secret > "$RAY_AUTH_TOKEN_PATH")
    on 1 "$head" bash "$folder/node.sh" head "$address"
    local second
    for ((second = 0; second < start_seconds; second++)); do
        if (exec 3<> "/dev/tcp/${address/://}") 2> /dev/null; then
            [ $# = 0 ] || on $# "$(IFS=, && echo "$*")" bash "$folder/node.sh" worker "$address"
            $RUNNER python -m cairn.launch.slurm.wait_for_nodes "$address" "$count" "$start_seconds"
            return
        fi
        sleep 1
    done
    echo "Ray does not listen at $address after $start_seconds s; ray.start_timeout allows more" >&2
    exit 1
}
