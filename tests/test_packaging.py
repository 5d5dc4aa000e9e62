"""What gets installed, and what importing the client costs a trainer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from contextlib import nullcontext
from importlib.metadata import distribution, requires
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from needed import lacking

from prorl_zmq.system.installation import how_to_install

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {
    *(".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md"),
    *("bench", "brokers", "deploy", "docs", "mkdocs.yml", "prorl_zmq", "pyproject.toml", "setup.cfg", "stages"),
    *("tests", "tools"),
}
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


def python_with(folder: Path, wanted: Callable[[str], bool]) -> Path:
    """Make a venv with some of this one's packages, by links; return its interpreter.

    Args:
        wanted: whether it gets what has this name in site-packages.
    """
    venv.create(folder, with_pip=False)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if wanted(entry.name) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def run_with(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run([str(python), "-P", *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", ["prorl status", "prorl-stage", "prorl-engine"])
def test_without_the_server_extra_a_command_says_what_to_install(words: str, tmp_path: Path) -> None:
    clients = {"prorl_zmq", "msgpack", "msgspec", "numpy", "numpy.libs", "zmq", "pyzmq.libs"}
    done = run_with(python_with(tmp_path / "venv", clients.__contains__), "-m", "prorl_zmq.cli", *words.split())
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert how_to_install("server") in line


def test_what_charts_and_models_need_is_named_before_anything_starts(tmp_path: Path) -> None:
    """With the server extra only: matplotlib and transformers are not there."""
    absent = ("matplotlib", "mpl_toolkits", "pylab", "transformers", "tokenizers", "scipy", "safetensors", "torch")
    python = python_with(tmp_path / "venv", lambda name: not name.startswith(absent))
    (tmp_path / "data.jsonl").write_text('{"problem": "1", "answer": "1"}\n')
    for command in (f"eval {tmp_path}/data.jsonl --out {tmp_path}/run", f"demo --out {tmp_path}/run"):
        done = run_with(python, "-m", "prorl_zmq.cli", "prorl", *command.split())
        assert (done.returncode, done.stderr.splitlines()) == (
            2,
            [f"prorl needs the eval extra (matplotlib not found): {how_to_install('eval')}"],
        )
    assert not (tmp_path / "run").exists()
    code = (
        "from prorl_zmq.inference.chat.transformers_chat import TransformersChatFormat\n"
        "from prorl_zmq.wire.messages.chat import ChatSettings\n"
        "TransformersChatFormat.load(ChatSettings('transformers', 'some/model'))\n"
    )
    assert how_to_install("models") in run_with(python, "-c", code).stderr.splitlines()[-1]
    served = run_with(python, "-m", "prorl_zmq.cli", "prorl", "doctor")
    assert "PATH[train]" in served.stdout.replace("\n", " ")
    assert "needs the" not in served.stderr


def test_the_server_has_none_of_the_large_libraries_that_few_use() -> None:
    needed = {line.split()[0] for line in requires("prorl-zmq") or () if 'extra == "server"' in line}
    assert len(needed) > 10
    assert not {re.split("[<>=!~;]", name)[0] for name in needed} & {"matplotlib", "scipy", "transformers", "torch"}


def release() -> ModuleType:
    specification = spec_from_file_location("make_release", ROOT / ".ci" / "make_release.py")
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Changelog\n\n## [Unreleased]\n\n- One.\n", "has no section"),
        ("## [0.2.0] - 2026-01-02\n\n### Added\n\n## [0.1.0] - 2026-01-01\n\n- One.\n", "has no entries"),
        ("## [0.2.0]\n\n- One.\n", "has no section"),
        ("## [0.2.0] - 2026-01-02\n\n- One.\n", ""),
    ],
)
def test_a_release_has_a_section_of_the_changelog(text: str, said: str) -> None:
    module = release()
    with pytest.raises(module.Refused, match=said) if said else nullcontext():
        module.check_changelog(text, "0.2.0")


def test_the_version_is_in_one_place() -> None:
    number = release().version()
    assert distribution("prorl-zmq").version == number
    others = ":!stages/environments/environment_store.py"  # the versions of other packages
    places = ("prorl_zmq", "brokers", "stages", "tools", "setup.cfg", "pyproject.toml", others)
    files = subprocess.run(
        ["git", "grep", "-lF", number, "--", *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if files.returncode > 1:
        pytest.skip(f"this is not a git checkout: {files.stderr}")
    assert files.stdout.split() == ["setup.cfg"]


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_release_is_what_its_users_get(tmp_path: Path) -> None:
    """Wheel and sdist are built and checked; the README's example runs with the wheel in a new environment."""
    script = ROOT / ".ci" / "make_release.py"
    done = subprocess.run(
        [sys.executable, str(script), "--rehearse", "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if "No matching distribution" in done.stderr:
        lacking("network", done.stderr)
    assert done.returncode == 0, done.stderr
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [".gz", ".whl"]


def test_no_text_has_pip_look_for_the_package_in_an_index() -> None:
    """No index has it, and one may get another of that name."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "prorl_zmq").rglob("*.md")]
    texts += [path for room in ("prorl_zmq", "brokers", "stages", "tools") for path in (ROOT / room).rglob("*.py")]
    asked = re.compile(r"pip install [^\n`]*prorl-zmq")
    assert {str(path.relative_to(ROOT)) for path in texts if asked.search(path.read_text(encoding="utf-8"))} == set()


def test_the_top_level_has_no_other_entries() -> None:
    """A file that a test writes into the working folder is soon committed."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"this is not a git checkout: {listed.stderr}")
    assert {Path(file).parts[0] for file in listed.stdout.splitlines()} == TOP_LEVEL
