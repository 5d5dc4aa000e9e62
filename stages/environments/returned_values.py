"""Checks of what an adapter returns, so that errors name the method and the value. Standard library only.

Values are converted to plain data, as JSON can carry them.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

OBSERVATION_LIMIT = 1_000_000
"""Most characters of what one player sees at a time."""
TOOLS_LIMIT = 1_000_000
"""Most characters of all tools together, as JSON."""
INFO_LIMIT, NOTE_LIMIT, NAME_LIMIT = 64, 4000, 128
"""Most entries of `info` that are kept, and most characters of a text and of a name in it."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,100}")
"""What models can write as a tool's name."""
LARGEST_REWARD = 3.4028234663852886e38
"""As in `data.conversations`, which this interpreter cannot import."""
ROLES = ("system", "user", "assistant")


class Invalid(Exception):
    """An adapter returned something that its contract excludes."""


def checked_step(do: str, value: Any) -> dict[str, Any]:
    """Return what a method of a world returned as plain data; raise `Invalid` if the contract excludes it."""
    known = (
        ("observations", "tools") if do == "open" else ("observations", "rewards", "done", "truncated", "info", "mask")
    )
    given = _mapping(do, value, "what it returned")
    if unknown := [key for key in given if key not in known]:
        raise Invalid(f"{do} returned the unknown entry {unknown[0]!r:.100}; known are {', '.join(known)}")
    observations = _mapping(do, given.get("observations") or {}, "observations")
    if do == "open" and not observations:
        raise Invalid("open returned no observations, so no player can act")
    checked: dict[str, Any] = {
        "observations": {_name(do, player): _observation(do, player, seen) for player, seen in observations.items()}
    }
    if do == "open":
        checked["tools"] = _tools(given.get("tools") or ())
        return checked
    if rewards := _mapping(do, given.get("rewards") or {}, "rewards"):
        checked["rewards"] = {
            _name(do, player): _number(do, f"the reward of {player}", one) for player, one in rewards.items()
        }
    for key in ("done", "truncated"):
        checked[key] = bool(given.get(key, False))
    checked["info"] = _info(given.get("info") or {})
    if given.get("mask"):
        checked["mask"] = str(given["mask"])[:NOTE_LIMIT]
    return checked


def checked_outcome(value: Any) -> dict[str, Any]:
    known = ("reward", "rewards", "turn_rewards", "metrics", "error", "mask")
    given = _mapping("run", value, "what it returned")
    if unknown := [key for key in given if key not in known]:
        raise Invalid(f"run returned the unknown entry {unknown[0]!r:.100}; known are {', '.join(known)}")
    checked: dict[str, Any] = {key: str(given[key])[:NOTE_LIMIT] for key in ("error", "mask") if given.get(key)}
    if not checked:
        checked["reward"] = _number("run", "the reward", given.get("reward"))
    rewards = _mapping("run", given.get("rewards") or {}, "rewards")
    checked["rewards"] = {
        _name("run", name): _number("run", f"the reward of {name}", one) for name, one in rewards.items()
    }
    turns = given.get("turn_rewards")
    turns = {} if turns is None else turns
    pairs = turns.items() if hasattr(turns, "items") else enumerate(turns)
    checked["turn_rewards"] = [[int(turn), _number("run", f"the reward of turn {turn}", one)] for turn, one in pairs]
    checked["metrics"] = {
        key: one for key, one in _info(given.get("metrics") or {}).items() if not isinstance(one, str)
    }
    return checked


def _mapping(do: str, value: Any, what: str) -> Any:
    if not hasattr(value, "items"):
        raise Invalid(f"{do} returned {value!r:.100}; {what} must be a dict")
    return value


def _name(do: str, name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT:
        raise Invalid(f"{do} returned the player {name!r:.100}; a text of 1 to {NAME_LIMIT} characters is allowed")
    return name


def _number(do: str, what: str, value: Any) -> float:
    number = _float(value)
    if not -LARGEST_REWARD <= number <= LARGEST_REWARD:
        raise Invalid(f"{do} returned {value!r:.100} as {what}; a finite number is allowed")
    return number


def _float(value: Any) -> float:
    """Return a number of any type as a float; NaN: it is none, or too large."""
    try:
        return math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except Exception:  # noqa: BLE001 - arrays raise many kinds
        return math.nan


def _observation(do: str, player: str, seen: Any) -> str | list[dict[str, str]]:
    checked: str | list[dict[str, str]]
    if isinstance(seen, str):
        size, checked = len(seen), seen
    elif isinstance(seen, (list, tuple)) and seen:
        checked = [_message(do, player, message) for message in seen]
        size = sum(len(message["content"]) for message in checked)
    else:
        raise Invalid(f"{do} returned {seen!r:.100} as what {player} sees; a text or a list of messages is allowed")
    if size > OBSERVATION_LIMIT:
        raise Invalid(
            f"{do} returned an observation of {size:,} characters for player {player}; "
            f"at most {OBSERVATION_LIMIT:,} are allowed"
        )
    return checked


def _message(do: str, player: str, message: Any) -> dict[str, str]:
    try:
        role, content = message["role"], message["content"]
    except (TypeError, KeyError):
        role = content = None
    if role not in ROLES or not isinstance(content, str):
        raise Invalid(
            f"{do} returned the message {message!r:.100} for {player}; it needs a role of {', '.join(ROLES)}, "
            "and a text as content"
        )
    return {"role": role, "content": content}


def _tools(tools: Iterable[Any]) -> list[dict[str, Any]]:
    checked, seen = [], set()
    for tool in tools:
        try:
            name, parameters = tool["name"], tool.get("parameters") or {}
            about, players = tool.get("description") or "", tool.get("players")
            fits = isinstance(name, str) and TOOL_NAME.fullmatch(name) is not None
            fits = fits and isinstance(parameters, dict) and isinstance(about, str)
            fits = fits and (players is None or isinstance(players, list))
        except (TypeError, KeyError, AttributeError):
            fits = False
        if not fits:
            raise Invalid(
                f"open returned the tool {tool!r:.100}; it needs a name of letters, digits and _ . : / -, "
                "a description, and parameters as a JSON schema"
            )
        checked.append({"name": name, "description": about, "parameters": parameters})
        if players is not None:
            checked[-1]["players"] = [_name("open", player) for player in players]
        for player in checked[-1].get("players", ("all players",)):
            if (name, player) in seen:
                raise Invalid(f"open returned two tools named {name} for {player}")
            seen.add((name, player))
    try:
        size = len(json.dumps(checked, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"open returned tools that JSON cannot carry: {error}") from error
    if size > TOOLS_LIMIT:
        raise Invalid(f"open returned tools of {size:,} characters; at most {TOOLS_LIMIT:,} are allowed")
    return checked


def _info(info: Any) -> dict[str, float | str]:
    kept: dict[str, float | str] = {}
    for key, value in list(info.items())[:INFO_LIMIT] if hasattr(info, "items") else ():
        number = _float(value)
        if isinstance(value, str):
            kept[str(key)[:NAME_LIMIT]] = value[:NOTE_LIMIT]
        elif math.isfinite(number):
            kept[str(key)[:NAME_LIMIT]] = number
    return kept
