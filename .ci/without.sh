#!/usr/bin/env bash
# Run a command as on a machine without some programs: .ci/without.sh "apptainer bwrap" make test
# They are removed from overlays over their folders, in a mount namespace of our own; HOME is an empty folder.
set -eu
programs=$1
shift
own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
become=
[ "$(id -u)" = 0 ] || become=--map-root-user
OWN=$own unshare --mount $become bash -c '
  set -e
  programs=$1
  shift
  mount -t tmpfs tmpfs "$OWN"
  number=0
  for folder in $(type -aP $programs | xargs --no-run-if-empty dirname | xargs --no-run-if-empty realpath | sort -u); do
    # One overlay per folder: Linux stacks two at most, and the root of a container is often one already.
    number=$((number + 1))
    mkdir "$OWN/$number" "$OWN/$number/upper" "$OWN/$number/work"
    mount -t overlay overlay -o "lowerdir=$folder,upperdir=$OWN/$number/upper,workdir=$OWN/$number/work" "$folder"
    (cd "$folder" && rm -f $programs)
  done
  if type -P $programs; then exit 1; fi
  mkdir "$OWN/home"
  HOME=$OWN/home exec "$@"' without "$programs" "$@"
