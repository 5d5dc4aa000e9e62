"""`prorl harness`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import HandlerFailed
from ..wire.messages.jobs import Harness
from .images import build_progress
from .options import Image, Sandbox, Verbose, Wait
from .tables import print_table

if TYPE_CHECKING:
    from ..stages.harness.harness_store import HarnessStore

commands = typer.Typer(
    help="Install and try the agent harnesses that rollouts run. Try: "
    "prorl harness install codex, then prorl harness list.",
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME[==VERSION]", help="The harness, as `prorl harness list` shows.")]
Into = Annotated[
    Path | None,
    typer.Option(
        "--into",
        metavar="FOLDER",
        help="Where harnesses are kept. [default: $PRORL_HARNESSES, or ~/.cache/prorl/harnesses]",
    ),
]


@commands.command()
def install(
    name: Name,
    into: Into = None,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="How long npm or pip may take.")] = 1800.0,
    wait: Wait = 3600.0,
    verbose: Verbose = False,
) -> None:
    """Install a harness for all sandboxes of this machine, from npm or PyPI; print its folder.

    Example: prorl harness install codex==0.169.0
    """
    with build_progress("prorl harness", verbose=verbose) as (say, heard):
        installed = harness_store(into).install(name, say=say, heard=heard, timeout_s=timeout, wait_s=wait)
    print(installed.folder)


@commands.command("list")
def list_(into: Into = None) -> None:
    """List all harnesses, and which of them are installed."""
    from ..stages.harness.adapter import Npm, known_harnesses, load_adapter

    store = harness_store(into)
    installed, rows = store.list(), []
    for each in known_harnesses():
        package = load_adapter(each).package
        if package is None:
            rows.append((each, "any", "", "the sandbox's own"))
            continue
        registry = "npm" if isinstance(package, Npm) else "PyPI"
        found = [one for one in installed if one.name == each]
        rows += [(each, one.version, f"{one.size_bytes / 1e6:.0f}", f"{registry}: {one.package}") for one in found]
        if not found:
            rows.append((each, "not installed", "", f"{registry}: {package.package} {package.version}"))
    print_table("harness", "=version", ">MB", "from", rows=rows, title=f"harnesses in {store.root}")


@commands.command()
def remove(name: Name, into: Into = None, wait: Wait = 3600.0) -> None:
    """Remove a version of a harness, or all of them. Sandboxes that run it lose its files."""
    with build_progress("prorl harness", verbose=False) as (say, _):
        harness_store(into).remove(name, say=say, wait_s=wait)


@commands.command("test")
def try_(name: Name, sandbox: Sandbox = None, image: Image = None, into: Into = None) -> None:
    """Run an installed harness in a sandbox without network, with a model that follows a script of two turns.

    Exit code 1, with what the harness said, if it did not follow the instructions.
    """
    from ..stages.harness.adapter import load_adapter
    from ..stages.harness.chosen_harness import ChosenHarness
    from ..stages.harness.trial import try_harness
    from ..tools.sandbox.sandboxes import Sandboxes

    installation = harness_store(into).find(name)
    adapter = load_adapter(installation.name)
    with TemporaryDirectory(prefix="prorl-harness-") as folder:
        sandboxes = Sandboxes(sandbox or "bubblewrap", Path(folder) / "sandboxes", image=image or "")
        sandboxes.check()
        try:
            chosen = ChosenHarness(Harness(adapter.name), adapter, installation)
            trial = asyncio.run(try_harness(chosen, sandboxes))
        finally:
            sandboxes.close()
    what = f"{adapter.name} {installation.version} in {sandboxes.kind}"
    calls = f"{trial.calls} calls of the model, the first after {trial.first_call_s:.1f} s; {trial.took_s:.1f} s in all"
    if not trial.problem:
        print(f"{what} followed the instructions: {calls}")
        return
    sys.stdout.write(trial.output)
    raise HandlerFailed(f"{what} did not follow the instructions: {trial.problem} ({calls})")


def harness_store(root: Path | None) -> HarnessStore:
    """Return the harnesses in a folder; None: the default one."""
    from ..stages.harness.harness_store import HarnessStore

    return HarnessStore(root)
