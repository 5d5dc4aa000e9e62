"""Key files: one CURVE key pair per trainer, node and service, and the service's list of allowed keys.

    FOLDER/                 0700
      NAME.secret           0600   an own key pair
      NAME.pub              0644   its public half, to be shared; or the public key of the service to connect to
      allowed/NAME.pub      0644   an allowed key, with its role
      allowed/NAME.bearer   0600   the SHA-256 of a bearer token allowed at HTTP gateways, and its role

The role in a file counts only in `allowed/`, which the service's owner writes. Files are created with their final mode
and never overwritten. As with ssh, a secret that others can read is refused.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import zmq

from ..errors import ConfigError
from ..system.logs import keep_secret
from ..wire.messages.base import CurveKey, Identifier, JobIdentifier, KeyRole

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET, PUBLIC, BEARER, ALLOWED = ".secret", ".pub", ".bearer", "allowed"
VARIABLE = "PRORL_KEYS"
"""The environment variable that names a key folder."""
FILE_LIMIT_BYTES = 4096
BEARER_ROLES = (KeyRole.TRAINER, KeyRole.OPERATOR)
"""What a bearer token may be for."""
TOKEN_PREFIX = "prorl_"  # noqa: S105 - so that scanners of published code know a token when they see one

T = TypeVar("T")


class PublicKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who has the other half of this key."""

    name: Identifier
    role: KeyRole
    public_key: CurveKey


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An own key. No text of the object contains its secret half."""

    name: Identifier
    role: KeyRole
    public_key: CurveKey
    secret_key: CurveKey

    def __repr__(self) -> str:
        return f"KeyPair({self.name!r}, {str(self.role)!r}, {self.public_key!r})"

    @property
    def public(self) -> PublicKey:
        """The half that may be given away."""
        return PublicKey(self.name, self.role, self.public_key)


class BearerKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The owner of a bearer token. The token itself is not stored."""

    name: JobIdentifier
    role: KeyRole
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


