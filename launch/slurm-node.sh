#!/usr/bin/env bash
# One node of a run's Ray cluster within a SLURM job step: slurm-node.sh KIND FILE
#
#   FILE   where the head's address is, for as long as the head is up
#
# SLURM signals the step's own process, which is this one. On SIGTERM it signals the node agent and the node
# drains; then Ray is stopped. Ray has its own session, so that signals to this process group do not reach it.
#
# Exit status: 0, the head has withdrawn its address; 90, SLURM has told this node to end; any other, Ray did not
# start or was lost.
set -u

kind=$1 file=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
trap 'exit 90' TERM

# Asked first, because Ray tries for 14 minutes to reach a head that is gone. What the connection comes from is
# this machine's address on the head's network.
address=$(<"$file")
SPOTLIGHT_IP=$(python -c '
import socket, sys
host, port = sys.argv[1].rsplit(":", 1)
try:
    print(socket.create_connection((host, int(port)), timeout=5).getsockname()[0])
except OSError as error:
    sys.exit(f"slurm-node.sh: no head at {sys.argv[1]}: {error}")' "$address") || exit 1
export SPOTLIGHT_IP

# shellcheck disable=SC2329  # the trap calls it
end() {
  status=90
  "$here/announce-end.sh" "${SPOTLIGHT_GRACE_S:-30}"
  kill -TERM "$ray" 2>/dev/null
}

status= away=0
setsid "$here/ray-start.sh" "$kind" "$address" --block &
ray=$!
trap end TERM
while kill -0 "$ray" 2>/dev/null; do
  # Thrice in a row, because a shared disk may fail to answer once.
  if [[ $(cat "$file" 2>/dev/null) == "$address" ]]; then
    away=0
  elif ((++away >= 3)) && [[ -z $status ]]; then
    status=0
    kill -TERM "$ray"
  fi
  sleep 1 &
  wait $!
done
# What ray-start.sh began before Ray, such as reading the model, and Ray's agents are of its group and may outlive it.
kill -TERM -- "-$ray" 2>/dev/null
ended=$SECONDS
while kill -0 -- "-$ray" 2>/dev/null && ((SECONDS - ended < 10)); do
  sleep 0.2
done
kill -KILL -- "-$ray" 2>/dev/null
exit "${status:-1}"
