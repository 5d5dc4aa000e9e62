"""Folders of Harbor and Terminal-Bench tasks: found below a folder, and read as instances of the task `harbor`.

A folder with a `task.toml` is a task. Nothing outside it is read: a symbolic link that leaves it is an error. An image
that is built from a Dockerfile is named after the content of its folder, so tasks with equal folders share one, and a
changed folder has another.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import stat
import tarfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..dockerfile.stages import read_dockerfile
from ..errors import ConfigError, InvalidRecord
from ..wire.messages.jobs import PhaseLimits
from . import harbor_toml as toml
from .harbor_task import HarborTask, Step, Verifier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .harbor_task import Environment
    from .harbor_toml import EnvironmentTable, StepTable, TaskToml, VerifierTable

CONFIG, INSTRUCTION, DOCKERFILE = "task.toml", "instruction.md", "Dockerfile"
COMPOSE = "docker-compose.yaml"
UNPACKED_LIMIT_BYTES = 64 * 2**20
"""Most bytes of a folder that a job carries, before compression."""
TEXT_LIMIT_BYTES = 2**20
"""Largest task.toml, and largest instruction."""
READ_BYTES = 2**20
COMPRESSION = 1
"""Level of zlib: 6 takes four times as long for a tenth fewer bytes of the usual test folder."""
CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
STEP_NAME = re.compile(r'[^<>:"/\\|?*\x00-\x1f\x7f]{1,255}(?<![. ])')
IMAGE_NAME_LIMIT = 100
STORE_NAME = re.compile(r"(?!harbor-)[A-Za-z0-9][A-Za-z0-9._-]{0,99}(?<!\.sif)")
"""A name of an image in the store: built ones are `harbor-…`, and SIF files end with `.sif`."""
LIVE = re.compile(
    rb"localhost|127\.0\.0\.1|0\.0\.0\.0|/proc/|psutil|"
    rb"\b(pgrep|pkill|pidof|netstat|lsof|systemctl)\b|\b(ps|ss) +-|\bps aux"
)
"""What tests have in them that look at servers and other processes."""
LIVE_HINTS = (
    *(b"localhost", b"127.0.0.1", b"0.0.0.0", b"/proc/", b"psutil", b"pgrep", b"pkill", b"pidof", b"netstat", b"lsof"),
    *(b"systemctl", b"ps -", b"ss -", b"ps  ", b"ss  ", b"ps aux"),
)
"""Texts without any of these do not match `LIVE`, which takes five times as long."""
SPARE_S = 60.0
"""For what is not the agent or its verifier: copying files, health checks."""
VERIFIER_RUNS = 3
"""Most runs of the verifier: more than one where its tools seem to be missing."""
LONGEST_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class TaskImage:
    """An image that a task needs."""

    name: str
    """In the store of `prorl image`."""
    reference: str
    """The published image that `docker_image` names; empty: it is built from the Dockerfile."""
    dockerfile: Path | None
    """None: there is only the published image."""
    build_s: float
    """Longest build."""


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A task folder that can run here."""

    task: HarborTask
    images: tuple[TaskImage, ...]

    def limits(self) -> PhaseLimits:
        """Return limits of the job in which the task's own limits have room. Verification may be part of RUN."""
        steps = self.task.steps
        run_s = sum((step.agent_s or 0.0) + VERIFIER_RUNS * step.verifier.timeout_s for step in steps) + SPARE_S
        return PhaseLimits(
            run_s=min(LONGEST_S, max(PhaseLimits().run_s, run_s)),
            eval_s=min(LONGEST_S, max(PhaseLimits().eval_s, VERIFIER_RUNS * steps[-1].verifier.timeout_s + SPARE_S)),
        )


