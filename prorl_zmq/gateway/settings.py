"""A gateway's settings, checked: where it listens, how it is protected, and where the service is."""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from ..config import http_address
from ..errors import ConfigError
from ..security.bearer_list import BearerList
from ..security.keyring import BROKER, Keyring
from ..security.keys import SECRET, KeyFolder
from ..wire.messages.base import JobIdentifier, KeyRole
from ..wire.sockets import is_loopback_host
from .page_token import PageToken

if TYPE_CHECKING:
    from pathlib import Path

    from ..config import GatewaySettings
    from ..service.service_folder import ServiceFolder

ROLES = (*BROKER, KeyRole.TRAINER, KeyRole.OPERATOR)
"""Keys that a gateway may have of its own, where the front door is reached over TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    settings: GatewaySettings
    run_dir: Path
    front_door: str = ""
    service: ServiceFolder | None = None
    """The folder of a service, which says where its rollout brokers are; None: there is one, at `front_door`."""
    name: str = ""
    """Which gateway this is; empty: made of its host's name and its address."""
    keys: Path | None = None
    insecure: bool = False
    timeout_s: float = 10.0
    """How long the service may take to answer."""
    program: Literal["gateway", "dashboard"] = "gateway"
    """`dashboard`: where `keys` lets in no bearer token, it asks for one of its own, and prints it."""
    runs: Path | None = None
    """The folder of the evaluations that the dashboard shows."""
    read_only: bool = False
    """Requests that would change anything are refused for all roles."""
    metrics_only: bool = False
    """Nothing is served but `/metrics`."""

    @property
    def host(self) -> str:
        return http_address(self.settings.bind)[0]

    @property
    def port(self) -> int:
        return http_address(self.settings.bind)[1]

    @property
    def own_name(self) -> str:
        """Its name, by which its jobs and its state are known; no two gateways of a service may have the same."""
        kind = "" if self.program == "gateway" else f"{self.program}-"
        name = self.name or re.sub(r"[^\w.-]+", "_", f"{kind}{socket.gethostname()[:32]}-{self.settings.bind}")
        try:
            return msgspec.convert(name, JobIdentifier)
        except msgspec.ValidationError:
            raise ConfigError(f"--name {name!r}: letters, digits and . _ - only, 64 at most", key="name") from None

    @property
    def url(self) -> str:
        return f"{'https' if self.settings.tls_cert else 'http'}://{self.host}:{self.port}"

    def bearers(self) -> BearerList | PageToken:
        """Return the list of allowed tokens.

        Raises:
            ConfigError: the gateway could be reached from other machines by anybody.
        """
        listed = BearerList(KeyFolder(self.keys) if self.keys is not None else None)
        if self.program == "dashboard" and not len(listed):
            return PageToken(self.run_dir / f"{self.own_name}.token")
        if self.keys is None and not (self.insecure or is_loopback_host(self.host)):
            raise ConfigError(
                f"{self.settings.bind} can be reached from other machines, and no keys are asked for: name a folder "
                "with --keys, in which `prorl keys bearer` has let somebody in; or --insecure, where the network is "
                "trusted",
                key="keys",
            )
        return listed

    def keyring(self) -> Keyring | None:
        """Return the gateway's own key, if it has one; over ipc none is needed."""
        keys = self.keys
        if keys is None:
            return None
        tcp = self.service is not None or self.front_door.startswith("tcp://")
        if tcp or keys.suffix == SECRET or any(keys.glob(f"*{SECRET}")):
            return Keyring.load(keys, ROLES)
        return None

    def tls(self) -> ssl.SSLContext | None:
        """Return what the gateway proves itself with; None: plaintext.

        Raises:
            ConfigError: the files are wrong, or plaintext would go over a network.
        """
        cert, key = self.settings.tls_cert, self.settings.tls_key
        if not cert or not key:
            if cert or key:
                raise ConfigError("--tls-cert and --tls-key belong together", key="tls_cert")
            if self.insecure or is_loopback_host(self.host):
                return None
            raise ConfigError(
                f"{self.settings.bind} can be reached from other machines: name --tls-cert and --tls-key, or "
                "--insecure for plaintext on a network that is trusted",
                key="tls_cert",
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{cert} and {key} cannot be used: {error.strerror or error}", key="tls_cert") from error
        return context
