from __future__ import annotations

import msgspec
import pytest

from prorl_zmq.tools.images.image import Manifest, Mode, Recipe, decide

RECIPE = Recipe(
    source="/a",
    format="directory",
    definition="d",
    base="b",
    lock="l",
    maker="apptainer",
    version="1",
    recipe_version=1,
)
THERE = Manifest(name="x", mode="versioned", recipe=RECIPE, reason="", built_at_s=0, took_s=0, size_bytes=0)
OTHER = {
    "source": "/b",
    "format": "sif",
    "definition": "D",
    "base": "B",
    "lock": "L",
    "maker": "copy",
    "version": "2",
    "recipe_version": 2,
}
REBUILDS: dict[Mode, set[str]] = {
    "scratch": set(OTHER),
    "versioned": {"source", "format", "definition", "base", "maker", "version", "recipe_version"},
    "lock": {"source", "format", "definition", "lock"},
}


def test_every_field_of_a_recipe_is_decided_about() -> None:
    assert set(OTHER) == set(Recipe.__struct_fields__)


@pytest.mark.parametrize("mode", REBUILDS)
@pytest.mark.parametrize("field", OTHER)
def test_each_mode_rebuilds_for_its_own_fields(mode: Mode, field: str) -> None:
    wanted = msgspec.structs.replace(RECIPE, **{field: OTHER[field]})
    verdict = decide(mode, wanted, THERE)
    assert verdict.reuse == (field not in REBUILDS[mode])
    assert verdict.reason


def test_nothing_is_there() -> None:
    assert decide("versioned", RECIPE, None) == (False, "there is no image of this name yet")


def test_unchanged() -> None:
    assert decide("scratch", RECIPE, THERE) == (False, "mode scratch always builds")
    assert decide("versioned", RECIPE, THERE) == (True, "source, base image and version are unchanged")
    assert decide("lock", RECIPE, THERE) == (True, "source and lock file are unchanged")


def test_reasons_name_what_changed() -> None:
    wanted = msgspec.structs.replace(RECIPE, version="2", base="B")
    assert decide("versioned", wanted, THERE).reason == (
        "the base image changed; the version of prorl-zmq changed (1 → 2)"
    )
    without_lock = msgspec.structs.replace(THERE, recipe=msgspec.structs.replace(RECIPE, lock=""))
    assert decide("lock", RECIPE, without_lock).reason == "it was built without a lock file"


def test_scratch_takes_what_was_built_at_the_same_time_only_if_it_is_the_same_in_everything() -> None:
    assert decide("scratch", RECIPE, THERE, waited=True).reuse
    for field, value in OTHER.items():
        wanted = msgspec.structs.replace(RECIPE, **{field: value})
        assert not decide("scratch", wanted, THERE, waited=True).reuse