def find_task_folders(root: Path) -> list[Path]:
    """Return the task folders at or below a folder, by path. Hidden folders are skipped.

    Raises:
        ConfigError: there is none.
    """
    found = []
    for path, folders, files in os.walk(root, onerror=_raise):
        if CONFIG in files or INSTRUCTION in files:
            found.append(Path(path))
            folders.clear()
        folders[:] = sorted(each for each in folders if not each.startswith("."))
    if not found:
        raise ConfigError(f"{root} has no task folder: none below it has a {CONFIG}", key="file")
    return found


def read_task_folder(folder: Path, *, with_solution: bool = False) -> TaskFolder:
    """Read a task folder. `with_solution`: its instance carries `solution/`, for the oracle.

    Raises:
        InvalidRecord: a file is missing or unreadable, or something in it is not supported.
    """
    try:
        return _Reader(folder, with_solution=with_solution).read()
    except OSError as error:
        raise InvalidRecord(f"{_shown(error.filename, folder)}: {error.strerror}", field="folder") from error
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"a text of it is not UTF-8: {error}", field="folder") from error
    except ValueError as error:  # of the instance's own checks
        raise InvalidRecord(str(error), field="folder") from error


class _Reader:
    def __init__(self, folder: Path, *, with_solution: bool) -> None:
        self._folder = folder
        self._root = os.path.realpath(folder)
        self._with_solution = with_solution
        self._plain: set[str] = set()
        """Paths that are no links."""
        self._images: dict[str, TaskImage] = {}
        self._looks_at_processes = False
        self._ends: dict[str, tuple[str, str]] = {}
        """WORKDIR and USER with which the Dockerfile of an image ends."""

    def read(self) -> TaskFolder:
        config = toml.parse_task_toml(self._text(CONFIG))
        environment = self._environment(config.environment, toml.AGENTS, "environment")
        steps = tuple(self._step(config, step) for step in config.steps) or (self._only_step(config),)
        if not config.steps and config.multi_step_reward_strategy is not None:
            raise InvalidRecord("task.toml: multi_step_reward_strategy: the task has no steps", field="steps")
        keys = {unicodedata.normalize("NFC", step.name).casefold() for step in steps}
        if len(keys) < len(steps):
            raise InvalidRecord("task.toml: two steps have the same name", field="steps")
        _, user = self._ends.get(environment.image, ("", ""))
        task = HarborTask(
            name=os.path.basename(self._root),  # noqa: PTH119 - fast
            steps=tuple(self._with_users(step, user) for step in steps),
            environment=environment,
            tests=self._packed("tests"),
            solution=self._packed("solution") if self._with_solution else b"",
            solution_variables=toml.variables(config.solution.env, "[solution] env"),
            artifacts=toml.artifacts_of(config.artifacts, "artifacts"),
            reward=config.multi_step_reward_strategy or "mean",
            live=self._is_live(config),
            mcp=toml.mcp_servers_of(config.environment.mcp_servers),
        )
        task = msgspec.convert(msgspec.to_builtins(task), HarborTask)  # checks every field
        return TaskFolder(task, tuple(self._images.values()))

    def _is_live(self, config: TaskToml) -> bool:
        """Return whether the verifier looks at the agent's processes: as `[metadata] live` says, or by its tests."""
        live = config.metadata.get("live", self._looks_at_processes)
        if not isinstance(live, bool):
            raise InvalidRecord(f"task.toml: [metadata] live is {live!r}, not true or false", field="metadata.live")
        return live

    def _with_users(self, step: Step, user: str) -> Step:
        """Return a step whose commands run as the USER of their image, unless the task says otherwise."""
        verifier = step.verifier
        own = user if verifier.separate is None else self._ends.get(verifier.separate.image, ("", ""))[1]
        verifier = msgspec.structs.replace(verifier, user=verifier.user or own)
        return msgspec.structs.replace(step, agent_user=step.agent_user or user, verifier=verifier)

    def _only_step(self, config: TaskToml) -> Step:
        verifier = self._verifier(config, None)
        self._check_test(verifier, "tests")
        return Step(
            instruction=self._instruction(""),
            agent_s=config.agent.timeout_sec,
            agent_user=toml.user_of(config.agent.user),
            agent_network=toml.network_of(config.agent, "[agent]"),
            verifier=verifier,
        )

    def _step(self, config: TaskToml, table: StepTable) -> Step:
        if not STEP_NAME.fullmatch(table.name):
            raise InvalidRecord(f"task.toml: {table.name!r} is not the name of a folder below steps/", field="steps")
        place, where = f"step {table.name}:", f"steps/{table.name}"
        verifier = self._verifier(config, table)
        self._check_test(verifier, f"{where}/tests", "tests")
        agent = table.agent
        user = agent.user if agent.user is not None else config.agent.user
        return Step(
            name=table.name,
            instruction=self._instruction(f"{where}/"),
            agent_s=agent.timeout_sec if agent.timeout_sec is not None else config.agent.timeout_sec,
            agent_user=toml.user_of(user),
            agent_network=toml.network_of(agent, f"{place} [agent]") or toml.network_of(config.agent, "[agent]"),
            tests=self._packed(f"{where}/tests"),
            workdir=self._packed(f"{where}/workdir"),
            verifier=verifier,
            min_reward=_least(table.min_reward),
            healthcheck=toml.healthcheck_of(table.healthcheck),
            artifacts=toml.artifacts_of(table.artifacts, f"{place} artifacts"),
            solution=self._packed(f"{where}/solution") if self._with_solution else b"",
        )

    def _instruction(self, where: str) -> str:
        self._reject_file(f"{where}trajectory.json", "earlier turns of an agent are not supported")
        lines = self._text(f"{where}{INSTRUCTION}").split("\n")
        while lines and CANARY.fullmatch(lines[0].strip()):
            lines.pop(0)
        while lines and not lines[0].strip():
            lines.pop(0)
        if not lines:
            raise InvalidRecord(f"{where}{INSTRUCTION} is empty", field=INSTRUCTION)
        return "\n".join(lines)

    def _verifier(self, config: TaskToml, step: StepTable | None) -> Verifier:
        table = config.verifier if step is None else step.verifier
        place = "[verifier]" if step is None else f"step {step.name}: [verifier]"
        if table.environment_mode == "shared" and table.environment is not None:
            raise InvalidRecord(f'task.toml: {place} environment: environment_mode is "shared"', field=place)
        is_separate = table.is_separate()
        if is_separate is None:
            is_separate = config.verifier.is_separate()
        separate, in_image = self._separate(config, step) if is_separate else (None, False)
        user = table.user if table.user is not None else config.verifier.user
        network = toml.network_of(table, place) or toml.network_of(config.verifier, "[verifier]")
        return Verifier(
            timeout_s=table.timeout_sec,
            user=toml.user_of(user),
            variables=toml.variables(config.verifier.env | table.env, f"{place} env"),
            network=network,
            separate=separate,
            tests_in_image=in_image,
            collect=toml.collect_of([*config.verifier.collect, *(step.verifier.collect if step else ())], place),
        )

    def _separate(self, config: TaskToml, step: StepTable | None) -> tuple[Environment, bool]:
        """Return the sandbox of a separate verifier, and whether its image has the tests."""
        own: list[tuple[VerifierTable, str]] = [(step.verifier, f"steps/{step.name}/tests")] if step is not None else []
        own.append((config.verifier, "tests"))
        agents = msgspec.structs.replace(config.environment, mcp_servers=[])
        described = next((table.environment for table, _ in own if table.environment is not None), agents)
        place = "[verifier.environment]"
        for table, where in own:
            published = table.environment.docker_image if table.environment is not None else None
            if published or any(self._is_file(f"{where}/{name}") for name in (DOCKERFILE, COMPOSE)):
                described = msgspec.structs.replace(described, docker_image=published)
                return self._environment(described, place, where), True
        described = msgspec.structs.replace(described, docker_image=config.environment.docker_image)
        return self._environment(described, place, "environment"), False

    def _environment(self, table: EnvironmentTable, place: str, where: str) -> Environment:
        self._reject_file(f"{where}/{COMPOSE}", "services of docker-compose.yaml have no equivalent here")
        dockerfile = self._folder / where / DOCKERFILE if self._is_file(f"{where}/{DOCKERFILE}") else None
        if table.docker_image:
            reference = table.docker_image.removeprefix("docker://")
            image = TaskImage(published_name(reference), reference, dockerfile, table.build_timeout_sec)
        elif dockerfile is not None:
            image = TaskImage(f"harbor-{self._digest(where)}", "", dockerfile, table.build_timeout_sec)
            table = self._read_dockerfile(table, where, image)
        else:
            raise InvalidRecord(
                f"it has neither {where}/{DOCKERFILE} nor docker_image in {place} of task.toml", field="environment"
            )
        self._images.setdefault(image.name, image)
        source = f"docker://{image.reference}" if image.reference else ""
        return toml.environment_of(table, place, image.name, source)

    def _read_dockerfile(self, table: EnvironmentTable, where: str, image: TaskImage) -> EnvironmentTable:
        """Check a Dockerfile; return the table with the WORKDIR that it ends with, unless the table has one."""
        if image.name not in self._ends:
            try:
                last = read_dockerfile(Path(self._inside(f"{where}/{DOCKERFILE}"))).last
            except InvalidRecord as error:
                raise InvalidRecord(f"{where}/{DOCKERFILE}, {error.message}", field="environment") from error
            user = last.user.partition(":")[0]
            self._ends[image.name] = (last.directory, "" if user in ("root", "0") else user)
        return table if table.workdir else msgspec.structs.replace(table, workdir=self._ends[image.name][0])

    def _check_test(self, verifier: Verifier, *places: str) -> None:
        if verifier.tests_in_image or any(self._is_file(f"{place}/test.sh") for place in places):
            return
        raise InvalidRecord(f"it has no {' or '.join(f'{place}/test.sh' for place in places)}", field="tests")

    def _inside(self, name: str) -> str:
        """Return the path of a file of the folder, whatever links lead there."""
        path = self._root
        for part in name.split("/"):
            path = f"{path}/{part}"
            if path in self._plain:
                continue
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                break
            if stat.S_ISLNK(status.st_mode):
                path = os.path.realpath(path)
                if not path.startswith(f"{self._root}/"):
                    raise InvalidRecord(f"{name} leads out of the task folder, to {path}", field=name)
            else:
                self._plain.add(path)
        return path

    def _is_file(self, name: str) -> bool:
        return os.path.isfile(self._inside(name))  # noqa: PTH113 - fast

    def _text(self, name: str) -> str:
        path = self._inside(name)
        try:
            status = os.stat(path)  # noqa: PTH116 - fast
        except FileNotFoundError:
            raise InvalidRecord(f"it has no {name}", field=name) from None
        if not stat.S_ISREG(status.st_mode) or status.st_size > TEXT_LIMIT_BYTES:
            raise InvalidRecord(f"{name} is no file of at most {TEXT_LIMIT_BYTES} bytes", field=name)
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - fast
            return file.read()

    def _reject_file(self, name: str, reason: str) -> None:
        if os.path.lexists(f"{self._root}/{name}"):
            raise InvalidRecord(f"{name}: {reason}", field=name)

    def _packed(self, name: str) -> bytes:
        """Return a folder's content as a job carries it; empty if there is none. Equal folders give equal bytes."""
        if not os.path.lexists(f"{self._root}/{name}"):
            return b""
        top = self._inside(name)
        if not os.path.isdir(top):  # noqa: PTH112 - fast
            raise InvalidRecord(f"{name} is not a folder", field=name)
        blocks, total = [], 0
        for path, status in _entries(top, name):
            if os.path.basename(path) == ".harborignore":  # noqa: PTH119 - fast
                raise InvalidRecord(f"{name}/{path}: rules of .harborignore are not supported", field=name)
            member, content = tarfile.TarInfo(path), b""
            member.mode = 0o755 if status.st_mode & 0o111 else 0o644
            if stat.S_ISDIR(status.st_mode):
                member.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(status.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, _inner_link(top, name, path)
            else:
                total += status.st_size
                if total > UNPACKED_LIMIT_BYTES:
                    raise InvalidRecord(
                        f"{name} has more than {UNPACKED_LIMIT_BYTES} bytes; put large files into the image",
                        field=name,
                    )
                with open(f"{top}/{path}", "rb", buffering=0) as file:  # noqa: PTH123 - fast
                    content = file.read()
                if name.endswith("tests") and any(hint in content for hint in LIVE_HINTS):
                    self._looks_at_processes |= LIVE.search(content) is not None
                member.size = len(content)
            blocks += [member.tobuf(tarfile.GNU_FORMAT), content, bytes(-len(content) % tarfile.BLOCKSIZE)]
        # `TarFile` takes twice as long.
        return gzip.compress(b"".join((*blocks, bytes(2 * tarfile.BLOCKSIZE))), COMPRESSION, mtime=0)

    def _digest(self, where: str) -> str:
        """Return the identity of a build's folder: of paths, contents and what is executable."""
        top = self._inside(where)
        sha = hashlib.sha256()
        for path, status in _entries(top, where):
            kind = "d" if stat.S_ISDIR(status.st_mode) else "l" if stat.S_ISLNK(status.st_mode) else "f"
            sha.update(f"{kind} {bool(status.st_mode & 0o111)} {path}\0".encode("utf-8", "surrogateescape"))
            if kind == "l":
                sha.update(os.fsencode(os.readlink(f"{top}/{path}")))  # noqa: PTH115 - fast
            elif kind == "f":
                sha.update(f"{status.st_size}\0".encode())
                with open(f"{top}/{path}", "rb", buffering=0) as file:  # noqa: PTH123 - fast
                    while content := file.read(READ_BYTES):
                        sha.update(content)
        return sha.hexdigest()[:16]


def published_name(reference: str) -> str:
    """Return the name in the store of a published image, such as `ubuntu_24.04-…` of `ubuntu:24.04`; no other has it.

    A reference that is a name in the store stays as it is.
    """
    if STORE_NAME.fullmatch(reference):
        return reference
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", reference).lstrip("._-")
    return f"{name[: IMAGE_NAME_LIMIT - 17]}-{hashlib.sha256(reference.encode()).hexdigest()[:16]}"


def _entries(top: str, name: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what is below a folder, by path; a device, socket or pipe is an error."""
    folders = [""]
    while folders:
        where = folders.pop()
        with os.scandir(f"{top}/{where}") as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            path = f"{where}{entry.name}"
            if stat.S_ISDIR(status.st_mode):
                folders.append(f"{path}/")
            elif not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
                raise InvalidRecord(f"{name}/{path} is no file, folder or link", field=name)
            yield path, status


def _inner_link(top: str, name: str, path: str) -> str:
    target = os.readlink(f"{top}/{path}")  # noqa: PTH115 - fast
    reached = os.path.realpath(f"{top}/{path}")
    if os.path.isabs(target) or not reached.startswith(f"{top}/"):  # noqa: PTH117 - fast
        raise InvalidRecord(
            f"{name}/{path} is a symbolic link to {target}, which is not inside {name}/; put the file itself there",
            field=name,
        )
    return target


def _least(given: float | dict[str, float] | None) -> dict[str, float]:
    if given is None:
        return {}
    return given if isinstance(given, dict) else {"reward": given}


def _shown(path: object, folder: Path) -> str:
    return os.path.relpath(str(path), folder) if path is not None else str(folder)


def _raise(error: OSError) -> None:
    raise ConfigError(f"{error.filename}: {error.strerror}", key="file") from error
