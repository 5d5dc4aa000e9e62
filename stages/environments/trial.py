"""One rollout of an environment without a service: what its players see, for `prorl env test`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .environment_pool import EnvironmentPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .environment_pool import Opening, Step
    from .environment_template import EnvironmentPlace

SHOWN = 2000
"""Most characters of what a player sees that are shown."""


async def try_environment(place: EnvironmentPlace, args: dict[str, Any], seed: int | None, says: Sequence[str]) -> str:
    """Open an environment, let the players that act say something in turn, and close it; return what happened.

    Raises:
        EnvironmentFailed: it cannot be played.
    """
    pool, began = EnvironmentPool(1), time.monotonic()
    try:
        async with pool.rollout(place, "trial") as world:
            lines = [f"{place.name} is ready after {time.monotonic() - began:.1f} s"]
            if world.is_program:
                return f"{lines[0]}; it calls the model itself, so only a rollout can play it"
            opening = await world.open(args, seed)
            lines += _seen(opening)
            if opening.tools:
                lines.append(f"tools: {', '.join(str(tool['name']) for tool in opening.tools)}")
            acting, coming, unsaid = [*opening.observations], dict[str, object](), list(says)
            is_done = False
            while unsaid and (acting or coming) and not is_done:
                acting, coming = (acting, coming) if acting else ([*coming], {})
                player, text = acting.pop(0), unsaid.pop(0)
                lines.append(f"--- {player} says: {text}")
                step = await world.step(player, text)
                lines += [*_seen(step), f"rewards: {step.rewards or 'none'}; {'done' if step.done else 'not done'}"]
                coming, is_done = coming | dict(step.observations), step.done
            last = await world.close()
            if last.rewards:
                lines.append(f"rewards at the end: {last.rewards}")
            if unsaid:
                lines.append(f"not said, since no player was to act: {', '.join(unsaid)}")
    finally:
        await pool.close()
    return "\n".join(lines)


def _seen(answer: Opening | Step) -> list[str]:
    lines = []
    for player, seen in answer.observations.items():
        text = seen if isinstance(seen, str) else "\n".join(f"{one.role}: {one.content}" for one in seen)
        lines.append(f"--- {player} sees: {text[:SHOWN]}{'…' if len(text) > SHOWN else ''}")
    return lines
