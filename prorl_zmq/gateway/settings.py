"""`GatewayOptions`: a gateway's checked settings."""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from ..errors import ConfigError
from ..security.bearer_list import BearerList
from ..security.keyring import BROKER, Keyring
from ..security.keys import SECRET, KeyFolder
from ..system.http_address import http_address
from ..wire.messages.base import JobIdentifier, KeyRole
from ..wire.sockets import is_loopback_host
from .page_token import PageToken

if TYPE_CHECKING:
    from pathlib import Path

    from ..config import GatewaySettings
    from ..service.service_folder import ServiceFolder

ROLES = (*BROKER, KeyRole.TRAINER, KeyRole.OPERATOR)
"""Roles of a gateway's own key, which TCP front doors require."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    settings: GatewaySettings
    run_dir: Path
    front_door: str = ""
    service: ServiceFolder | None = None
    """The service's folder, which names its rollout brokers; None: there is one, at `front_door`."""
    name: str = ""
    """Empty: made of the host's name and the address."""
    keys: Path | None = None
    insecure: bool = False
    timeout_s: float = 10.0
    """How long the service may take to answer."""
    program: Literal["gateway", "dashboard"] = "gateway"
    """`dashboard`: makes and prints a token of its own if `keys` has no bearer token."""
    runs: Path | None = None
    """The folder of evaluations that the dashboard shows."""
    read_only: bool = False
    """Reject requests that change anything, for all roles."""
    metrics_only: bool = False
    """Serve only `/metrics`."""

    @property
    def host(self) -> str:
        return http_address(self.settings.bind)[0]

    @property
    def port(self) -> int:
        return http_address(self.settings.bind)[1]

    @property
    def own_name(self) -> str:
        """The unique name of its jobs and its state."""
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
        """Return the allowed tokens.

        Raises:
            ConfigError: other machines could use the gateway without a token.
        """
        listed = BearerList(KeyFolder(self.keys) if self.keys is not None else None)
        if self.program == "dashboard" and not len(listed):
            return PageToken(self.run_dir / f"{self.own_name}.token")
        if self.keys is None and not (self.insecure or is_loopback_host(self.host)):
            raise ConfigError(
                f"{self.settings.bind} can be reached from other machines, and no keys are asked for: name a folder "
                "with --keys, in which `prorl keys bearer` has made a token; or --insecure, where the network is "
                "trusted",
                key="keys",
            )
        return listed

    def keyring(self) -> Keyring | None:
        """Return the gateway's own key; None: it has none, and ipc needs none."""
        keys = self.keys
        if keys is None:
            return None
        tcp = self.service is not None or self.front_door.startswith("tcp://")
        if tcp or keys.suffix == SECRET or any(keys.glob(f"*{SECRET}")):
            return Keyring.load(keys, ROLES)
        return None

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; None: plaintext.

        Raises:
            ConfigError: the files are invalid, or plaintext would cross a network.
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
