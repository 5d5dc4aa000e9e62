"""Checks of `prorl serve` before it starts a process, since each child would report the same error."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ..errors import ConfigError, InvalidEndpoint
from ..security.keyring import BROKER, WORKER, Keyring
from ..security.zap_authenticator import PLAINTEXT
from ..system.installation import how_to_install
from ..system.processes import ISOLATED
from ..wire.sockets import check_private, endpoint_beside, is_loopback

if TYPE_CHECKING:
    from ..config import Topology

log = logging.getLogger("prorl.serve")


def check_connections(topology: Topology) -> None:
    """Raise the errors that children would: of keys, endpoints, and addresses for stages and engines."""
    stages, backends = topology.rollout_broker.stage_events, topology.backend_broker.endpoint
    keyring = Keyring.load(topology.security.keys, BROKER)
    if topology.stage or topology.backends:
        Keyring.load(topology.security.keys, WORKER)
    endpoints = [topology.endpoint(template) for template in (topology.rollout_broker.front_door, stages, backends)]
    if keyring is None:
        for endpoint in endpoints:
            if not topology.service.insecure:
                check_private(endpoint)
            elif endpoint.startswith("tcp://") and not is_loopback(endpoint):
                log.warning(PLAINTEXT, endpoint)
                break
    for template, users in ((stages, topology.stage), (backends, topology.backends)):
        endpoint = topology.endpoint(template)
        try:
            endpoint_beside(endpoint, "")
        except InvalidEndpoint:
            if users:
                raise InvalidEndpoint(
                    f"{endpoint} is not an address of this machine to which the service's own processes could connect; "
                    "name one, such as tcp://10.0.0.1:5556",
                    endpoint=endpoint,
                ) from None


async def check_python(python: str) -> None:
    """Raise `ConfigError` unless another environment's interpreter can run an engine host."""
    null = asyncio.subprocess.DEVNULL
    try:
        child = await asyncio.create_subprocess_exec(
            *(python, *ISOLATED, "-c", "import prorl_zmq.cli"), stdin=null, stdout=null, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise ConfigError(
            f"backends.python: {python} cannot be started ({error.strerror}); a relative path is seen from the current "
            f"folder. In an environment for vLLM, {how_to_install('vllm')}",
            key="backends.python",
        ) from error
    _, said = await child.communicate()
    if child.returncode:
        words = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(
            f"backends.python: {python} has no prorl_zmq ({words}); there, {how_to_install('server')}",
            key="backends.python",
        )
