"""Harbor (0.25): `harbor run` with this package's Apptainer sandboxes in place of containers. Needs Python 3.12.

    harbor run -p tasks/ -a oracle --environment-import-path prorl_zmq.integrations.harbor:Environment

Build the images first (`prorl tasks images tasks/ --build`). An environment is one sandbox of Harbor's own process,
without a service; it ends with that process. Programs reach hosts through a proxy of this process (see
`tools.sandbox.egress_proxy`), as a task's network policy allows, which may change from phase to phase.
"""

from __future__ import annotations

# ruff: noqa: E402 - check Harbor's version before its modules are imported
import asyncio
import io
import tarfile
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SandboxFailed
from ..tools.containers.specification import Limits, SandboxSpec
from ..tools.sandbox.egress_proxy import PORT, AllowedHosts, EgressProxy, proxy_variables
from ..tools.sandbox.sandboxes import Sandboxes
from ..wire.messages.base import new_id
from .session import check_version

check_version("harbor", "0.25")

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

if TYPE_CHECKING:
    from ..tools.sandbox.sandbox import Sandbox

UNLIMITED_S = 86_400.0
"""For commands without a limit, in seconds."""
SETUP_S = 60.0
OUTPUT_LIMIT_BYTES = 8 * 2**20
DOWNLOAD_LIMIT_BYTES = 128 * 2**20
SAID_LIMIT_BYTES = 4096
ADDRESS_SPACE_BYTES = 2**46
PROCESSES = 4096


