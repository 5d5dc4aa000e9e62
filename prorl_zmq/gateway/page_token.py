"""`PageToken`: the token of a dashboard whose key folder has no bearer token, against other users of the machine.

It is stored in the run folder, which only this user can read, so the page's address survives a restart. Its holder has
all rights.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import TYPE_CHECKING

from ..errors import ConfigError, NotAllowed
from ..security.rights import ANYBODY

if TYPE_CHECKING:
    from pathlib import Path

    from ..security.rights import Sender

BYTES = 24


class PageToken:
    """Checks tokens, like `BearerList`.

    Raises:
        ConfigError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "r+", encoding="ascii") as file:
                self.token = file.read().strip()
                if not self.token:
                    self.token = secrets.token_urlsafe(BYTES)
                    file.write(self.token)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{path}, the dashboard's token, cannot be used: {error}", key="run_dir") from error

    def __len__(self) -> int:
        return 1

    def sender(self, token: str) -> Sender:
        """Return the owner of a token.

        Raises:
            NotAllowed: it is another token.
        """
        if hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.token.encode()):
            return ANYBODY
        raise NotAllowed("this needs the key that `prorl dashboard` has printed with its address, behind `#key=`")
