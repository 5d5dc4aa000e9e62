"""A small project with tests of its own, and an image store with a base for it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from needed import lacking, usable
from rootfs import root_filesystem

from prorl_zmq.errors import SandboxFailed, SandboxUnavailable
from prorl_zmq.make_swe.project_image import DEBOOTSTRAP
from prorl_zmq.tools.images.image import lock_image
from prorl_zmq.tools.images.image_store import ImageStore

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = '''"""Prices."""


def total(prices, discount=0):
    """Give the sum of prices, less a discount in percent."""
    if discount < 0 or discount > 100:
        raise ValueError("discount")
    result = 0
    for price in prices:
        if price <= 0:
            continue
        result += price
    return result - result * discount // 100


def label(name, width=10):
    """Give a name that fits into a width."""
    text = name.strip()
    if len(text) > width:
        return text[: width - 1] + "…"
    return text


def cheapest(prices, limit=3):
    """Give the lowest prices."""
    found = sorted(prices)
    return found[:limit]


def parse(line, separator=","):
    """Give name and price of a line."""
    name, _, price = line.partition(separator)
    if not price:
        raise KeyError(line)
    return label(name), int(price)
'''
TESTS = """import pytest
from shop import prices


@pytest.mark.parametrize("given, expected", [([1, 2], 3), ([5], 5), ([], 0), ([4, 0], 4)])
def test_total(given, expected):
    assert prices.total(given) == expected


@pytest.mark.parametrize("text", ["a b", "c d"])
def test_name_with_a_space_in_its_id(text):
    assert prices.label(text) == text


def test_discount():
    assert prices.total([100, 50], 10) == 135
    assert prices.total([100], 100) == 0


@pytest.mark.parametrize("discount", [-1, 101])
def test_wrong_discount(discount):
    with pytest.raises(ValueError):
        prices.total([1], discount)


def test_short_label():
    assert prices.label(" tea ") == "tea"


def test_long_label():
    assert prices.label("black coffee") == "black cof…"


def test_label_of_full_width():
    assert prices.label("0123456789") == "0123456789"


def test_cheapest():
    assert prices.cheapest([3, 1, 2, 4]) == [1, 2, 3]


def test_cheapest_of_few():
    assert prices.cheapest([2, 1], limit=5) == [1, 2]


def test_parse():
    assert prices.parse("tea,3") == ("tea", 3)


def test_parse_other_separator():
    assert prices.parse("tea;4", ";") == ("tea", 4)


def test_parse_nothing():
    with pytest.raises(KeyError):
        prices.parse("tea")
"""
SETTINGS = """[project]
name = "shop"
version = "1.2"
license = "MIT"

[tool.pytest.ini_options]
addopts = "--cov=shop"
"""


@pytest.fixture
def write_project() -> Callable[..., Path]:
    """Give what writes a project in the layout with `src`, with things that do not belong into its repository."""

    def write(folder: Path, module: str = MODULE, tests: str = TESTS) -> Path:
        files = {
            "src/shop/__init__.py": "",
            "src/shop/prices.py": module,
            "tests/test_prices.py": tests,
            "pyproject.toml": SETTINGS,
            "src/shop.egg-info/PKG-INFO": "Name: shop\n",
            "src/shop/__pycache__/old.pyc": "x",
            ".git/HEAD": "ref: refs/heads/other\n",
            "build/lib/shop/prices.py": module,
        }
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "secret").symlink_to("/etc/passwd")
        return folder

    return write


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """A store that has a base image with Python and git, called `python-git`; skips the test without Apptainer."""
    usable("apptainer")
    base = root_filesystem()
    if not (base / "usr/bin/git").exists():
        kept = ImageStore(Path(tempfile.gettempdir()) / "prorl-test-rootfs")
        try:
            base = lock_image(kept.build(DEBOOTSTRAP, "debian-git").image.path).path
        except (SandboxFailed, SandboxUnavailable) as error:
            lacking("debootstrap", f"no base image with git: {error}")
    store = ImageStore(tmp_path / "images")
    store.root.mkdir()
    (store.root / "python-git").symlink_to(base)
    return store
