"""Run a Harbor task's verifier in a sandbox, and read the rewards that it wrote.

Before the tests enter, `/logs/verifier` and `/tests` are made anew: links, files and old rewards that the agent left
there are gone, and the folders are written by a process of the service, not by programs of the image. The verifier
starts with the image's PATH and without variables of the agent's shell.

A verifier without a reward is never a 0: no file, an empty one, no number, and a verifier that was killed raise
`GraderFailed` (`reason`). So does one that cannot install its tools. What it prints is no evidence of that, since the
agent's programs print into the same output: `Grade.missing` is a suspicion, which the caller examines in a sandbox that
no agent has seen (`harbor._graded`).
"""

from __future__ import annotations

import json
import os
import re
import zlib
from contextlib import AsyncExitStack
from ipaddress import ip_network
from typing import TYPE_CHECKING, NamedTuple

from ...data.conversations import finite_reward
from ...errors import ConfigError, GraderFailed, InvalidJob, SandboxFailed, SandboxLimitExceeded
from ...tools.containers.specification import Bind
from ...tools.sandbox.egress_proxy import PORT, AllowedHosts, EgressProxy, proxy_variables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...tasks.harbor_task import NetworkPolicy, Verifier
    from ...tools.sandbox.sandbox import Sandbox

TESTS, LOGS = "/tests", "/logs/verifier"
REWARD_JSON, REWARD_TEXT = f"{LOGS}/reward.json", f"{LOGS}/reward.txt"
TOOLS_VARIABLE = "PRORL_VERIFIER_TOOLS"
"""Names a folder of every node with programs for verifiers, in its `bin`."""
TOOLS_TARGET = "/opt/verifier-tools"
"""Where sandboxes show that folder, read-only."""
UNPACKED_LIMIT_BYTES = 128 * 2**20
REWARD_LIMIT_BYTES = 64 * 1024
OUTPUT_LIMIT_BYTES = 2**20
NOTED = 4000
KILLED = 137
"""The exit code after SIGKILL, which the kernel sends when memory is short."""
REWARD = "reward"
RUN_TESTS = 'test -x /tests/test.sh && exec /tests/test.sh; exec "$0" /tests/test.sh'
"""A script without the right to be executed is bash's, as Harbor's `chmod` makes it."""
NODES_OWN = tuple(
    map(ip_network, ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "::/127", "::ffff:0:0/96", "fe80::/10"))
)
"""Loopback, link-local and unspecified addresses."""
TESTS_BEGIN = re.compile(r"^=+ test session starts =+$", re.MULTILINE)
"""Afterwards the output may be of the agent's code."""
TOOLS_ARE_MISSING = re.compile(
    r"^.*("
    r"could not resolve host|temporary failure (in name resolution|resolving)|name or service not known|"
    r"unable to locate package|failed to fetch|no matching distribution found|could not find a version that satisfies|"
    r"error sending request for url|failed to establish a new connection|connect tunnel failed|proxyerror|"
    r"no module named '?(pytest|pip|uv)'?\b|"
    r"\b(curl|wget|uvx?|pytest|pip3?|python3?|node|npm|npx|apt-get|apk): ((command )?not found|no such file)"
    r").*$",
    re.MULTILINE | re.IGNORECASE,
)


class Grade(NamedTuple):
    """What a verifier returned."""

    rewards: dict[str, float]
    output: str
    """The end of what it printed."""
    missing: str = ""
    """The line by which it, or a program of the agent's, says that the verifier's tools could not be installed. Empty:
    there is none, or a reward is above 0."""

    @property
    def reward(self) -> float:
        """The main reward: the one called `reward`, or the only one.

        Raises:
            GraderFailed: there are several, and none has that name.
        """
        if REWARD in self.rewards:
            return self.rewards[REWARD]
        if len(self.rewards) != 1:
            named = ", ".join(sorted(self.rewards)) or "none"
            raise failed(f"the verifier wrote the rewards {named}, and none is called {REWARD}", self.output)
        return next(iter(self.rewards.values()))


