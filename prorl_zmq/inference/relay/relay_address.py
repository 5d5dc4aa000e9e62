"""Checks of the address at which a trainer serves its weights."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...errors import InvalidEndpoint
from ...wire.sockets import check_endpoint, is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.backends import Backend

log = logging.getLogger("prorl.trainer")


def check_relay_address(relay: str, *, has_keys: bool) -> None:
    """Check an address to bind.

    Raises:
        InvalidEndpoint: it is malformed, or needs keys that the trainer's client does not have.
    """
    check_endpoint(relay)
    if relay.startswith("tcp://") and not is_loopback(relay) and not has_keys:
        raise InvalidEndpoint(
            f"relay={relay!r} is reachable from other machines, and the trainer's client has no keys: make one with "
            "`prorl keys new NAME --role trainer`, and give `RolloutClient(…, keys=FOLDER)` (docs/security.md)",
            endpoint=relay,
        )


def warn_of_unreached(relay: str, backends: Iterable[Backend]) -> None:
    """Log a warning if engine hosts seem to be on machines that do not reach the address."""
    if relay.startswith("tcp://") and not is_loopback(relay):
        return
    over_tcp = [one for one in backends if one.endpoint.startswith("tcp://")]
    elsewhere = [one.backend_id for one in over_tcp if not is_loopback(one.endpoint)]
    if elsewhere:
        log.warning(
            "only this machine reaches relay=%r, but these engine hosts may be on other machines: %s. They need "
            "relay='tcp://ADDRESS:*' with an address of this machine that they reach",
            relay,
            ", ".join(elsewhere),
        )
