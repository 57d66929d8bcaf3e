#!/bin/sh
# Install what the `ocr` reward reads with: Tesseract's language data (English, or the languages named).
#
#   scripts/install_tesseract.sh [LANGUAGE ...]      for example: eng chi_sim
#
# The engine itself comes with the Python package tesserocr (pip install 'spotlight-rl[ocr]').
# Safe to run again. Never fails: where it cannot install, it says what to do, so that the rest of a
# set-up goes on; only the `ocr` reward needs this.
set -u

[ $# -gt 0 ] || set -- eng

# The directories that spotlight_rewards/ocr.py looks in.
has_data() {
    if [ -n "${TESSDATA_PREFIX:-}" ]; then
        [ -f "$TESSDATA_PREFIX/$1.traineddata" ] || [ -f "$TESSDATA_PREFIX/tessdata/$1.traineddata" ]
        return
    fi
    for directory in /usr/share/tesseract-ocr/*/tessdata /usr/share/tesseract/tessdata /usr/share/tessdata \
        /usr/local/share/tessdata /opt/homebrew/share/tessdata "${CONDA_PREFIX:-/usr}/share/tessdata"; do
        [ -f "$directory/$1.traineddata" ] && return 0
    done
    return 1
}

packages=""
for language in "$@"; do
    has_data "$language" || packages="$packages tesseract-ocr-$(echo "$language" | tr _ -)"
done
if [ -z "$packages" ]; then
    echo "Tesseract's language data is there: $*"
    exit 0
fi

instructions() {
    echo "The ocr reward will not work yet: $1." >&2
    echo "To make it work, have an administrator run:" >&2
    echo "    sudo apt-get update && sudo apt-get install -y$packages" >&2
    echo "or put LANGUAGE.traineddata from https://github.com/tesseract-ocr/tessdata_fast into a directory" >&2
    echo "and let the environment variable TESSDATA_PREFIX name that directory. Everything else works without." >&2
    exit 0
}

if [ -n "${TESSDATA_PREFIX:-}" ]; then
    instructions "TESSDATA_PREFIX=$TESSDATA_PREFIX lacks the language data (unset it to use the system's)"
fi
command -v apt-get >/dev/null 2>&1 || instructions "language data is missing and there is no apt-get here"
if [ "$(id -u)" -eq 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    instructions "language data is missing and installing it needs root"
fi

# shellcheck disable=SC2086  # the words of $as_root and $packages are meant
if ! { $as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends $packages; }; then
    instructions "apt-get could not install$packages"
fi
echo "Installed$packages"