async def verify(
    sandbox: Sandbox,
    verifier: Verifier,
    tests: Sequence[bytes],
    network: NetworkPolicy,
    directory: str,
    image_tests: bytes = b"",
) -> Grade:
    """Copy the tests in, run them, and read the rewards.

    Args:
        sandbox: where the agent's files are, or their copies.
        verifier: how it runs.
        tests: packed folders, later ones over earlier ones; none: the image has them.
        network: what the verifier may reach.
        directory: where it starts.
        image_tests: what the image itself has at `/tests`, as `Sandbox.pack` returns it.

    Raises:
        GraderFailed: there is no reward.
        SandboxFailed: the sandbox is gone.
    """
    await put_tests(sandbox, verifier, tests, image_tests)
    variables = {"PATH": f"{TOOLS_TARGET}/bin:{await _path(sandbox)}"} if verifier_tools() else {}
    async with AsyncExitStack() as stack:
        variables |= await open_network(sandbox, network, stack)
        try:
            result = await sandbox.exec(
                ["/bin/bash", "-c", f"{{ {RUN_TESTS}; }} 2>&1", "/bin/bash"],
                verifier.timeout_s,
                output_limit_bytes=OUTPUT_LIMIT_BYTES,
                environment={**variables, **verifier.variables},
                directory=directory,
                user=verifier.user or "root",
            )
        except SandboxLimitExceeded as error:
            raise failed(f"the verifier was killed: {error.message}", "", reason="killed") from error
    output = result.stdout.decode(errors="replace")
    if result.timed_out:
        raise failed(f"the verifier did not end within {verifier.timeout_s:g} s", output, reason="hung")
    if words := result.stderr.decode(errors="replace").strip():  # bash itself: its script has one stream
        raise failed(f"the verifier could not be started: {words}", output)
    if result.exit_code == KILLED:
        raise failed("the verifier, or the last program that it ran, was killed", output, reason="killed")
    rewards = await _read_rewards(sandbox, output)
    missing = TOOLS_ARE_MISSING.search(TESTS_BEGIN.split(output)[0])
    if missing is None or any(value > 0 for value in rewards.values()):
        return Grade(rewards, output[-NOTED:])
    return Grade(rewards, output[-NOTED:], missing[0].strip())


async def put_tests(sandbox: Sandbox, verifier: Verifier, tests: Sequence[bytes], image_tests: bytes = b"") -> None:
    """Empty the verifier's folders, and copy the tests in, over those of the image."""
    archives = [unpacked(each) for each in tests if each]
    await sandbox.replace_folders({TESTS: b"", LOGS: b""} if archives else {LOGS: b""}, verifier.user)
    if image_tests:
        await sandbox.unpack(image_tests)
    for archive in archives:
        await sandbox.unpack(archive, TESTS)


async def open_network(sandbox: Sandbox, network: NetworkPolicy, stack: AsyncExitStack) -> dict[str, str]:
    """Let the sandbox's commands reach what a policy allows until `stack` closes; return the variables for them."""
    if network.mode == "no-network":
        return {}
    port = PORT
    try:
        listening = await sandbox.listen(port)
    except SandboxFailed as error:
        if error.fields.get("reason") != "port":
            raise
        listening = await sandbox.listen(0)  # a program of the agent's has it
    port = listening.listener.getsockname()[1]
    await stack.enter_async_context(EgressProxy(listening.listener, allowed_hosts(network)))
    return proxy_variables(port)


def allowed_hosts(network: NetworkPolicy) -> AllowedHosts:
    """Return what a policy allows.

    Raises:
        InvalidJob: an entry is no host, address or network.
    """
    try:
        hosts = AllowedHosts(every=True) if network.mode == "public" else AllowedHosts.of(network.allowed_hosts)
    except ValueError as error:
        raise InvalidJob(f"the network policy is wrong: {error}", field="allowed_hosts") from error
    for listed in hosts.networks:
        if any(own.overlaps(listed) for own in NODES_OWN if own.version == listed.version):
            message = f"allowed_hosts has {listed}, with addresses of the node itself, which are never reached"
            raise InvalidJob(message, field="allowed_hosts")
    return hosts