def token_digest(token: str) -> str:
    """Return the stored form of a bearer token; with 256 random bits, a plain digest discloses nothing."""
    import hashlib  # later: it loads OpenSSL, which no client needs

    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class KeyFolder:
    """A folder of key files; `path` may also be one secret file in it, which is then the only key of ours.

    Raises:
        ConfigError: (by each method) the folder or a file is not there, not private, or not what it should be.
    """

    def __init__(self, path: Path) -> None:
        self._only = path if path.suffix == SECRET else None
        self.path = path.parent if self._only is not None else path

    # What a process uses ----------------------------------------------------------------------------------------------

    def own(self, *roles: KeyRole) -> KeyPair:
        """Return the key of ours that has one of these roles, the first that there is one of."""
        self._check_folder()
        pairs = [self._read_secret(path) for path in ([self._only] if self._only else self._files(SECRET))]
        for role in roles:
            fitting = [pair for pair in pairs if pair.role == role]
            if len(fitting) > 1:
                names = ", ".join(f"{pair.name}{SECRET}" for pair in fitting)
                raise _wrong(f"{self.path} has several keys of role {role} ({names}); name one of these files instead")
            if fitting:
                return fitting[0]
        wanted = " or ".join(roles)
        raise _wrong(f"{self.path} has no key of role {wanted}; make one with `prorl keys new NAME --role {roles[0]}`")

    def service(self) -> PublicKey:
        """Return the public key of the service that the other keys are for."""
        self._check_folder()
        keys = [key for path in self._files(PUBLIC) if (key := _read(path, PublicKey)).role == KeyRole.SERVICE]
        if len(keys) == 1:
            return keys[0]
        if keys:
            names = ", ".join(f"{key.name}{PUBLIC}" for key in keys)
            raise _wrong(f"{self.path} has the public keys of several services ({names}); use one folder for each")
        raise _wrong(f"{self.path} lacks the service's public key; copy service{PUBLIC} from the service's key folder")

    def allowed(self, on_problem: Callable[[ConfigError], None] | None = None) -> list[PublicKey]:
        """List the allowed keys; report each invalid file to `on_problem`, if given."""
        return self._let_in(PUBLIC, PublicKey, on_problem)

    def bearers(self, on_problem: Callable[[ConfigError], None] | None = None) -> list[BearerKey]:
        """List the bearer tokens allowed at gateways; `on_problem` as in `allowed`."""
        self._check_folder()
        return self._let_in(BEARER, BearerKey, on_problem)

    def _let_in(self, suffix: str, kind: type[T], on_problem: Callable[[ConfigError], None] | None) -> list[T]:
        keys = []
        for path in self._files(suffix, ALLOWED):
            try:
                keys.append(_read(path, kind))
            except ConfigError as error:
                if on_problem is None:
                    raise
                on_problem(error)
        return keys

    def allowed_state(self) -> object:
        """Return something that changes whenever a file of the list does."""
        try:
            with os.scandir(self.path / ALLOWED) as entries:
                return sorted((entry.name, (at := entry.stat()).st_ino, at.st_mtime_ns) for entry in entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _wrong(f"{self.path / ALLOWED} cannot be read: {error.strerror}") from error

    # What `prorl keys` does -------------------------------------------------------------------------------------------

    def new(self, name: str, role: KeyRole) -> PublicKey:
        """Make a key pair and its two files."""
        public, secret = (half.decode() for half in zmq.curve_keypair())
        pair = KeyPair(check_name(name), role, public, secret)
        self._make_folder()
        secret_path, public_path = self.path / f"{name}{SECRET}", self.path / f"{name}{PUBLIC}"
        if public_path.exists():
            raise _wrong(f"{public_path} is there already, and keys are never overwritten; choose another name")
        _create(secret_path, pair, 0o600, "# Keep this file to yourself.\n")
        _create(public_path, pair.public, 0o644)
        return pair.public

    def allow(self, file: Path, role: KeyRole) -> PublicKey:
        """Allow a key in this role."""
        key = msgspec.structs.replace(_read(file, PublicKey), role=role)
        if role == KeyRole.SERVICE:
            raise _wrong(
                "a service key is not added to a list: it checks the others; copy its .secret file to its brokers"
            )
        self._make_folder(ALLOWED)
        for other in self.allowed():
            if other.public_key == key.public_key:
                raise _wrong(f"this key is allowed already, as {other.name} ({other.role}); revoke that first")
        _create(self.path / ALLOWED / f"{key.name}{PUBLIC}", key, 0o644)
        return key

    def new_bearer(self, name: str, role: KeyRole) -> str:
        """Allow a new bearer token in this role, and return it. Only its hash is stored."""
        if role not in BEARER_ROLES:
            raise _wrong(f"a bearer token is for role {' or '.join(BEARER_ROLES)}, not {role}: it is for HTTP gateways")
        import secrets  # later: with hashlib

        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        try:
            key = msgspec.convert({"name": name, "role": role, "sha256": token_digest(token)}, BearerKey)
        except msgspec.ValidationError:
            raise _wrong(f"{name!r} cannot be a token's name: letters, digits and . _ - only, 64 at most") from None
        self._make_folder(ALLOWED)
        _create(self.path / ALLOWED / f"{key.name}{BEARER}", key, 0o600)
        return token

    def revoke(self, name: str) -> None:
        """Revoke a key or a bearer token."""
        paths = [self.path / ALLOWED / f"{check_name(name)}{suffix}" for suffix in (PUBLIC, BEARER)]
        there = [path for path in paths if path.exists()]
        for path in there:
            path.unlink(missing_ok=True)
        if not there:
            let_in = [*(key.name for key in self.allowed()), *(key.name for key in self.bearers())]
            names = ", ".join(let_in) or "none"
            raise _wrong(f"no key called {name} is allowed; allowed keys: {names}")

    def listing(self) -> tuple[list[PublicKey], list[PublicKey], list[PublicKey]]:
        """List own public keys, known services' keys, and allowed keys."""
        self._check_folder()
        own = [self._read_secret(path).public for path in self._files(SECRET)]
        known = [key for path in self._files(PUBLIC) if (key := _read(path, PublicKey)) not in own]
        return own, known, self.allowed()

    # Files ------------------------------------------------------------------------------------------------------------

    def _files(self, suffix: str, folder: str = "") -> list[Path]:
        try:
            return sorted(path for path in (self.path / folder).iterdir() if path.suffix == suffix)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _wrong(f"{self.path / folder} cannot be read: {error.strerror}") from error

    def _read_secret(self, path: Path) -> KeyPair:
        with contextlib.suppress(OSError):  # what cannot be looked at cannot be read either, and `_read` says so
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise _wrong(f"{path} can be read by others (mode {mode:04o}) and is not used: chmod 600 {path}")
        pair = _read(path, KeyPair)
        if zmq.curve_public(pair.secret_key.encode()).decode() != pair.public_key:
            raise _wrong(f"the two halves of {path} do not belong together; make a new key")
        keep_secret(pair.secret_key)
        return pair

    def _check_folder(self) -> None:
        """Raise if others could change who we trust."""
        try:
            state = self.path.stat()
        except OSError as error:
            raise _wrong(
                f"the key folder {self.path} cannot be used: {error.strerror}; `prorl keys new` makes one"
            ) from error
        if not stat.S_ISDIR(state.st_mode):
            raise _wrong(f"{self.path} is neither a key folder nor a {SECRET} file")
        if state.st_uid not in (os.getuid(), 0):
            raise _wrong(f"the key folder {self.path} belongs to another user; use one of your own")
        if state.st_mode & 0o022:
            raise _wrong(f"others can change files of the key folder {self.path}: chmod 700 {self.path}")

    def _make_folder(self, below: str = "") -> None:
        for path in dict.fromkeys((self.path, self.path / below)):
            try:
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise _wrong(f"{path} cannot be made: {error.strerror}") from error
            self._check_folder()


def default_folder() -> Path:
    """Return the folder that `prorl keys` works on if none is named: `$PRORL_KEYS`, or one in the home directory."""
    return named_folder() or Path.home() / ".config" / "prorl" / "keys"


def named_folder(keys: Path | str | None = None) -> Path | None:
    """Return the key folder (or secret file) that was named, there or in `$PRORL_KEYS`; None: no keys are used."""
    named = str(keys or os.environ.get(VARIABLE) or "")
    return Path(named).expanduser() if named else None


def _create(path: Path, key: msgspec.Struct, mode: int, comment: str = "") -> None:
    """Write a new key file whose mode is right from the start and which is complete once it has its name."""
    text = comment + "".join(f'{name} = "{value}"\n' for name, value in msgspec.structs.asdict(key).items())
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # of a command that was killed
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, mode)  # whatever the umask
            file.write(text)
        try:
            os.link(part, path)  # unlike a rename it never replaces a file
        finally:
            part.unlink()
    except FileExistsError:
        raise _wrong(f"{path} is there already, and keys are never overwritten; choose another name") from None
    except OSError as error:
        raise _wrong(f"{path} cannot be written: {error.strerror}") from error


def _read(path: Path, kind: type[T]) -> T:
    """Read a key file. What it holds is not in any error."""
    import tomllib  # later: over ipc no keys are read

    try:
        with path.open("rb") as file:
            data = tomllib.loads(file.read(FILE_LIMIT_BYTES).decode("utf-8"))
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise _wrong(f"{path} is not a key file of `prorl keys`") from None
    if kind is PublicKey and "secret_key" in data:
        raise _wrong(f"{path} holds a secret key; give away its {PUBLIC} file, never this one")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _wrong(f"{path} is not a key file of `prorl keys`: {error}") from None


def check_name(name: str) -> str:
    """Return a key's name back if it is one.

    Raises:
        ConfigError: it is not, or could not be a file's.
    """
    try:
        return msgspec.convert(name, Identifier)
    except msgspec.ValidationError:
        raise _wrong(f"{name!r} cannot be a key's name: letters, digits and . _ : - only, 128 at most") from None


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, key="security.keys")
