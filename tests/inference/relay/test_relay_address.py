"""The address of a trainer's relay: what is refused, and which one engine hosts may not reach."""

from __future__ import annotations

import pytest

from prorl_zmq.errors import InvalidEndpoint
from prorl_zmq.inference.relay.relay_address import check_relay_address, warn_of_unreached
from prorl_zmq.wire.messages.backends import Backend

HERE = Backend(backend_id="here", endpoint="tcp://127.0.0.1:4000")
LOCAL = Backend(backend_id="local", endpoint="ipc:///run/local")
THERE = Backend(backend_id="there", endpoint="tcp://10.0.0.7:4000")


def test_an_address_beyond_loopback_needs_keys_of_the_client() -> None:
    with pytest.raises(InvalidEndpoint, match=r"--role trainer.*RolloutClient\(…, keys=FOLDER\)"):
        check_relay_address("tcp://10.0.0.5:*", has_keys=False)
    check_relay_address("tcp://10.0.0.5:*", has_keys=True)
    check_relay_address("tcp://127.0.0.1:*", has_keys=False)
    check_relay_address("ipc:///run/relay", has_keys=False)


@pytest.mark.parametrize("relay", ["tcp://127.0.0.1", "tcp://10.0.0.5", "10.0.0.5:*"])
def test_an_address_without_port_or_transport_is_named_as_such(relay: str) -> None:
    with pytest.raises(InvalidEndpoint, match=r"is not ipc://PATH or tcp://HOST:PORT"):
        check_relay_address(relay, has_keys=False)


@pytest.mark.parametrize("relay", ["tcp://127.0.0.1:*", "ipc:///run/relay"])
def test_hosts_elsewhere_are_named_if_only_this_machine_reaches_the_relay(
    relay: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unreached(relay, [HERE, LOCAL])
    warn_of_unreached("tcp://10.0.0.5:*", [THERE])
    assert not caplog.records
    warn_of_unreached(relay, [HERE, THERE, LOCAL])
    (record,) = caplog.records
    assert "on other machines: there. They" in record.getMessage()
