#!/usr/bin/env bash
# One node of a Ray cluster within a SLURM job step: slurm-node.sh KIND [HEAD:PORT]
#
# SLURM signals the step's own process, which is this one. On SIGTERM it signals the node agent and the node
# drains; then Ray is stopped. Ray has its own session, so that signals to this process group do not reach it.
set -u

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# shellcheck disable=SC2329  # the trap calls it
end() {
  "$here/announce-end.sh" "${SPOTLIGHT_GRACE_S:-30}" "$RAY_TMPDIR"
  kill -TERM "$ray" 2>/dev/null
}

# Short, because a socket's path has at most 107 characters; per job, because nodes may run other Ray instances.
export RAY_TMPDIR=/tmp/ray-$SLURM_JOB_ID
trap end TERM
setsid "$here/ray-start.sh" "$@" --block &
ray=$!
status=0
wait "$ray" || status=$? # returns early when a signal comes
while kill -0 "$ray" 2>/dev/null; do
  status=0
  wait "$ray" || status=$?
done
exit "$status"
