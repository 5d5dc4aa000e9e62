"""`Target`: the service that a command's options name, and the clients of its brokers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..client.blocking.client import RolloutClient
from ..config import Topology, load_topology
from ..errors import RequestTimeout
from ..security.keyring import CLIENT, Keyring
from ..service.rollout_brokers import EachBroker, RolloutBrokers, sessions_of
from ..system.held_file import holder
from ..system.run_places import is_name
from ..wire.sockets import check_endpoint, is_listening
from . import options
from .option_groups import OptionGroup

if TYPE_CHECKING:
    from ..client.asynchronous.client import AsyncRolloutClient

Client = TypeVar("Client", RolloutClient, "AsyncRolloutClient")
QUICK_S = 10.0
"""Seconds that query commands wait for a reply."""
AWAY_S = 3.0
"""Seconds that they wait for a process to listen over TCP: a broker elsewhere may be restarting."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(OptionGroup):
    connect: options.Connect = None
    config: options.Config = None
    keys: options.Keys = None
    service: options.Service = None

    @property
    def folder(self) -> Path | None:
        """The folder of a service; None: the service has none, or --connect names another."""
        return self.service if self.connect is None else None

    @property
    def topology(self) -> Topology:
        """The topology of --config, or the default one, of the named service."""
        name = self.connect if self.connect is not None and is_name(self.connect) else None
        return options.named(load_topology(self.config), name)

    @property
    def front_door(self) -> str:
        """The service's endpoint or folder."""
        if self.connect is not None and not is_name(self.connect):
            return self.connect
        if self.folder is not None:
            return str(self.folder.absolute())
        topology = self.topology
        return topology.endpoint(topology.rollout_broker.front_door)

    @property
    def run_dir(self) -> Path:
        """The run folder of the service, if it is on this machine."""
        if self.connect is not None and self.connect.startswith("ipc://"):
            return Path(self.connect.removeprefix("ipc://")).parent
        return self.topology.run_dir

    def client(self) -> RolloutClient:
        """Return the client of a query command.

        Raises:
            RequestTimeout: the service does not run.
        """
        self.check_running()
        return self._client(RolloutClient, timeout_s=QUICK_S)

    def async_client(self, session: str | None = None) -> AsyncRolloutClient:
        """Return the client of a command that submits jobs."""
        from ..client.asynchronous.client import AsyncRolloutClient

        return self._client(AsyncRolloutClient, session)

    def clients(self) -> dict[str, AsyncRolloutClient]:
        """Return a client of each rollout broker, by the broker's name.

        Raises:
            RequestTimeout: the service does not run.
        """
        from ..client.asynchronous.client import AsyncRolloutClient

        return self._clients(AsyncRolloutClient)

    def brokers(self) -> RolloutBrokers:
        """Return the rollout brokers; raises as `clients`."""
        return RolloutBrokers(self.clients())

    def each_broker(self) -> EachBroker:
        """Return the rollout brokers for a command without an event loop; raises as `clients`."""
        return EachBroker(self._clients(RolloutClient))

    def _client(self, kind: type[Client], session: str | None = None, **options: Any) -> Client:
        if self.folder is not None:
            return kind(service=self.folder, session=session, keys=self.keys, **options)
        return kind(self.front_door, session=session, keys=self._keys(), **options)

    def _clients(self, kind: type[Client]) -> dict[str, Client]:
        self.check_running()
        sessions = sessions_of(self.folder) if self.folder is not None else {self.front_door: None}
        return {name: self._client(kind, session, timeout_s=QUICK_S) for name, session in sessions.items()}

    def check_running(self) -> None:
        """Raise `RequestTimeout` if no service runs, before a command waits `QUICK_S` for its reply.

        Invalid keys are reported first.
        """
        if absent := self.absence():
            Keyring.load(self._keys(), CLIENT)
            raise absent

    def absence(self) -> RequestTimeout | None:
        """Return the error of a service that does not run.

        A service runs if one of its rollout brokers listens, or a `prorl serve` that would start or restart them lives.
        """
        if self.folder is not None:
            from ..service.service_folder import LOCK, ServiceFolder

            folder = ServiceFolder.open(self.folder)
            lock, places, start = folder.path / LOCK, folder.broker_endpoints(), f"prorl serve --service {self.folder}"
            doors = [ends["front_door"] for ends in places.values() if "front_door" in ends]
            where, patience_s = f"at the places named in {self.folder}", AWAY_S if doors else 0.0
        else:
            from ..service.run_dir import LOCK

            door = check_endpoint(self.front_door)
            transport, _, address = door.partition("://")
            lock, doors, where, start = Path(address).parent / LOCK, [door], f"at {door}", "prorl serve"
            if self.connect is not None and is_name(self.connect):
                where, start = f"as {self.connect} ({door})", f"prorl serve --name {self.connect}"
            patience_s = AWAY_S if transport == "tcp" else 0.0
        until = time.monotonic() + patience_s
        while not any(map(is_listening, doors)) and not holder(lock):
            if time.monotonic() >= until:
                message = f"no process listens {where}; is the service running? (`{start}`)"
                return RequestTimeout(message, timeout_s=patience_s)
            time.sleep(LOOK_S)
        return None

    def _keys(self) -> Path | None:
        """Return the named keys; else those of the topology file, if one is named."""
        if self.keys is None and self.config is not None:
            named = load_topology(self.config).security.keys
            return Path(named) if named else None
        return self.keys
