#!/usr/bin/env bash
# Announce to Spotlight that this node will end, and wait while it drains: for preStop hooks and SIGTERM traps.
#
#   launch/announce-end.sh [SECONDS] [RAY_TMPDIR]       default: 30 seconds, /tmp/ray
#
# Kubernetes and SLURM send SIGTERM to the process that they started. That is Ray's, and it takes the whole
# node down. Spotlight's node agent, which turns SIGTERM into a notice, is a grandchild of Ray and gets no
# signal; it writes its pid beside Ray's logs. So this script runs before Ray is signalled: it forwards the
# signal, then waits until the agent is gone (the run is over) or time is up. Exit status 0 in any case: the
# node ends anyway.
set -u

wait_s=${1:-30}
session=${2:-${RAY_TMPDIR:-/tmp/ray}}/session_latest

# A pid file may outlive its process and the pid be reused. Ray names its workers ray::*.
is_agent() {
  [[ $1 =~ ^[0-9]+$ ]] && [[ $(tr '\0' ' ' 2>/dev/null <"/proc/$1/cmdline") == ray::* ]]
}

agents=()
for file in "$session"/spotlight_agent_*.pid; do
  [[ -r $file ]] || continue
  pid=$(<"$file")
  if is_agent "$pid" && kill -TERM "$pid"; then
    agents+=("$pid")
  fi
done
if ((${#agents[@]} == 0)); then
  echo "announce-end.sh: no node agent in $session: no run uses this node" >&2
  exit 0
fi

deadline=$((SECONDS + wait_s))
for pid in "${agents[@]}"; do
  while ((SECONDS < deadline)) && is_agent "$pid"; do
    sleep 0.5
  done
done
