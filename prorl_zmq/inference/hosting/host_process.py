"""The process of an engine host: it starts the engine, serves it until a signal, and says why it cannot."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import uvloop
import zmq

from ...errors import ConfigError, EngineFailed, InvalidWeights
from ...system.memory import give_memory_back
from ...system.processes import stop_signals
from ...system.traces import tracing
from ..chat.loading import chat_warning
from .host import CANNOT_START, EngineHost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..engine import Engine
    from .host import HostOptions

log = logging.getLogger("prorl.engine")


def run_engine_host(start: Callable[[], Awaitable[Engine]], options: HostOptions) -> None:
    """Run an engine host until SIGTERM or SIGINT; the main function of its process.

    Raises:
        ConfigError, InvalidWeights: the engine cannot be started with its settings, or the backend broker refuses them.
        EngineFailed: it could not start (`starting` is true), or ended for good.
        InvalidEndpoint, EndpointInUse: the endpoint cannot be bound.
    """

    async def main() -> None:
        stop = asyncio.Event()
        with stop_signals(stop.set):
            engine = await _started(start, stop)
            if engine is None:
                return
            try:
                warning = await chat_warning(engine.description.chat)
                host = EngineHost(context, engine, replace(options, warning=warning))
            except BaseException:
                await engine.close()
                raise
            log.info("engine %s serves at %s", options.backend_id, host.endpoint)
            await host.run(stop)

    give_memory_back()
    with zmq.Context() as context, tracing("engine", options.backend_id):
        uvloop.run(main())


async def _started(start: Callable[[], Awaitable[Engine]], stop: asyncio.Event) -> Engine | None:
    """Start an engine; None: a stop came first."""
    starting = asyncio.ensure_future(start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        await asyncio.sleep(0)  # a signal that ended the start reaches the loop only now
        if starting.exception() is not None and stop.is_set():
            return None
        try:
            return starting.result()
        except (ConfigError, InvalidWeights):
            raise
        except EngineFailed as error:
            raise EngineFailed(f"{CANNOT_START}{error.message}", starting=True) from error
        except Exception as error:
            log.exception("the engine failed to start")
            raise EngineFailed(f"{CANNOT_START}{type(error).__name__}: {error}", starting=True) from error
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close()
    return None
