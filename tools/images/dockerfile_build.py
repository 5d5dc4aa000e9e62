"""Builds the stages of a Dockerfile, one folder each: Apptainer runs a stage's script in a copy of its base.

The scripts see the Dockerfile's folder, other stages and images at `/.prorl`, read-only. So files are copied inside the
container, in the order of the instructions, and links there never lead to the host's files.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from ...dockerfile.script import INPUTS
from ...errors import ConfigError, SandboxFailed
from .kept_folder import remove
from .sources import ArchiveSource, DirectorySource, RegistrySource, SifSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ...dockerfile.stages import Stage
    from .sources import Base, DockerfileSource

    BuildStage = Callable[[Path, str, Sequence[str], Path], None]

PASSED = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
"""The only variables of the host that RUN sees, as with Docker."""


class DockerfileBuild:
    def __init__(self, folder: Path, source: DockerfileSource, build_stage: BuildStage) -> None:
        """Build in `folder`; `build_stage` makes a folder of a definition or an image, with binds."""
        self._folder = folder
        self._source = source
        self._build_stage = build_stage
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
            if path.is_relative_to(self._folder):
                remove(path)
        return result.rename(self._folder / "raw")

    def _built(self, stage: Stage, context: Path) -> Path:
        target = self._folder / f"stage-{stage.number}"
        agent, place = self._base(stage)
        inputs = self._folder / f"inputs-{stage.number}"
        mounted = {
            "context": context,
            **{name: self._stages[of.number] for name, of in stage.stages.items()},
            **{name: self._image(image) for name, image in stage.images.items()},
        }
        for name in mounted:
            (inputs / name).mkdir(parents=True)
        (inputs / "script").write_text(stage.script or "true\n")
        keep = " ".join(f'${{{name}+"{name}=${name}"}}' for each in PASSED for name in (each, each.upper()))
        definition = self._folder / f"stage-{stage.number}.def"
        definition.write_text(
            f"Bootstrap: {agent}\nFrom: {place}\n\n"
            f'%setup\n    mkdir "$APPTAINER_ROOTFS{INPUTS}"\n\n'
            f"%post\n    exec env -i {keep} /bin/sh {INPUTS}/script\n"
        )
        binds = [f"{inputs}:{INPUTS}:ro", *(f"{path}:{INPUTS}/{name}:ro" for name, path in mounted.items())]
        self._build_stage(target, str(definition), binds, self._folder)
        (target / INPUTS[1:]).rmdir()
        remove(inputs)
        definition.unlink()
        return target

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
        """Return the root filesystem of an image that a stage copies from."""
        source: Base = self._source.bases[name]
        if isinstance(source, DirectorySource):
            return source.path
        if name not in self._images:
            self._images[name] = self._folder / f"image-{len(self._images)}"
            self._build_stage(self._images[name], str(source), (), self._folder)
        return self._images[name]
