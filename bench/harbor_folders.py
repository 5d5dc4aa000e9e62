"""Task folders for bench/harbor.py: one of each kind that the service supports, in several variants.

Each is solved by its `solution/`, and by nothing else. In all texts `@` stands for the number of the folder. Their
Dockerfiles begin with `BASE`, a Debian with Python, and need no network.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BASE = "debian:12"
PLAIN = f"FROM {BASE}\nWORKDIR /app\n"
TEXT = "/logs/verifier/reward.txt"
JSON = "/logs/verifier/reward.json"
ANSWER = "echo @ > answer.txt"
CHECK = '[ "$(cat answer.txt 2>/dev/null)" = @ ]'
USER = "RUN useradd --create-home --uid 1234 worker\n"


@dataclass(frozen=True)
class Kind:
    """What a folder has besides the usual files."""

    solve: str = ANSWER
    check: str = CHECK
    """A condition of the shell, after the agent."""
    toml: str = ""
    dockerfile: str = PLAIN
    files: dict[str, str] = field(default_factory=dict)
    reward: str = f"echo $passed > {TEXT}"
    """Writes the reward `$passed`, 1 or 0."""
    archives: dict[str, dict[str, str]] = field(default_factory=dict)
    """Tar files: contents by names."""
    steps: tuple[tuple[str, str, str], ...] = ()
    """Name, solution and condition of each step."""


KINDS = {
    "answer": Kind(toml="[environment]\ncpus = 1\nmemory_mb = 1024\n"),
    "copy after RUN": Kind(
        dockerfile=PLAIN
        + "RUN echo first > data.txt && mkdir kept\n"
        + "COPY data.txt data.txt\n"
        + "RUN grep -q second data.txt && cp data.txt kept/\n",
        files={"environment/data.txt": "second\n"},
        solve="{ tr a-z A-Z < kept/data.txt; echo @; } > answer.txt",
        check=r'printf "SECOND\n@\n" | cmp -s - answer.txt',
    ),
    "heredocs": Kind(
        dockerfile=PLAIN
        + 'RUN <<EOF\nmkdir -p /srv/data\necho "from a heredoc" > /srv/data/text\nEOF\n'
        + 'COPY --chmod=755 <<"SCRIPT" /usr/local/bin/double\n#!/bin/sh\necho $(($1 * 2))\nSCRIPT\n',
        solve="double @ > answer.txt",
        check='[ "$(cat answer.txt)" = $((2 * @)) ] && grep -q heredoc /srv/data/text',
    ),
    "stages": Kind(
        dockerfile=f"FROM {BASE} AS build\nRUN mkdir /out && echo built > /out/tool.txt\n"
        + PLAIN
        + "COPY --from=build --chown=1000:1000 --chmod=604 /out/tool.txt ./tool.txt\n",
        solve="{ stat -c '%u %a' tool.txt; cat tool.txt; echo @; } > answer.txt",
        check=r'printf "1000 604\nbuilt\n@\n" | cmp -s - answer.txt',
    ),
    "USER": Kind(
        dockerfile=f"FROM {BASE}\n{USER}RUN mkdir /work && chown worker /work\nWORKDIR /work\nUSER worker\n",
        solve='echo "$(id -un) @" > answer.txt',
        check='[ "$(cat answer.txt)" = "worker @" ]',
    ),
    "two users": Kind(
        dockerfile=PLAIN + USER + "RUN chown worker . && mkdir -m 700 /secret && echo @ > /secret/key\n",
        toml='[agent]\nuser = "worker"\n[verifier]\nuser = "root"\n',
        solve="ls /secret > /dev/null 2>&1 || echo @ > answer.txt",
        check='[ "$(cat answer.txt)$(stat -c %U answer.txt)" = "$(cat /secret/key)worker" ]',
    ),
    "workdir": Kind(
        toml='[environment]\nworkdir = "/srv/made"\n',
        check='[ "$PWD" = /srv/made ] && [ "$(cat answer.txt)" = @ ]',
    ),
    "reward.json": Kind(reward=f'echo "{{\\"reward\\": $passed, \\"lines\\": 3}}" > {JSON}'),
    "reward by another name": Kind(reward=f'echo "{{\\"accuracy\\": $passed.0}}" > {JSON}'),
    "both reward files": Kind(reward=f'echo "{{\\"reward\\": $passed}}" > {JSON}; echo $passed > {TEXT}'),
    "healthcheck": Kind(
        toml="[environment.healthcheck]\ninterval_sec = 0.05\n"
        'command = "test -e /app/ready || { touch /app/ready; false; }"\n',
        solve="test -e ready && echo @ > answer.txt",
    ),
    "live server": Kind(
        solve="echo @ > answer.txt\n"
        "setsid -f python3 -m http.server --bind 127.0.0.1 8000 > /dev/null 2>&1 < /dev/null\n"
        "until (: < /dev/tcp/127.0.0.1/8000) 2> /dev/null; do sleep 0.05; done",
        check="[ \"$(python3 -c 'import urllib.request as r; "
        'print(r.urlopen("http://localhost:8000/answer.txt").read().decode())\' 2> /dev/null)" = @ ]',
    ),
    "separate": Kind(
        toml='artifacts = ["/app/out"]\n[verifier]\nenvironment_mode = "separate"\n',
        solve="mkdir out; echo @ > out/answer.txt; touch other",
        check='[ "$(cat out/answer.txt)" = @ ] && [ ! -e other ]',
    ),
    "separate, own image": Kind(
        toml='artifacts = ["/app/answer.txt"]\n[verifier]\nenvironment_mode = "separate"\n',
        files={"tests/Dockerfile": PLAIN + "RUN touch /graders\nCOPY test.sh /tests/test.sh\n"},
        check=CHECK + " && [ -e /graders ]",
    ),
    "collect": Kind(
        toml='[verifier]\nenvironment_mode = "separate"\n'
        'collect = [{command = "cp /app/answer.txt /logs/artifacts/ || touch /logs/artifacts/none"}]\n',
        check='[ "$(cat /logs/artifacts/answer.txt)" = @ ] && [ ! -e answer.txt ]',
    ),
    "steps": Kind(
        toml='[[steps]]\nname = "first"\nmin_reward = 1.0\n[[steps]]\nname = "second"\n',
        steps=(("first", ANSWER, CHECK), ("second", "cat answer.txt answer.txt > twice", '[ "$(wc -l < twice)" = 2 ]')),
    ),
    "steps, the last counts": Kind(
        toml='multi_step_reward_strategy = "final"\n'
        '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\nmin_reward = {reward = 0.5}\n',
        steps=(("one", "true", "false"), ("two", ANSWER, CHECK)),
    ),
    "steps with files": Kind(
        toml='[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n',
        files={"steps/b/workdir/setup.sh": "mkdir given && mv b.txt given/\n", "steps/b/workdir/b.txt": "given @\n"},
        steps=(("a", ANSWER, CHECK), ("b", "cp given/b.txt b2.txt", '[ "$(cat b2.txt)" = "given @" ]')),
    ),
    "variables": Kind(
        toml='[environment]\nenv = {NUMBER = "@", MODE = "${MODE_OF_NOBODY:-fast}"}\n'
        '[verifier]\nenv = {EXPECTED = "fast @ solved"}\n[solution]\nenv = {WORD = "solved"}\n',
        solve='echo "$MODE $NUMBER $WORD" > answer.txt',
        check='[ "$(cat answer.txt)" = "$EXPECTED" ]',
    ),
    ".dockerignore": Kind(
        dockerfile=PLAIN + "COPY . /app/all/\nCOPY *.csv table/\n",
        files={
            "environment/.dockerignore": "*.log\nsecret\n!kept.log\n",
            "environment/a.csv": "1\n",
            "environment/b.csv": "2\n",
            "environment/old.log": "x\n",
            "environment/kept.log": "x\n",
            "environment/secret/key": "x\n",
        },
        solve="{ ls all; ls table; echo @; } > answer.txt",
        check=r'printf "Dockerfile\na.csv\nb.csv\nkept.log\na.csv\nb.csv\n@\n" | cmp -s - answer.txt',
    ),
    "ARG, ENV and SHELL": Kind(
        dockerfile=f"ARG IMAGE={BASE}\nFROM $IMAGE\nWORKDIR /app\nARG NAME=world\n"
        'ENV GREETING="hello ${NAME:-nobody}" PATH=/opt/tools:$PATH\nSHELL ["/bin/bash", "-c"]\n'
        'RUN [[ $GREETING == "hello world" ]] && mkdir /opt/tools && '
        "printf '#!/bin/sh\\necho \"$GREETING\"\\n' > /opt/tools/greet && chmod 755 /opt/tools/greet\n",
        solve='echo "$(greet) @" > answer.txt',
        check='[ "$(cat answer.txt)" = "hello world @" ]',
    ),
    "ADD of an archive": Kind(
        dockerfile=PLAIN + "ADD data.tar /opt/data/\n",
        archives={"environment/data.tar": {"part/one.txt": "1\n", "part/two.txt": "2\n"}},
        solve="cat /opt/data/part/*.txt > answer.txt; echo @ >> answer.txt",
        check=r'printf "1\n2\n@\n" | cmp -s - answer.txt',
    ),
    "RUN --mount": Kind(
        dockerfile=PLAIN + "RUN --mount=type=bind,source=notes.txt,target=/mnt/notes.txt cp /mnt/notes.txt kept.txt\n",
        files={"environment/notes.txt": "noted\n"},
        solve="{ ls /mnt; cat kept.txt; echo @; } > answer.txt",
        check=r'printf "noted\n@\n" | cmp -s - answer.txt',
    ),
    "no network": Kind(
        toml='[environment]\nnetwork_mode = "no-network"\n',
        solve='echo "@ $(grep -c : /proc/net/dev)" > answer.txt',
        check='[ "$(cat answer.txt)" = "@ 1" ] && [ -z "$HTTP_PROXY" ]',
    ),
    "allowlist": Kind(
        toml='[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["example.com"]\n',
        solve="python3 - <<'END' > answer.txt\n"
        "import urllib.error, urllib.request\n"
        "try:\n    urllib.request.urlopen('http://other.example/', timeout=20)\n"
        "except urllib.error.HTTPError as error:\n    print(error.code, @)\nEND",
        check='[ "$(cat answer.txt)" = "403 @" ]',
    ),
    "tests in Python": Kind(
        files={
            "tests/test_outputs.py": "import json, pathlib, unittest\n\n\nclass Outputs(unittest.TestCase):\n"
            "    def test_answer(self):\n"
            "        expected = json.loads(pathlib.Path('/tests/data/expected.json').read_text())\n"
            "        self.assertEqual(pathlib.Path('answer.txt').read_text().strip(), expected['answer'])\n",
            "tests/data/expected.json": '{"answer": "@"}\n',
        },
        check="python3 -m unittest discover -s /tests -p 'test_*.py'",
    ),
}


def write_folders(root: Path, count: int, kinds: Sequence[str]) -> None:
    """Write that many task folders below `root`: one of each of these kinds, then their variants."""
    for number, name in enumerate(islice(cycle(kinds), count), start=1):
        slug = "-".join("".join(char if char.isalnum() else " " for char in name.lower()).split())
        _write(root / f"{number:02}-{slug}", KINDS[name], number)


def _write(folder: Path, kind: Kind, number: int) -> None:
    files = {"task.toml": f'schema_version = "1.4"\n{kind.toml}', "environment/Dockerfile": kind.dockerfile}
    for name, solve, check in kind.steps or (("", kind.solve, kind.check),):
        where = f"steps/{name}/" if name else ""
        files[f"{where}instruction.md"] = f"Do task @{f', step {name}' if name else ''}.\n"
        files[f"{where}solution/solve.sh"] = f"#!/bin/bash\n{solve}\n"
        files[f"{where}tests/test.sh"] = f"#!/bin/bash\npassed=0\nif {check}; then passed=1; fi\n{kind.reward}\n"
    for path, text in (files | kind.files).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace("@", str(number)))
        target.chmod(0o755 if path.endswith(".sh") else 0o644)
    for path, contents in kind.archives.items():
        with tarfile.open(folder / path, "w") as archive:
            for name, text in contents.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
