#!/usr/bin/env bash
# Start this machine's part of a Ray cluster for Spotlight. Returns once Ray is up; with --block, when it ends.
#
#   launch/ray-start.sh head                        the first reserved node; `spotlight train` runs on it
#   launch/ray-start.sh spot-head                   instead, one that may be preempted (fleet.head=any)
#   launch/ray-start.sh reserved HEAD:6379          further reserved nodes: learner ranks
#   launch/ray-start.sh spot HEAD:6379 --block      nodes that may be preempted
#   launch/ray-start.sh on-demand HEAD:6379 --node-name=$SPOTLIGHT_NODE   nodes that a run takes (fleet.on_demand)
#
# Further arguments go to `ray start`. Ray detects GPUs; --num-gpus=N overrides it.
#
#   SPOTLIGHT_IP          private address of this machine; default: the first private one of `hostname -I`
#   SPOTLIGHT_PORT        the head's port, 6379
#   SPOTLIGHT_SLOTS       so many CPU slots stand for GPUs: Ray's resource spotlight_slot, with --num-gpus=0
#   RAY_AUTH_TOKEN_PATH   file with the cluster's secret, the same on all nodes; the head creates it if missing
#   RAY_TMPDIR            where Ray keeps logs and sockets, /tmp/ray
#   SPOTLIGHT_MODEL       hub id or directory of the model: fetched and read once before this machine joins
#   SPOTLIGHT_MODEL_REVISION   of a hub id, if the run sets model.revision
#   NCCL_CUMEM_ENABLE     0; the same on all nodes
set -euo pipefail

fail() {
  printf 'ray-start.sh: %s\n' "$*" >&2
  exit 2
}

is_private() {
  [[ $1 =~ ^(127|10)\. || $1 =~ ^192\.168\. || $1 =~ ^172\.(1[6-9]|2[0-9]|3[01])\. ||
    $1 =~ ^100\.(6[4-9]|[7-9][0-9]|1[01][0-9]|12[0-7])\. ]]
}

own_address() {
  local address
  for address in $(hostname -I); do
    if is_private "$address"; then
      printf '%s\n' "$address"
      return
    fi
  done
}

usage='expected: head | spot-head | reserved HEAD:PORT | spot HEAD:PORT | on-demand HEAD:PORT, then options of ray start'
kind=${1:-}
case $kind in
  head | spot-head)
    [[ $kind == head ]] && resource=spotlight_reserved || resource=spotlight_spot
    shift
    ;;
  reserved | spot | on-demand)
    resource=spotlight_${kind/-/_}
    address=${2:-}
    [[ $address == *:* ]] || fail "no address of the head; $usage"
    shift 2
    ;;
  *) fail "found '$kind'; $usage" ;;
esac

ip=${SPOTLIGHT_IP:-$(own_address)}
[[ -n $ip ]] || fail "no private address in '$(hostname -I)'; set SPOTLIGHT_IP to one that the other nodes reach"
# Ray's ports accept connections on every interface, whatever address it is given: only a firewall and the
# token protect them. So at least no public address is announced.
is_private "$ip" || fail "SPOTLIGHT_IP=$ip is a public address; expected a private one (10.*, 172.16-31.*, 192.168.*)"

export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
export RAY_USAGE_STATS_ENABLED=0
if [[ ! -s $RAY_AUTH_TOKEN_PATH ]]; then
  [[ $kind == *head ]] || fail "no token in $RAY_AUTH_TOKEN_PATH; copy the file from the head node"
  mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
  draft=$(mktemp "$RAY_AUTH_TOKEN_PATH.XXXXXX") # only this user may read it
  od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$draft"
  # Of heads that share the file and start at the same moment, one makes it.
  # Renamed where an empty file is in the way, or where the file system has no links.
  ln "$draft" "$RAY_AUTH_TOKEN_PATH" 2>/dev/null || [[ -s $RAY_AUTH_TOKEN_PATH ]] ||
    mv "$draft" "$RAY_AUTH_TOKEN_PATH" || fail "cannot make $RAY_AUTH_TOKEN_PATH"
  rm -f "$draft"
fi

# A node that joins has fleet.start_s to start its workers: not the time for a download.
[[ -z ${SPOTLIGHT_MODEL:-} ]] || "$(dirname "${BASH_SOURCE[0]}")/warm-model.sh" "$SPOTLIGHT_MODEL" "${SPOTLIGHT_MODEL_REVISION:-}"

# NCCL's allocation through cuMem costs memory; what needs it, NVLink between machines (GB200), sets 1.
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0}

# Weights pass through Ray's store as one object a version (`--dry-run` tells its size): a quarter of /dev/shm, whose
# rest is for the weights that the node's workers share, and NCCL's. Memory is taken as it is used.
shm=$(df --block-size=1 --output=size /dev/shm | tail -n 1)
store=$((shm / 4))
if ((store < 2000000000)); then
  store=2000000000
  printf 'ray-start.sh: /dev/shm has %d MB; expected at least 8000: docker run --shm-size 64g, or mount -o remount,size=64g /dev/shm\n' \
    $((shm / 1000000)) >&2
elif ((store > 64000000000)); then
  store=64000000000
fi
# A second --resources would replace this one.
slots=${SPOTLIGHT_SLOTS:+, \"spotlight_slot\": $SPOTLIGHT_SLOTS}
options=(--node-ip-address="$ip" --resources="{\"$resource\": 1$slots}" --object-store-memory="$store")
[[ -z $slots ]] || options+=(--num-gpus=0)
[[ -z ${RAY_TMPDIR:-} ]] || options+=(--temp-dir="$RAY_TMPDIR")
if [[ $kind == *head ]]; then
  options+=(--head --port="${SPOTLIGHT_PORT:-6379}" --include-dashboard=false)
else
  options+=(--address="$address")
fi
if [[ $kind == spot* ]]; then
  # Spotlight has drained the node already (announce-end.sh). Ray would wait again, for actors that do not exit.
  export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
fi
exec ray start "${options[@]}" "$@"
