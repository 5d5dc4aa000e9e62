#!/bin/sh
# Install prorl_zmq into /opt/prorl from the wheels in /opt/wheels, without a network. Dockerfile and prorl.def.j2 run it.
set -eu
python3 -m venv --without-pip /opt/prorl
for pip in /opt/wheels/pip-*.whl; do
  /opt/prorl/bin/python "$pip/pip" --disable-pip-version-check install --quiet --no-index --no-cache-dir \
    --root-user-action=ignore --find-links /opt/wheels prorl-zmq"[${EXTRAS:-server}]"
done
/opt/prorl/bin/prorl --version
