"""What programs in a sandbox reach through the proxy: allowed hosts, by whatever address, and nothing else."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.tools.sandbox.egress_proxy import AllowedHosts, EgressProxy, proxy_variables

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from support.sandboxes import SharedSandboxes

LIMIT_S = 60.0
HERE = "127.0.0.0/8"
"""The test's servers are on this machine, where only listed addresses are reached."""
SEEN: list[bytes] = []


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l")), 0
    )
    SEEN.append(head + await reader.readexactly(length))
    if b"/away" in head:
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://bad.test/\r\nContent-Length: 0\r\n\r\n")
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    await writer.drain()
    writer.close()


async def _resolve(host: str, port: int) -> Sequence[str]:
    del port
    return {"good.test": ["127.0.0.1"], "a.wild.test": ["127.0.0.1"]}.get(host, ["127.0.0.2"])


@asynccontextmanager
async def proxied(*entries: str, listener: socket.socket | None = None) -> AsyncIterator[tuple[EgressProxy, int]]:
    """Yield a proxy with those hosts, and the port of a server on this machine."""
    SEEN.clear()
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    if listener is None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
    async with server, EgressProxy(listener, AllowedHosts.of(entries), _resolve) as proxy:
        yield proxy, server.sockets[0].getsockname()[1]


async def said(proxy: EgressProxy, request: str) -> str:
    """Return what the proxy answers to a request's bytes."""
    reader, writer = await asyncio.open_connection(*proxy.listener.getsockname())
    writer.write(request.encode("latin-1"))
    async with asyncio.timeout(LIMIT_S):
        answer = await reader.read()
    writer.close()
    return answer.decode("latin-1")


def get(target: str) -> str:
    return f"GET {target} HTTP/1.1\r\nHost: elsewhere.test\r\nProxy-Authorization: x\r\n\r\n"


def run(body: Callable[[EgressProxy, int], Awaitable[None]], *entries: str) -> None:
    async def main() -> None:
        async with proxied(*entries) as (proxy, port):
            await body(proxy, port)

    asyncio.run(main())


def test_a_request_reaches_an_allowed_host_under_its_own_name() -> None:
    async def body(proxy: EgressProxy, port: int) -> None:
        assert (await said(proxy, get(f"http://Good.test.:{port}/a?b"))).endswith("hello")
        assert SEEN[-1] == f"GET /a?b HTTP/1.1\r\nHost: Good.test.:{port}\r\nConnection: close\r\n\r\n".encode()
        post = f"POST http://a.wild.test:{port}/ HTTP/1.1\r\nContent-Length: 4\r\n\r\nbodyGET /second HTTP/1.1\r\n\r\n"
        assert (await said(proxy, post)).endswith("hello")
        assert SEEN[-1].endswith(b"\r\n\r\nbody")
        tunnel = f"CONNECT good.test:{port} HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n"
        answer = await said(proxy, tunnel)
        assert answer.startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
        assert len(SEEN) == 3
        assert not proxy.refused

    run(body, "good.test", "*.wild.test", HERE)


@pytest.mark.parametrize(
    "host",
    [
        "bad.test",
        "wild.test",
        "notgood.test",
        "good.test.bad.test",
        "[::1]",
        "[::ffff:10.0.0.1]",
        "10.0.0.1",
        "2130706433",
        "0x7f.1",
        "127.1",
        "good.test@bad.test",
    ],
)
def test_other_hosts_are_refused_by_name_and_by_address(host: str) -> None:
    async def body(proxy: EgressProxy, port: int) -> None:
        for request in (get(f"http://{host}:{port}/"), f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n"):
            assert (await said(proxy, request)).startswith("HTTP/1.1 403 Forbidden")
        assert SEEN == []
        assert list(proxy.refused.values()) == [2]

    run(body, "good.test", "*.wild.test", HERE)


def test_an_allowed_name_does_not_lead_to_this_machine_or_its_neighbours() -> None:
    async def body(proxy: EgressProxy, port: int) -> None:
        answer = await said(proxy, get(f"http://good.test:{port}/"))
        assert "does not allow the address of good.test" in answer
        assert SEEN == []

    run(body, "good.test", "*.test")


def test_a_redirect_is_checked_like_any_request() -> None:
    async def body(proxy: EgressProxy, port: int) -> None:
        answer = await said(proxy, get(f"http://good.test:{port}/away"))
        location = next(line for line in answer.splitlines() if line.startswith("Location: ")).partition(" ")[2]
        assert (await said(proxy, get(location))).startswith("HTTP/1.1 403")

    run(body, "good.test", HERE)


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        ("GET / HTTP/1.1\r\n\r\n", "400"),
        ("GET ftp://good.test/ HTTP/1.1\r\n\r\n", "400"),
        ("CONNECT good.test HTTP/1.1\r\n\r\n", "400"),
        ("CONNECT good.test:99999 HTTP/1.1\r\n\r\n", "400"),
        ("nonsense\r\n\r\n", "400"),
        ("GET http://good.test/ HTTP/1.1\r\nContent-Length: many\r\n\r\n", "400"),
        ("POST http://good.test/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "411"),
        (f"GET http://good.test/ HTTP/1.1\r\nx: {'x' * 70_000}\r\n\r\n", "431"),
        ("CONNECT localhost\0.wild.test:80 HTTP/1.1\r\n\r\n", "400"),
        ("CONNECT .wild.test:80 HTTP/1.1\r\n\r\n", "400"),
        ("CONNECT a..wild.test:80 HTTP/1.1\r\n\r\n", "400"),
        (f"CONNECT {'a' * 64}.wild.test:80 HTTP/1.1\r\n\r\n", "400"),
        ("CONNECT b\xfccher.wild.test:80 HTTP/1.1\r\n\r\n", "400"),
        ("CONNECT a\xad.wild.test:80 HTTP/1.1\r\n\r\n", "400"),
        ("CONNECT good.test:1 HTTP/1.1\r\n\r\n", "502"),
    ],
)
def test_bad_requests_are_answered(request_head: str, status: str) -> None:
    async def body(proxy: EgressProxy, port: int) -> None:
        del port
        assert (await said(proxy, request_head)).startswith(f"HTTP/1.1 {status} ")

    run(body, "good.test", "*.wild.test", HERE)


