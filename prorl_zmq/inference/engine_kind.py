"""`EngineKind`: what makes an engine available to `prorl serve`, `prorl eval`, `prorl doctor` and `prorl-engine`.

A kind is one class and one line in a package's entry points:

    [project.entry-points."prorl_zmq.engines"]
    scripted = "my_package.scripted:ScriptedKind"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..config import ENGINE_KINDS, engine_kind
from ..errors import ConfigError
from ..system.plugins import offered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .engine import Engine


class EngineKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of engine; an instance is the engine to start, and its fields are the kind's options.

    A field without a default is required; errors quote the description of its `msgspec.Meta`.
    Fields named as a key of `[[backends]]` (`model`, `arguments`, `tokenizer` …) are set by that key and by the flag
    of `prorl-engine`; `url` is one of `urls`, with one engine for each. Fields of other names are set by
    `options = { NAME = VALUE }`, and by `--option NAME=VALUE` of `prorl-engine` and `prorl eval`. `__post_init__` may
    refuse values with `ConfigError`.

    The class is imported wherever a topology is read, so its module imports what is heavy only in its methods.
    """

    @classmethod
    def problem(cls) -> str:
        """Return why this environment cannot run the kind, and the remedy; empty if it can. For `prorl doctor`."""
        return ""

    @classmethod
    def summary(cls) -> str:
        """Return the text of `prorl doctor` for a kind that can run here; by default, the class's first line."""
        return (cls.__doc__ or "can run here").splitlines()[0]

    def check(self) -> None:
        """Check quickly, on the machine that will run the engine, for example that files exist.

        Raises:
            ConfigError: it cannot be started; `key` names the option.
        """

    async def start(self, weight_version: int) -> Engine:
        """Start the engine; return it once it can serve. May take minutes.

        Args:
            weight_version: the version of the weights that the engine starts with.

        Raises:
            ConfigError, InvalidWeights: an option is wrong.
            EngineFailed: the engine cannot start.
        """
        raise NotImplementedError


def examine_kinds() -> Iterator[tuple[str, str, str]]:
    """Return each installed engine kind: name, why it cannot run here (empty: it can), and summary."""
    for name in offered(ENGINE_KINDS):
        try:
            kind: type[EngineKind] = engine_kind(name)
            yield name, kind.problem(), kind.summary()
        except ConfigError as error:
            yield name, error.message, ""
        except Exception as error:  # noqa: BLE001 - a broken class of another package
            yield name, f"{type(error).__name__}: {error}", ""