def verifier_tools() -> tuple[Bind, ...]:
    """Return the folder of programs for verifiers, if the environment of this process names one.

    Raises:
        ConfigError: it is not a folder.
    """
    folder = os.environ.get(TOOLS_VARIABLE, "").strip()
    if not folder:
        return ()
    if not os.path.isdir(os.path.join(folder, "bin")):  # noqa: PTH112, PTH118 - no more than a look
        raise ConfigError(f"{TOOLS_VARIABLE} is {folder!r}, which has no folder bin", key=TOOLS_VARIABLE)
    return (Bind(os.path.realpath(folder), TOOLS_TARGET),)


def unpacked(packed: bytes) -> bytes:
    """Return the tar file of a packed folder.

    Raises:
        InvalidJob: it is not gzip-compressed, or larger than `UNPACKED_LIMIT_BYTES`.
    """
    inflater = zlib.decompressobj(wbits=31)
    try:
        archive = inflater.decompress(packed, UNPACKED_LIMIT_BYTES)
    except zlib.error as error:
        raise InvalidJob(f"a packed folder is not gzip-compressed: {error}", field="tests") from error
    if inflater.unconsumed_tail or not inflater.eof:
        raise InvalidJob(
            f"a packed folder is cut off, or unpacks to more than {UNPACKED_LIMIT_BYTES} bytes", field="tests"
        )
    return archive


def parsed_rewards(name: str, content: bytes) -> dict[str, float]:
    """Return the rewards in a reward file.

    Raises:
        ValueError: it has none, or something that is no finite number.
    """
    text = content.decode().strip()
    if not text:
        raise ValueError("it is empty")
    if name.endswith(".txt"):
        found: object = {REWARD: float(text)}
    else:
        try:
            found = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object of numbers by name")
    rewards: Mapping[str, object] = found  # type: ignore[assignment]
    for key, value in rewards.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{key} is {value!r}, which is no number")  # noqa: TRY004 - of the file
        if finite_reward(value) is None:
            raise ValueError(f"{key} is {value!r:.100}, which is not finite")
    if not rewards:
        raise ValueError("it names no reward")
    return {key: float(value) for key, value in rewards.items()}  # type: ignore[arg-type]


async def _read_rewards(sandbox: Sandbox, output: str) -> dict[str, float]:
    found: dict[str, dict[str, float]] = {}
    for path in (REWARD_JSON, REWARD_TEXT):
        try:
            content = await sandbox.read_file(path, REWARD_LIMIT_BYTES)
        except SandboxFailed as error:
            if error.fields.get("reason") == "missing":
                continue
            if error.fields.get("reason") in ("kind", "link", "size", "system"):
                raise failed(f"the verifier's {path} cannot be read: {error.message}", output) from error
            raise
        try:
            found[path] = parsed_rewards(path, content)
        except ValueError as error:
            raise failed(f"the verifier's {path} has no reward: {error}", output) from error
    if not found:
        raise failed(f"the verifier wrote neither {REWARD_JSON} nor {REWARD_TEXT}", output)
    first, *others = found.values()
    main = first.get(REWARD, next(iter(first.values())) if len(first) == 1 else None)
    if any(main is not None and each[REWARD] != main for each in others):
        raise failed(f"{REWARD_JSON} and {REWARD_TEXT} contradict each other: {found}", output)
    return first


async def _path(sandbox: Sandbox) -> str:
    result = await sandbox.exec(["/bin/bash", "-c", 'printf %s "$PATH"'], 60.0)
    return result.stdout.decode(errors="replace")


def failed(words: str, output: str, reason: str = "result") -> GraderFailed:
    """Return the error of a verifier that returned no reward."""
    return GraderFailed(words, reason=reason, output=output[-NOTED:])
