# Above are what the job asks for and its settings; below is what it does.

# The end of the job: whatever still runs on its nodes is ended, and the token of its Ray cluster is removed.
end() {
    local steps
    steps=$(jobs -p)
    # shellcheck disable=SC2086
    [ -z "$steps" ] || kill $steps 2> /dev/null || true
    [ -z "${RAY_AUTH_TOKEN_PATH:-}" ] || rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap end EXIT

# note_the_end: write down when Slurm ends this job, for the run, which is stopped next and goes by the earliest deadline
# (Deadline in run/messages.py). A job that is preempted has its partition's GraceTime, perhaps less than signal_seconds.
# In the shell, since a Python that starts would take seconds of it on a shared file system.
note_the_end() {
    local at note="${folder%/*}/deadline.json"
    at=$(SLURM_TIME_FORMAT=%s timeout 5 scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*\bEndTime=\([0-9]\+\).*/\1/p')
    [ -n "$at" ] || return 0 # it has no end
    echo "Slurm ends this job in $((at - $(date +%s))) s"
    echo "{\"time\": $at}" > "$note.$SLURM_JOB_ID" && mv "$note.$SLURM_JOB_ID" "$note"
}

# run COMMAND...: see the run through. TERM, which Slurm sends before the time limit, has it save and stop; it then
# ends with exit code 75, and the job is queued again, unless somebody has cancelled it. INT has it save and stop
# for good.
run() {
    local code again=$requeue
    $RUNNER "$@" &
    local command=$!
    trap 'note_the_end || true; kill -TERM $command || true' TERM
    trap 'again=no; kill -TERM $command || true' INT
    while code=0; wait "$command" || code=$?; kill -0 "$command" 2> /dev/null; do :; done # a trap ends `wait` too
    trap '' TERM INT
    if [ "$code" -gt 128 ]; then
        code=0
        wait "$command" || code=$?
    fi
    echo "$1 ended with exit code $code"
    if [ "$code" = 75 ] && [ "$again" = yes ]; then
        if [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then
            scontrol requeue "$SLURM_JOB_ID" || echo "the job is not queued again: submit $folder/job.sbatch" >&2
        fi
    fi
    exit "$code"
}
