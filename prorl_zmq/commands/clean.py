"""`prorl clean`: what prorl_zmq has left on this machine's disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ProrlError
from .tables import print_table


def clean(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER…]",
            help="Run folders, services' folders and copies of weights to clean, in place of the usual places.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is listed.")] = False,
    journals: Annotated[
        bool,
        typer.Option("--journals", help="Journals too, with jobs and results that were not collected, and services."),
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Images of `prorl image` too, which take long to make.")
    ] = False,
    programs: Annotated[
        bool, typer.Option("--programs", help="Agent programs of `prorl harness` too, which are installed again.")
    ] = False,
    image_folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where images are kept. [default: ~/.cache/prorl/images]"),
    ] = None,
) -> None:
    """List what this account's services and commands left on this machine's disk, with sizes; --yes removes it.

    These are run folders, copies of weights and unpacked images; and, if named, images, agent programs, and journals.
    With FOLDER, only that folder and what an option names is looked at. What a live process uses, what belongs to
    another account, and what is behind a link stays. Exit code 1 if something could not be removed.
    """
    from ..service.leftovers import Wanted, find_leftovers
    from ..stages.harness.harness_store import HarnessStore
    from ..tools.images.image import default_root

    store = (image_folder if image_folder is not None else default_root()).absolute()
    given = [folder.expanduser().absolute() for folder in folders or ()]
    wanted = Wanted(journals=journals, images=images, programs=programs)
    found = find_leftovers(given, store, default_root().parent / "unpacked", HarnessStore().root, wanted)
    rows, freed, failed = [], 0, False
    for one in found:
        words = f"no: {one.kept}" if one.kept else "yes"
        if yes and not one.kept:
            try:
                one.remove()
            except (ProrlError, OSError) as error:
                words, failed = f"no: {error}", True
        freed += one.size_bytes if words == "yes" else 0
        rows.append((one.path, one.what, f"{one.size_bytes / 1e6:.1f}", words))
    if not found:
        print("nothing of this account is left here")
        return
    print_table("path", "=what", ">MB", "removed" if yes else "would be removed", rows=rows)
    print(f"{freed / 1e6:.1f} MB {'are free again' if yes else 'would be free again; --yes removes it'}")
    if failed:
        raise typer.Exit(1)
