"""`prorl tasks oracle`: prove that Harbor tasks can be solved, and do not solve themselves."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..errors import InvalidRecord
from ..system.logs import one_line
from .options import Images
from .progress_display import ProgressLines
from .tables import print_table

if TYPE_CHECKING:
    from ..stages.handlers.harbor_oracle import Proof
    from ..tasks.harbor_folder import TaskFolder
    from ..tools.sandbox.sandboxes import Sandboxes

SHOWN = 300
NO_IMAGE = "there is no image "
"""How the errors of missing images begin."""


def prove_tasks(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A Harbor task, or a folder with such tasks below it.")],
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=256, help="Sandboxes at a time.")] = 2,
    images: Images = None,
) -> None:
    """Prove Harbor tasks: the reference solution must earn 1, and doing nothing 0; the exit code is 1 if one does not.

    Each task runs twice in Apptainer sandboxes, as a job would, without a model. Build the images first: prorl tasks
    images DIR --build.

    Example: prorl tasks oracle tasks/ --jobs 8
    """
    from ..tasks.harbor_folder import find_task_folders, read_task_folder
    from ..tools.sandbox.sandboxes import Sandboxes

    read: list[tuple[str, TaskFolder | str]] = []
    for path in find_task_folders(folder):
        try:
            read.append((path.name, read_task_folder(path, with_solution=True)))
        except InvalidRecord as error:
            read.append((path.name, error.message))
    with tempfile.TemporaryDirectory(prefix="prorl-oracle-") as root:
        folders = [images] if images is not None else None
        sandboxes = Sandboxes("apptainer", Path(root) / "sandboxes", image_folders=folders)
        try:
            sandboxes.check()
            rows: list[Line] = []
            with ProgressLines("prorl tasks oracle", lambda: f"{len(rows)} of {len(read)} tasks"):
                asyncio.run(_prove_all(read, sandboxes, jobs, rows))
        finally:
            sandboxes.close(wait_s=10.0)
    print_table(
        "task", ">oracle", ">no-op", "problem", rows=sorted(row for row, _ in rows), title=one_line(str(folder))
    )
    holding = sum(holds for _, holds in rows)
    print(f"{holding} of {len(rows)} tasks: the solution earns 1, and doing nothing 0")
    if any(NO_IMAGE in row[-1] for row, _ in rows):
        print(f"build the missing images first: prorl tasks images {one_line(str(folder))} --build")
    if holding < len(rows):
        raise typer.Exit(1)


Line = tuple[tuple[str, str, str, str], bool]


async def _prove_all(
    read: list[tuple[str, TaskFolder | str]], sandboxes: Sandboxes, jobs: int, rows: list[Line]
) -> None:
    """Add a row for each task as its proof ends."""
    slots = asyncio.Semaphore(jobs)

    async def add(name: str, task: TaskFolder | str) -> None:
        if isinstance(task, str):
            rows.append(((name, "-", "-", one_line(task)), False))
            return
        async with slots:
            rows.append(await _row(name, task, sandboxes))

    await asyncio.gather(*(add(name, task) for name, task in read))


async def _row(name: str, folder: TaskFolder, sandboxes: Sandboxes) -> Line:
    from ..stages.handlers.harbor_oracle import prove

    task, limits = folder.task, folder.limits()
    oracle = await prove(task, limits, sandboxes, "oracle")
    problem = oracle.problem
    if oracle.reward is not None and not oracle.holds and not task.live:
        again = await prove(msgspec.structs.replace(task, live=True), limits, sandboxes, "oracle")
        if again.holds:
            problem = "its verifier looks at processes of the agent: set live = true in [metadata] of task.toml"
    nothing = await prove(task, limits, sandboxes, "no-op")
    shown = one_line((problem or nothing.problem)[-SHOWN:])
    return (name, _reward(oracle), _reward(nothing), shown), oracle.holds and nothing.holds


def _reward(proof: Proof) -> str:
    return "error" if proof.reward is None else f"{proof.reward:g}"