@pytest.mark.parametrize(
    "entry", ["", "http://a.test", "a.test:80", "*", "a b", "-a.test", "1.2.3.0/33", "*.*.a", "[::1]", "a..b"]
)
def test_entries_that_are_no_hosts_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host name"):
        AllowedHosts.of([entry])
    with pytest.raises(ValueError, match="in its ASCII form, which begins with xn--"):
        AllowedHosts.of(["bücher.example"])


@pytest.mark.parametrize(
    "entry", ["XN--Bcher-KVA.example.", "my_host.example", "*.Example.", "2001:DB8::/32", "1.2.3.4"]
)
def test_entries_are_hosts_in_any_case_and_with_a_dot_at_the_end(entry: str) -> None:
    assert AllowedHosts.of([entry]) == AllowedHosts.of([entry.lower().rstrip(".")])


@pytest.mark.proof
def test_a_sandbox_has_the_proxy_and_no_other_way_out(sandboxes_of: SharedSandboxes) -> None:
    fetch = (
        "import urllib.request as u, socket, sys\n"
        "print(u.urlopen(sys.argv[1]).read())\n"
        "try: u.urlopen(sys.argv[1].replace('good', 'bad'))\n"
        "except u.HTTPError as error: print(error.code)\n"
        "try: socket.create_connection(('127.0.0.1', int(sys.argv[2])))\n"
        "except OSError as error: print('no way')\n"
    )

    async def main() -> None:
        sandbox: Any = await sandboxes_of("bubblewrap").create("job.1")
        try:
            listening = await sandbox.listen(3128)
            async with proxied("good.test", HERE, listener=listening.listener) as (proxy, port):
                variables = proxy_variables(proxy.listener.getsockname()[1])
                command = ["/usr/bin/python3", "-c", fetch, f"http://good.test:{port}/", str(port)]
                result = await sandbox.exec(command, LIMIT_S, environment=variables)
            assert result.stdout.decode().split("\n")[:3] == ["b'hello'", "403", "no way"], result.stderr
        finally:
            await sandbox.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("93.184.215.14", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("168.63.129.16", False),
        ("192.0.0.192", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:a9fe:a9fe::1", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b:1::a9fe:a9fe", False),
        ("::a9fe:a9fe", False),
        ("fec0::1", False),
        ("fe80::1%lo", False),
        ("100.100.100.200", False),
        ("2606:2800:21f:cb07::1", True),
    ],
)
def test_public_means_none_of_this_machine_or_its_cloud(address: str, reached: bool) -> None:
    listener: Any = None
    proxy = EgressProxy(listener, AllowedHosts(every=True))
    assert proxy._may_connect(ipaddress.ip_address(address), named=True) == reached


def test_no_listed_network_has_the_secrets_of_a_cloud() -> None:
    listener: Any = None
    proxy = EgressProxy(listener, AllowedHosts.of(["100.64.0.0/10", "fd00::/8", "168.63.129.16"]))
    for address, reached in (
        ("100.64.0.1", True),
        ("fd00::1", True),
        ("100.100.100.200", False),
        ("fd00:ec2::254", False),
        ("168.63.129.16", False),
    ):
        assert proxy._may_connect(ipaddress.ip_address(address), named=False) == reached
