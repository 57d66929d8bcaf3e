#!/usr/bin/env bash
# One node of a Ray cluster within a SLURM job step: slurm-node.sh KIND [HEAD:PORT]
#
# SLURM signals the step's own process, which is this one. On SIGTERM the node agent is told and the node
# drains; then Ray ends. Ray has a session of its own, so that no signal for this process's group reaches it.
set -u

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# shellcheck disable=SC2329  # the trap calls it
end() {
  "$here/announce-end.sh" "${SPOTLIGHT_GRACE_S:-30}" "$RAY_TMPDIR"
  kill -TERM "$ray" 2>/dev/null
}

# Short: a socket's path has at most 107 characters. One a job: nodes may be shared with others' Ray.
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
