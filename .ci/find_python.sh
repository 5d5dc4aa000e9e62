#!/usr/bin/env bash
# Print a Python of at least this version: .ci/find_python.sh 3.12. Fails if this machine has none.
least=$1
for python in python3 $(compgen -c python3. | grep -E '^python3\.[0-9]+$' | sort -uVr) "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python; do
  if "$python" -c "import sys, venv; sys.exit(sys.version_info < tuple(map(int, '$least'.split('.'))))" 2>/dev/null; then
    command -v "$python"
    exit 0
  fi
done
echo "there is no Python $least or newer here" >&2
exit 1
