#!/usr/bin/env bash
# Make bubblewrap work for `make demo` and `make test`: .ci/get_bubblewrap.sh FOLDER
# The system's; else the distribution's package, installed where we are root; else that package unpacked below FOLDER,
# with a link FOLDER/bin/bwrap. Where none of these works, one line says why and what to do, and the exit status is 1.
set -u
folder=$(realpath "$1")
works() { bwrap --unshare-all --ro-bind / / true 2>/dev/null; }
export PATH="$PATH:$folder/bin"

works && exit 0
if ! command -v bwrap >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "make: installing bubblewrap, for sandboxes" >&2
  DEBIAN_FRONTEND=noninteractive; export DEBIAN_FRONTEND
  { apt-get update && apt-get install -y --no-install-recommends bubblewrap; } >/dev/null 2>&1
fi
if ! command -v bwrap >/dev/null && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
  echo "make: unpacking the package bubblewrap below $folder, for sandboxes" >&2
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
  own="-oDir::State::lists=$work/lists -oDir::Cache=$work/cache -oDebug::NoLocking=1 -oAPT::Sandbox::User="
  (cd "$work" && { apt-get download bubblewrap || { apt-get $own update && apt-get $own download bubblewrap; }; }) >/dev/null 2>&1
  for package in "$work"/bubblewrap_*.deb; do
    if [ -f "$package" ] && dpkg-deb -x "$package" "$folder/bubblewrap"; then
      ln -sf ../bubblewrap/usr/bin/bwrap "$folder/bin/bwrap"
    fi
  done
fi
works && exit 0
if command -v bwrap >/dev/null; then
  why="$(bwrap --unshare-all --ro-bind / / true 2>&1 | tail -n 1)"
  fix="allow user namespaces (https://github.com/containers/bubblewrap#system-security), or use Apptainer (\`--sandbox apptainer\`)"
else
  why="bwrap is not installed, and could not be"
  fix="install your distribution's package, such as \`sudo apt-get install bubblewrap\`"
fi
echo "make: no bubblewrap ($why), so sandboxes are plain processes without isolation; to have it, $fix" >&2
exit 1
