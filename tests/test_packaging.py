"""What gets installed, and what importing the client costs a trainer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest

from prorl_zmq.system.installation import how_to_install

ROOT = Path(__file__).resolve().parents[1]
CLIENT_PACKAGES = {"pyzmq", "msgpack", "msgspec", "numpy"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, as a release would be."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    listed = ("prorl_zmq", "brokers", "stages", "tools", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in listed), str(source)], check=True)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.xdist_group("wheel")
def test_wheel_puts_only_prorl_zmq_into_site_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"prorl_zmq", next(top for top in tops if top.endswith(".dist-info"))}


@pytest.mark.xdist_group("wheel")
def test_wheel_has_every_source_file_and_the_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("prorl_zmq/")}
    expected = {f"prorl_zmq/{path.relative_to(ROOT / 'prorl_zmq')}" for path in (ROOT / "prorl_zmq").rglob("*.py")}
    for folder in ("brokers", "stages", "tools"):
        expected |= {f"prorl_zmq/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    assert expected <= packed
    assert {"prorl_zmq/py.typed", "prorl_zmq/service/topology.toml"} <= packed


def test_users_own_tools_folder_is_not_shadowed(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "mine.py").write_text("value = 7\n")
    code = "import prorl_zmq, prorl_zmq.tools.tool, tools.mine; print(tools.mine.value)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"


def test_base_install_is_the_clients() -> None:
    base = {line.split()[0] for line in requires("prorl-zmq") or () if "extra ==" not in line}
    assert {name.partition(">")[0] for name in base} == CLIENT_PACKAGES


def test_every_extra_is_offered() -> None:
    assert {"server", "vllm", "test"} <= set(distribution("prorl-zmq").metadata.get_all("Provides-Extra") or ())


def test_importing_the_client_brings_in_no_part_of_the_service() -> None:
    code = (
        "import sys; import prorl_zmq; "
        "prorl_zmq.RolloutClient('tcp://127.0.0.1:9').close(); "
        "print('\\n'.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    own = {name for name in loaded if name.startswith("prorl_zmq.")}
    own -= {
        "prorl_zmq.service",
        "prorl_zmq.service.service_folder",
    }  # where a client finds a service; nothing runs there
    assert not {name for name in own if name.split(".")[1] in {"brokers", "stages", "tools", "commands", "service"}}
    heavy = {
        "asyncio",
        "typer",
        "rich",
        "click",
        "aiohttp",
        "uvloop",
        "matplotlib",
        "IPython",
        "jupyter_client",
        "ptyprocess",
    }
    assert not loaded & heavy


@pytest.mark.parametrize("words", ["prorl status", "prorl-stage", "prorl-engine"])
def test_without_the_server_extra_a_command_says_what_to_install(words: str, tmp_path: Path) -> None:
    """A venv with the client's packages only, borrowed from this one by path."""
    venv.create(tmp_path / "venv", with_pip=False)
    site = tmp_path / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    here = Path(sysconfig.get_paths()["purelib"])
    package = Path(__import__("prorl_zmq").__file__).parent
    for name in ("msgpack", "msgspec", "numpy", "numpy.libs", "zmq", "pyzmq.libs"):
        if (here / name).exists():
            (site / name).symlink_to(here / name)
    (site / "prorl_zmq").symlink_to(package)
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "python"), "-P", "-m", "prorl_zmq.cli", *words.split()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert how_to_install("server") in line


def test_no_text_has_pip_look_for_the_package_in_an_index() -> None:
    """No index has it, and one may get another of that name."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "prorl_zmq").rglob("*.md")]
    texts += [path for room in ("prorl_zmq", "brokers", "stages", "tools") for path in (ROOT / room).rglob("*.py")]
    asked = re.compile(r"pip install [^\n`]*prorl-zmq")
    assert {str(path.relative_to(ROOT)) for path in texts if asked.search(path.read_text(encoding="utf-8"))} == set()
