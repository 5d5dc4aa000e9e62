"""When an image that is there is used again: three modes, after the ProRL Agent paper.

- `scratch` always builds.
- `versioned` uses it again while its base image and the version of this package are unchanged.
- `lock` uses it again while the dependency lock file is the same, byte for byte; the base image and our version may
  change, since what the lock file pins is what the tasks depend on.

In each mode what was asked for counts too: another source, format or definition (its template filled in) is another
image. Only decisions are here: no files, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .image import Manifest, Mode, Recipe

ASKED_FOR = ("source", "format", "definition")
FIELDS: dict[Mode, tuple[str, ...]] = {
    "scratch": (),
    "versioned": (*ASKED_FOR, "base", "version", "recipe_version", "maker"),
    "lock": (*ASKED_FOR, "lock"),
}
"""What must be unchanged."""
ALL_FIELDS = tuple(dict.fromkeys(field for fields in FIELDS.values() for field in fields))
WORDS = {
    "source": "the source is another",
    "format": "the format is another",
    "definition": "the definition changed",
    "base": "the base image changed",
    "version": "the version of prorl-zmq changed",
    "recipe_version": "the way in which prorl-zmq builds images changed",
    "maker": "it was put together by another program",
    "lock": "the lock file changed",
}
SHOWN = frozenset({"source", "format", "version", "recipe_version", "maker"})
"""Fields short enough to be shown; digests say nothing to a person."""
UNCHANGED: dict[Mode, str] = {
    "scratch": "",
    "versioned": "source, base image and version are unchanged",
    "lock": "source and lock file are unchanged",
}


class Verdict(NamedTuple):
    reuse: bool
    reason: str


def decide(mode: Mode, wanted: Recipe, there: Manifest | None, *, waited: bool = False) -> Verdict:
    """Decide whether the image that is there is used again.

    `waited`: another process built it while this one waited for it to finish. Then it is used in mode `scratch` too, if
    it is the same in everything: both asked for it at the same time.
    """
    if there is None:
        return Verdict(reuse=False, reason="there is no image of this name yet")
    if waited and not changes(ALL_FIELDS, wanted, there.recipe):
        return Verdict(reuse=True, reason="another process built it just now")
    if mode == "scratch":
        return Verdict(reuse=False, reason="mode scratch always builds")
    changed = changes(FIELDS[mode], wanted, there.recipe)
    if changed:
        return Verdict(reuse=False, reason="; ".join(changed))
    return Verdict(reuse=True, reason=UNCHANGED[mode])


def changes(fields: tuple[str, ...], wanted: Recipe, there: Recipe) -> list[str]:
    found = []
    for field in fields:
        new, old = getattr(wanted, field), getattr(there, field)
        if new == old:
            continue
        if field == "lock" and not old:
            found.append("it was built without a lock file")
        else:
            found.append(f"{WORDS[field]} ({old} → {new})" if field in SHOWN else WORDS[field])
    return found
