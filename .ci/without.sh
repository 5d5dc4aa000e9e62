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
  for program in $programs; do
    while place=$(type -P "$program"); do
      number=$((number + 1))
      mkdir "$OWN/$number" "$OWN/$number/upper" "$OWN/$number/work"
      folder=$(realpath "$(dirname "$place")")
      mount -t overlay overlay -o "lowerdir=$folder,upperdir=$OWN/$number/upper,workdir=$OWN/$number/work" "$folder"
      rm "$folder/$program"
      hash -r
    done
  done
  mkdir "$OWN/home"
  HOME=$OWN/home exec "$@"' without "$programs" "$@"
