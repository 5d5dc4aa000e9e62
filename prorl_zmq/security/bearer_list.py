"""The list of allowed bearer tokens, for HTTP requests, reread when the key folder's `allowed/` changed.

A revoked token is refused after at most `REREAD_S`. If the list cannot be read, the last one stays in force.
"""

from __future__ import annotations

import hmac
import logging
import time
from typing import TYPE_CHECKING

from ..errors import ConfigError, NotAllowed
from .allow_list import REREAD_S
from .keys import BEARER_ROLES, token_digest
from .rights import ANYBODY, Sender

if TYPE_CHECKING:
    from .keys import BearerKey, KeyFolder

log = logging.getLogger("prorl.security")


class BearerList:
    """The allowed tokens; without a folder, every request is allowed.

    Raises:
        ConfigError: the key folder is not there, or not private.
    """

    def __init__(self, folder: KeyFolder | None) -> None:
        self._folder = folder
        self._keys: list[BearerKey] = folder.bearers(_say) if folder is not None else []
        self._state = folder.allowed_state() if folder is not None else None
        self._read_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._keys)

    def sender(self, token: str) -> Sender:
        """Say who has a token; empty: the request had none.

        Raises:
            NotAllowed: the token is missing or not allowed.
        """
        if self._folder is None:
            return ANYBODY
        self._reread(self._folder)
        digest = token_digest(token)
        found = [key for key in self._keys if hmac.compare_digest(key.sha256, digest)]
        if not found or found[0].role not in BEARER_ROLES:
            what = "this bearer token is not allowed" if token else "the request has no bearer token"
            raise NotAllowed(f"{what}; `prorl keys bearer NAME --role ROLE` makes one, sent as `Authorization: Bearer`")
        return Sender(found[0].role, found[0].name)

    def _reread(self, folder: KeyFolder) -> None:
        if time.monotonic() < self._read_at + REREAD_S:
            return
        self._read_at = time.monotonic()
        try:
            if (state := folder.allowed_state()) != self._state:
                self._keys, self._state = folder.bearers(_say), state
        except ConfigError as error:
            log.error("the list of bearer tokens stays as it was: %s", error.message)  # noqa: TRY400 - it says it all


def _say(error: ConfigError) -> None:
    log.error("%s", error.message)
