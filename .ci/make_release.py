"""Build the release of setup.cfg's version into dist/, and check it as its users get it: `make release`.

    python .ci/make_release.py [--rehearse] [--out DIR]

It builds the sdist from the tracked files and the wheel from that sdist, checks both with twine, and checks that the
wheel has every file of the package. It installs the wheel into a new environment, and runs the README's client example
there against `prorl serve`.
A release needs a section of the changelog and a commit with all changes; a rehearsal does without. It uploads nothing.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"prorl_zmq": "prorl_zmq", **{name: f"prorl_zmq/{name}" for name in ("brokers", "stages", "tools")}}
LIMIT_S = 120.0
"""Of the example, the start of the service included."""
CHANGELOG = "CHANGELOG.md"


class Refused(Exception):
    """The release cannot be made; the message says what to mend."""


def version() -> str:
    """Return the version from the only place where it is."""
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    return settings["metadata"]["version"]


def check_changelog(text: str, number: str) -> None:
    """Refuse a changelog without a section of the version, with its date, or with one that has no entry."""
    section = re.search(
        rf"^## \[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    if section is None:
        raise Refused(f"{CHANGELOG} has no section `## [{number}] - YYYY-MM-DD`: give [Unreleased] this title")
    if not re.search(r"^- ", section[1], re.MULTILINE):
        raise Refused(f"{CHANGELOG}: the section [{number}] has no entries")


def tracked_files() -> list[str]:
    return run("git", "ls-files", "-z", cwd=ROOT).stdout.rstrip("\0").split("\0")


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a program; if it fails, refuse with what it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise Refused(f"`{' '.join(words)}` ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done  # type: ignore[no-any-return]


def environment(folder: Path, *requirements: object) -> Path:
    """Make an environment with some packages; return its folder of programs."""
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *requirements)
    return folder / "bin"


def build(work: Path, files: list[str]) -> list[Path]:
    """Build the sdist from a copy of the tracked files, and the wheel from the sdist; check both with twine."""
    source, built = work / "source", work / "built"
    for file in files:
        if (ROOT / file).is_file():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, source / file)
    tools = environment(work / "tools", "build", "twine")
    run(tools / "python", "-m", "build", "--outdir", built, source)
    made = sorted(built.iterdir())
    run(tools / "python", "-m", "twine", "--no-color", "check", "--strict", *made)
    return made


def check_content(made: list[Path], files: list[str], number: str) -> None:
    """Refuse archives of another version, or that lack a tracked file of the package."""
    wanted = set()
    for file in files:
        folder, _, rest = file.partition("/")
        if folder in FOLDERS:
            wanted.add(f"{FOLDERS[folder]}/{rest}")
    sdist, wheel = made[-1], made[0]
    if (wheel.suffix, sdist.suffixes[-2:]) != (".whl", [".tar", ".gz"]):
        wheel, sdist = sdist, wheel
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    if missing := sorted(wanted - names):
        raise Refused(f"{wheel.name} lacks {len(missing)} files, such as {missing[0]}: see package_data in setup.cfg")
    with tarfile.open(sdist) as archive:
        top = {name.partition("/")[0] for name in archive.getnames()}
    if top != {f"prorl_zmq-{number}"} or f"-{number}-" not in wheel.name:
        raise Refused(f"{wheel.name} and {sdist.name} are not of version {number}")


def check_installed(work: Path, wheel: Path, number: str) -> None:
    """Install the wheel into a new environment, and run the README's example there against a service."""
    programs = environment(work / "bare", f"{wheel}[server]")
    said = run(programs / "prorl", "--version").stdout.strip()
    if said != f"prorl-zmq {number}":
        raise Refused(f"the installed wheel says that it is {said!r}, not version {number}")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"\[start:client\] -->\n```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    if found is None:
        raise Refused("README.md has no client example")
    with tempfile.TemporaryDirectory(prefix="prorl-r-") as place:  # a short path, for sockets
        ours = {**os.environ, "PRORL_RUN_DIR": f"{place}/run", "PYTHONPATH": ""}
        serve = [str(programs / "prorl"), "serve", "--sandbox", "process"]
        with (
            (work / "serve.log").open("w+") as log,
            subprocess.Popen(serve, cwd=place, env=ours, stderr=log) as service,
        ):
            try:
                example = run(programs / "python", "-c", found[1], cwd=place, env=ours, timeout=LIMIT_S)
            except (Refused, subprocess.TimeoutExpired) as error:
                raise Refused(f"{error}\nprorl serve:\n{(work / 'serve.log').read_text()}") from None
            finally:
                service.send_signal(signal.SIGTERM)
                service.wait()
    lines = example.stdout.splitlines()
    if len(lines) != 8 or not all(line.startswith("completed ") for line in lines):
        raise Refused(f"the README's example printed, with the installed wheel:\n{example.stdout}{example.stderr}")


def main(arguments: list[str]) -> int:
    """Make the release; return the exit code."""
    parser = argparse.ArgumentParser(description="Build and check a release.")
    parser.add_argument(
        "--rehearse", action="store_true", help="without a section of the changelog, with local changes"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where wheel and sdist are put")
    options = parser.parse_args(arguments)
    number = version()
    try:
        if not options.rehearse:
            check_changelog((ROOT / CHANGELOG).read_text(encoding="utf-8"), number)
            if changed := run("git", "status", "--porcelain", cwd=ROOT).stdout:
                raise Refused(f"commit these changes first:\n{changed}")
        with tempfile.TemporaryDirectory(prefix="prorl-release-") as name:
            work, files = Path(name), tracked_files()
            made = build(work, files)
            check_content(made, files, number)
            check_installed(work, next(each for each in made if each.suffix == ".whl"), number)
            options.out.mkdir(parents=True, exist_ok=True)
            for each in made:
                shutil.copy2(each, options.out / each.name)
                print(options.out / each.name)
    except Refused as error:
        print(f"make_release: {error}", file=sys.stderr)
        return 1
    print(f"version {number} is {'rehearsed' if options.rehearse else 'ready: tag it, and upload it with twine'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
