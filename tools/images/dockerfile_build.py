"""Builds the stages of a Dockerfile, one folder each: a stage's script runs in a copy of its base.

The scripts see the Dockerfile's folder, other stages and images at `/.prorl`, all as copies. So files are copied inside
the container, in the order of the instructions, and links there never lead to the host's files.

Apptainer runs a user's scripts. They can change what the user can: such a container shows the host through the /proc of
Apptainer's own processes. Scripts of root run in a container of ours, which shows nothing of the host (`contained`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ...dockerfile.script import INPUTS
from ...errors import ConfigError, SandboxFailed
from .contained import HOSTS, PROXIES
from .kept_folder import remove
from .sources import ArchiveSource, DirectorySource, RegistrySource, SifSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ...dockerfile.stages import Stage
    from .sources import Base, DockerfileSource

    BuildStage = Callable[[Path, str, Sequence[str], Path], None]
    Contained = tuple[Callable[[Path, Base | Path], None], Callable[[str, Mapping[str, Path]], None]]


class DockerfileBuild:
    def __init__(
        self, folder: Path, source: DockerfileSource, build_stage: BuildStage, contained: Contained | None
    ) -> None:
        """Build in `folder`.

        Args:
            folder: for the stages and what they copy from.
            source: what to build.
            build_stage: makes a folder of a definition or an image, with binds, by Apptainer.
            contained: copies an image, and runs a script with mounts; None: Apptainer runs the scripts.
        """
        self._folder = folder
        self._source = source
        self._build_stage = build_stage
        self._contained = contained
        self._stages: dict[int, Path] = {}
        self._images: dict[str, Path] = {}

    def run(self) -> Path:
        """Return the root filesystem of the last stage; those of the others are removed."""
        dockerfile = self._source.dockerfile
        context = self._folder / "context"
        root = dockerfile.context.root.resolve()
        if self._folder.resolve().is_relative_to(root):
            raise ConfigError(f"the images are kept inside {root}; keep them elsewhere with --images", key="images")
        try:
            dockerfile.context.copy_to(context)
        except shutil.Error as error:
            (path, _, reason), *_ = error.args[0]
            raise SandboxFailed(f"{path} cannot be copied: {reason}", path=path) from error
        for stage in dockerfile.stages:
            self._stages[stage.number] = self._built(stage, context)
        result = self._stages.pop(dockerfile.last.number)
        for path in (context, *self._stages.values(), *self._images.values()):
            remove(path)
        return result.rename(self._folder / "raw")

    def _built(self, stage: Stage, context: Path) -> Path:
        target = self._folder / f"stage-{stage.number}"
        inputs = self._folder / f"inputs-{stage.number}"
        mounted = {
            "context": context,
            **{name: self._stages[of.number] for name, of in stage.stages.items()},
            **{name: self._image(image) for name, image in stage.images.items()},
        }
        for name in mounted:
            (inputs / name).mkdir(parents=True)
        (inputs / "script").write_text(stage.script or "true\n")
        if self._contained is None:
            self._build_by_apptainer(target, stage, inputs, mounted)
        else:
            copy_base, run = self._contained
            copy_base(target, self._stages[stage.parent.number] if stage.parent else self._source.bases[stage.base])
            (target / INPUTS[1:]).mkdir()
            (inputs / "old").mkdir()
            for name in HOSTS:
                (inputs / name).write_bytes(Path("/etc", name).read_bytes() if Path("/etc", name).exists() else b"")
            mounts = {f"{INPUTS}/{name}": path for name, path in mounted.items()}
            run(f"{INPUTS}/script", {"/": target, INPUTS: inputs, **mounts})
        (target / INPUTS[1:]).rmdir()
        remove(inputs)
        return target

    def _build_by_apptainer(self, target: Path, stage: Stage, inputs: Path, mounted: Mapping[str, Path]) -> None:
        agent, place = self._base(stage)
        keep = " ".join(f'${{{name}+"{name}=${name}"}}' for each in PROXIES for name in (each, each.upper()))
        # Apptainer would show the host's /tmp and /var/tmp.
        scratch, temporary = self._folder / "var-tmp", self._folder / f"tmp-{stage.number}"
        scratch.mkdir()
        scratch.chmod(0o1777)
        definition = self._folder / f"stage-{stage.number}.def"
        definition.write_text(
            f"Bootstrap: {agent}\nFrom: {place}\n\n"
            f'%setup\n    cd "$APPTAINER_ROOTFS"\n    mkdir .{INPUTS}\n'
            f"    test -d tmp && test ! -L tmp || {{ rm -f tmp; mkdir -m 1777 tmp; }}\n"
            f'    mv tmp "{temporary}" && mkdir -m 1777 tmp\n\n'
            f"%post\n    exec env -i {keep} /bin/sh {INPUTS}/script\n"
        )
        binds = [f"{temporary}:/tmp", f"{scratch}:/var/tmp", f"{inputs}:{INPUTS}:ro"]
        binds += [f"{path}:{INPUTS}/{name}:ro" for name, path in mounted.items()]
        self._build_stage(target, str(definition), binds, self._folder)
        (target / "tmp").rmdir()
        temporary.rename(target / "tmp")
        remove(scratch)
        definition.unlink()

    def _base(self, stage: Stage) -> tuple[str, str]:
        if stage.parent is not None:
            return "localimage", str(self._stages[stage.parent.number])
        source = self._source.bases[stage.base]
        match source:
            case RegistrySource(reference):
                agent, _, place = reference.partition("://")
                return agent, place
            case ArchiveSource(agent, path):
                return agent, str(path)
            case DirectorySource(path) | SifSource(path):
                return "localimage", str(path)

    def _image(self, name: str) -> Path:
        """Return a copy of an image that a stage copies from: a script may make it writable."""
        if name not in self._images:
            self._images[name] = self._folder / f"image-{len(self._images)}"
            self._build_stage(self._images[name], str(self._source.bases[name]), (), self._folder)
        return self._images[name]
