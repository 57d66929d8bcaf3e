#!/usr/bin/env bash
# Have a model's weights on this machine and in its page cache, so that workers start from memory.
#
#   launch/warm-model.sh MODEL [REVISION]
#
#   MODEL      a hub id, or a directory as diffusers saves pipelines
#   REVISION   branch, tag or commit of a hub id; default or empty: its main branch
#
# A hub id is downloaded to the hub's cache (HF_HOME) unless it is there. Then the transformer's and the VAE's files
# are read once, but for those beyond half of the memory available: they would push each other out.
set -euo pipefail

fail() {
  printf 'warm-model.sh: %s\n' "$*" >&2
  exit 2
}

(($# == 1 || $# == 2)) && [[ -n $1 ]] ||
  fail "found $# arguments; expected a hub id or the directory of a pipeline, then at most a revision"
model=$1 revision=${2:-}
if [[ -d $model ]]; then
  [[ -z $revision ]] || fail "found revision '$revision' for the directory $model; expected none: revisions belong to hub ids"
  folder=$model
elif [[ $model =~ ^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$ ]]; then
  folder=$(hf download --quiet "$model" ${revision:+"--revision=$revision"}) ||
    fail "cannot download $model${revision:+ at revision $revision}; look at the network, HF_TOKEN and HF_HOME"
  folder=$(tail -n 1 <<<"$folder")
else
  fail "found '$model', which is neither a directory here nor a hub id (OWNER/NAME)"
fi

available=$(($(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo) * 1024))
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || true)
if [[ $limit =~ ^[0-9]+$ ]] && ((limit < available)); then
  available=$limit
fi

# From inside: the folder's own path may have such names, too.
CDPATH='' cd -- "$folder"
read_bytes=0 left=0
batch=()
while IFS= read -r -d '' file; do
  bytes=$(stat -L -c %s "$file")
  if ((read_bytes + bytes > available / 2)); then
    left=$((left + 1))
    continue
  fi
  read_bytes=$((read_bytes + bytes))
  batch+=("$file")
done < <(find -L . \( -path './transformer*/*' -o -path './vae/*' \) -name '*.safetensors' -print0 | sort -z)
((${#batch[@]} + left)) || fail "no weights (transformer*/*.safetensors) in $folder: a pipeline that diffusers saved?"
if ((${#batch[@]})); then
  printf '%s\0' "${batch[@]}" | xargs -0 -n 1 -P 4 cat >/dev/null
fi
printf 'warm-model.sh: %d files, %d MB of %s are in memory' "${#batch[@]}" $((read_bytes / 1000000)) "$model"
if ((left)); then
  printf '; %d files are not: they exceed half of the %d MB available' "$left" $((available / 1000000))
fi
printf '\n'
