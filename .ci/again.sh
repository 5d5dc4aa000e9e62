#!/usr/bin/env bash
# Run a command of make that tests. Thousands of tests wait for processes on a loaded machine: what fails beside the
# others is named, and has one more chance, alone. A fault fails twice. An exceeded limit is no matter of chance.
# usage: .ci/again.sh make TARGET
set -euo pipefail

rm -rf .pytest_cache
"$@" && exit
exceeded=.pytest_cache/v/prorl/exceeded
if [ -s $exceeded ] && [ "$(cat $exceeded)" != "[]" ]; then
  echo "limits were exceeded:"
  cat $exceeded
  exit 1
fi
[ -s .pytest_cache/v/cache/lastfailed ] || exit 1
# Beside others, a test of an xdist group is named with its group, and alone without.
sed -E -i 's/@[^]@"]*": true/": true/' .pytest_cache/v/cache/lastfailed
echo "failed beside the others, and now once more, alone:"
cat .pytest_cache/v/cache/lastfailed
"$@" TEST_WORKERS=0 PROOF_WORKERS=0 PYTEST_ARGS="--last-failed"