class Environment(BaseEnvironment):  # type: ignore[misc]
    """A Harbor environment that is an Apptainer sandbox.

    Args:
        images: the folder of images (`--ek images=FOLDER`); None: that of `prorl image`.
        image: the name or path of the image (`--ek image=NAME`); None: the task's, as `prorl tasks images` names it.
    """

    def __init__(self, *args: Any, images: str | None = None, image: str | None = None, **kwargs: Any) -> None:
        self._images, self._image = images, image
        self._sandbox: Sandbox | None = None
        self._sandboxes: Sandboxes | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._network = AsyncExitStack()
        self._proxy: dict[str, str] = {}
        """Variables of all commands while the network is open."""
        self._directory, self._user = "/", ""
        """Where commands start and whose they are, unless the caller says otherwise."""
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "prorl"

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_cidrs=True,
            dynamic_network_policy=True,
        )

    def _validate_definition(self) -> None:
        self._image_name()

    async def start(self, force_build: bool) -> None:
        """Start the sandbox; images are built before, so that `force_build` is an error."""
        if force_build:
            raise SandboxFailed("images are built by: prorl tasks images DIR --build", reason="image")
        config = self.task_env_config
        memory = {} if config.memory_mb is None else {"memory_bytes": config.memory_mb * 2**20}
        limits = Limits(address_space_bytes=ADDRESS_SPACE_BYTES, processes=PROCESSES, cpus=config.cpus, **memory)
        spec = SandboxSpec(
            image=self._image_name(),
            directory="/",
            user="root",
            writable="disk",
            fakeroot=True,
            limits=limits,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="prorl-harbor-")
        folders = None if self._images is None else [Path(self._images)]
        self._sandboxes = Sandboxes("apptainer", Path(self._folder.name) / "sandboxes", image_folders=folders)
        self._sandboxes.check()
        self._sandbox = await self._sandboxes.create(f"harbor-{new_id()[:12]}", spec)
        self._directory = config.workdir or await self._said_by_image("directory") or "/"
        self._user = await self._said_by_image("user")
        folders_there = [str(mount["target"]) for mount in self._mounts]
        await self._run(
            ["mkdir", "-p", self._directory, "/logs/agent", "/logs/verifier", "/logs/artifacts", *folders_there]
        )
        await self._run(["chmod", "777", "/logs/agent", "/logs/verifier", "/logs/artifacts"])
        await self._apply_network_policy(self.network_policy)

    async def stop(self, delete: bool) -> None:
        """End the sandbox, and remove it in any case."""
        del delete
        await self._network.aclose()
        if self._sandbox is not None:
            await self._sandbox.close()
            self._sandbox = None
        if self._sandboxes is not None:
            self._sandboxes.close()
            self._sandboxes = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        content, mode = await asyncio.to_thread(_read, Path(source_path))
        await self._started.write_file(target_path, content, mode)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._started.upload(Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        content = await self._started.read_file(source_path, DOWNLOAD_LIMIT_BYTES)
        await asyncio.to_thread(_write, Path(target_path), content)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        packed = await self._started.pack([source_dir], limit_bytes=DOWNLOAD_LIMIT_BYTES)
        await asyncio.to_thread(_extract, packed, source_dir.strip("/"), Path(target_dir))

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        chosen = self._resolve_user(user)
        done = await self._started.exec(
            ["/bin/bash", "-c", command],
            UNLIMITED_S if timeout_sec is None else float(timeout_sec),
            output_limit_bytes=OUTPUT_LIMIT_BYTES,
            environment={**self._proxy, **(self._merge_env(env) or {})},
            directory=cwd or self._directory,
            user=self._user if chosen is None else str(chosen),
        )
        if done.timed_out:
            raise TimeoutError(f"the command did not end within {timeout_sec} s")
        out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
        return ExecResult(stdout=out, stderr=err, return_code=done.exit_code)

    async def _apply_network_policy(self, network_policy: Any) -> None:
        await self._network.aclose()
        self._proxy = {}
        mode = network_policy.network_mode.value
        if mode == "no-network":
            return
        hosts = AllowedHosts(every=True) if mode == "public" else AllowedHosts.of(network_policy.allowed_hosts)
        listening = await self._started.listen(PORT)
        await self._network.enter_async_context(EgressProxy(listening.listener, hosts))
        self._proxy = proxy_variables(PORT)

    @property
    def _started(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxFailed("this environment has not been started, or has ended")
        return self._sandbox

    def _image_name(self) -> str:
        if self._image is not None:
            return self._image
        from ..tasks.harbor_folder import CONFIG, DOCKERFILE, published_name, read_task_folder

        if reference := self.task_env_config.docker_image:
            return published_name(reference.removeprefix("docker://"))
        root = next((each for each in self.environment_dir.parents if (each / CONFIG).is_file()), None)
        if root is None:
            raise SandboxFailed(f"{self.environment_dir} is not in a task folder, so --ek image=NAME is needed")
        read = read_task_folder(root)
        own = (self.environment_dir / DOCKERFILE).resolve()
        found = (each.name for each in read.images if each.dockerfile is not None and each.dockerfile.resolve() == own)
        return next(found, read.task.environment.image)  # a verifier's folder may equal the agent's

    async def _said_by_image(self, what: str) -> str:
        """Return the last WORKDIR (`directory`) or USER of the Dockerfile that the image was built from, if any."""
        try:
            content = await self._started.read_file(f"/.singularity.d/prorl.{what}", SAID_LIMIT_BYTES)
        except SandboxFailed as error:
            if error.fields.get("reason") == "missing":
                return ""
            raise
        return content.decode().strip().partition(":")[0] if what == "user" else content.decode().strip()

    async def _run(self, command: list[str]) -> None:
        done = await self._started.exec(command, SETUP_S, directory="/", user="root")
        if done.exit_code:
            raise SandboxFailed(f"{command[0]} failed: {done.stderr.decode(errors='replace').strip()}", reason="start")


def _read(path: Path) -> tuple[bytes, int]:
    return path.read_bytes(), path.stat().st_mode & 0o777


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _extract(packed: bytes, prefix: str, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as content:
        for member in content:
            member.name = member.name.removeprefix(prefix).lstrip("/")
            if member.name:
                content.extract(member, target, filter="data")
