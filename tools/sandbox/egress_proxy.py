"""`EgressProxy`: an HTTP proxy through which the commands of a sandbox reach allowed hosts, and nothing else.

    program in the sandbox ── 127.0.0.1:PORT of the sandbox ── this process ── host:port

A sandbox with a network of its own reaches no other address: a program that ignores `HTTP_PROXY` connects to nothing.
Names are resolved here, and the address that was checked is the one that is connected to. A redirect is a new request,
which is checked like the first. `CONNECT` passes bytes on as they are, so the name inside TLS is not checked. A
connection carries one request, and a request must announce the length of its body.

An address of this machine, of its links or of many hosts is refused even if its name is allowed, since a name server
decides which address a name has. A policy that lists such an address allows it, but for those at which clouds serve a
machine's secrets.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PORT = 3128
"""Where a sandbox's commands find the proxy, unless a program inside has the port."""
HEAD_LIMIT_BYTES = 64 * 1024
CONNECT_S = 30.0
"""Longest wait for a request's head, for a name server, and for a connection, in seconds."""
CHUNK_BYTES = 64 * 1024
CONNECTIONS = 256
"""Most connections of a sandbox at a time; as many more wait, and others are closed."""
KEPT_REFUSALS = 20
PUBLIC6 = ipaddress.IPv6Network("2000::/3")
"""Where all public IPv6 addresses are; others may stand for an IPv4 address in some network."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
CLOUDS = ("168.63.129.16/32", "192.0.0.0/24", "100.100.100.200/32", "fd00:ec2::254/128")
OF_CLOUDS = tuple(map(ipaddress.ip_network, CLOUDS))
"""Addresses at which clouds serve a machine's own secrets, without the link-local ones."""
LOOKUPS = ThreadPoolExecutor(8, "resolve")
"""Slow name servers must not hold up other work of the process."""
NAME = re.compile(r"(?=.{1,253}$)(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
HOP_HEADERS = ("proxy-", "connection:", "keep-alive:", "upgrade:", "te:", "trailer:")


class Refused(Exception):
    def __init__(self, status: str, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The hosts that may be reached.

    Args:
        every: all public addresses.
        names: exact names.
        domains: of `*.DOMAIN`, which a name must be below.
        networks: addresses and networks.
    """

    every: bool = False
    names: frozenset[str] = frozenset()
    domains: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()

    @classmethod
    def of(cls, entries: Sequence[str]) -> Self:
        """Parse host names, `*.` and a domain, addresses, and networks.

        Raises:
            ValueError: an entry is none of these, such as a name with a port.
        """
        names, domains, networks = set(), [], []
        for entry in entries:
            plain = entry.strip().lower().rstrip(".")
            with suppress(ValueError):
                networks.append(ipaddress.ip_network(plain))
                continue
            domain = plain.removeprefix("*.")
            if not NAME.fullmatch(domain):
                advice = "" if plain.isascii() else "; write it in its ASCII form, which begins with xn--"
                raise ValueError(f"{entry!r} is no host name, `*.` and a domain, address, or network{advice}")
            if plain == domain:
                names.add(domain)
            else:
                domains.append(f".{domain}")
        return cls(False, frozenset(names), tuple(domains), tuple(networks))

    def allows_name(self, name: str) -> bool:
        return self.every or name in self.names or name.endswith(self.domains)

    def lists(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


@dataclass
class EgressProxy:
    """Serves one sandbox; use it as an asynchronous context.

    Args:
        listener: what `Sandbox.listen` returned; closed with the proxy.
        hosts: what may be reached.
        resolve: returns the addresses of a name; the machine's own name service by default.
    """

    listener: socket.socket
    hosts: AllowedHosts
    resolve: Callable[[str, int], Awaitable[Sequence[str]]] | None = None
    refused: Counter[str] = field(default_factory=Counter)
    """How often each host was refused or not reached; of the first `KEPT_REFUSALS` hosts."""
    _server: asyncio.Server | None = None
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECTIONS))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, sock=self.listener, limit=HEAD_LIMIT_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= 2 * CONNECTIONS:  # each waiting one takes a descriptor of this process
            writer.close()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            async with self._slots:
                await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side is gone, or the phase has ended
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                head = await _head(reader)
                method, host, port, forwarded = _request(head)
                there, upstream = await self._connected(host, port)
        except TimeoutError:
            await _answer(writer, "504 Gateway Timeout", f"nothing came within {CONNECT_S:g} s")
            return
        except Refused as refusal:
            await _answer(writer, refusal.status, str(refusal))
            return
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await _both(_copy(reader, upstream), _copy(there, writer))
            else:
                upstream.write(forwarded)
                await _both(_copy(reader, upstream, _body_bytes(head), ends=False), _copy(there, writer))
        finally:
            upstream.close()

    async def _connected(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        problem: Exception | None = None
        for address in await self._addresses(host, port):
            try:
                return await asyncio.open_connection(address, port, limit=HEAD_LIMIT_BYTES)
            except OSError as error:
                problem = error
        self._note(host)
        raise Refused("502 Bad Gateway", f"{host}:{port} cannot be reached: {problem or 'it has no address'}")

    async def _addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host that may be connected to."""
        literal: Address | None = None
        with suppress(ValueError):
            literal = ipaddress.ip_address(host)
        if literal is not None:
            found: Sequence[str] = [host]
        elif not NAME.fullmatch(host):  # the resolver would read less, or other characters
            raise Refused("400 Bad Request", "the host is no ASCII name or address")
        elif not self.hosts.allows_name(host):
            self._note(host)
            raise Refused("403 Forbidden", f"the task does not allow the host {host}")
        else:
            try:
                found = await (self.resolve or _resolved)(host, port)
            except OSError as error:
                self._note(host)
                raise Refused("502 Bad Gateway", f"{host} has no address: {error}") from error
        allowed = [each for each in found if self._may_connect(ipaddress.ip_address(each), named=literal is None)]
        if not allowed:
            self._note(host)
            raise Refused("403 Forbidden", f"the task does not allow the address of {host}")
        return allowed

    def _may_connect(self, address: Address, *, named: bool) -> bool:
        address = _plain(address)
        if any(address in each for each in OF_CLOUDS):
            return False
        if self.hosts.lists(address):
            return True
        is_public = address.is_global and not address.is_multicast and (address.version == 4 or address in PUBLIC6)
        return (named or self.hosts.every) and is_public and not _is_own(address)

    def _note(self, host: str) -> None:
        if host in self.refused or len(self.refused) < KEPT_REFUSALS:
            self.refused[host] += 1


def proxy_variables(port: int) -> dict[str, str]:
    """Return the variables by which programs find the proxy on a port of their 127.0.0.1."""
    url, near = f"http://127.0.0.1:{port}", "localhost,127.0.0.1,::1"
    names = ("http_proxy", "https_proxy", "all_proxy")
    variables = {name: url for each in names for name in (each, each.upper())}
    return {**variables, "no_proxy": near, "NO_PROXY": near, "NODE_USE_ENV_PROXY": "1"}


def _plain(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_own(address: Address) -> bool:
    """Return whether an address is one of this machine's."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((str(address), 0))
        except OSError:
            return False
    return True


async def _head(reader: asyncio.StreamReader) -> list[bytes]:
    """Return a request's first line and headers."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Refused("431 Request Header Fields Too Large", "the request's head is too long") from None
    return head[:-4].split(b"\r\n")


def _request(head: list[bytes]) -> tuple[str, str, int, bytes]:
    """Return a request's method, host and port, and its head as the host gets it."""
    words = head[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refused("400 Bad Request", "this is a proxy for HTTP/1.1")
    method, target, version = words
    is_tunnel = method == "CONNECT"
    try:
        url = urlsplit(f"//{target}" if is_tunnel else target)
        host, port = (url.hostname or "").rstrip("."), url.port
    except ValueError:
        host, port = "", None
    if not host or (is_tunnel and port is None) or not (is_tunnel or url.scheme == "http"):
        raise Refused("400 Bad Request", "this is a proxy: send CONNECT, or a whole http:// address")
    if is_tunnel:
        return method, host, port or 0, b""
    _body_bytes(head)
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    kept = [
        line
        for line in head[1:]
        if not line.lower().startswith((b"host:", *(name.encode() for name in HOP_HEADERS))) and line[:1] not in b" \t"
    ]
    name = url.netloc.rpartition("@")[2].encode("latin-1")
    first = f"{method} {path} {version}".encode("latin-1")
    return method, host, port or 80, b"\r\n".join([first, b"Host: " + name, *kept, b"Connection: close", b"", b""])


def _body_bytes(head: list[bytes]) -> int:
    length = 0
    for line in head[1:]:
        name, _, value = line.lower().partition(b":")
        if name == b"transfer-encoding":
            raise Refused("411 Length Required", "this proxy takes no chunked requests")
        if name == b"content-length":
            if not value.strip().isdigit():
                raise Refused("400 Bad Request", "the content-length is no number")
            length = int(value)
    return length


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None = None, *, ends: bool = True
) -> None:
    """Copy bytes to the end, or so many of them."""
    while left is None or left > 0:
        data = await reader.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
        if not data:
            break
        left = None if left is None else left - len(data)
        writer.write(data)
        await writer.drain()
    if ends and writer.can_write_eof():
        writer.write_eof()


async def _both(sent: Awaitable[None], received: Awaitable[None]) -> None:
    """Copy in both directions until the host has ended, or one direction fails."""
    sending = asyncio.ensure_future(sent)
    try:
        await received
    finally:
        sending.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await sending


async def _answer(writer: asyncio.StreamWriter, status: str, words: str) -> None:
    body = f"{words}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def _resolved(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await loop.run_in_executor(LOOKUPS, look_up)
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))
