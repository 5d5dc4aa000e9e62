"""The stages of a Dockerfile, each as a base and a script that keeps the order of its instructions.

What cannot be built here is an error with its line: `docs/harbor.md` has the table. Nothing is run to find out, and the
files that COPY names are looked for. CMD, EXPOSE, HEALTHCHECK, LABEL, STOPSIGNAL and VOLUME change no file, so they are
left out; as is an empty ENTRYPOINT.
"""

from __future__ import annotations

import json
import platform
import posixpath
import re
import shlex
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .context import GLOB, Context
from .instructions import DockerfileError, Instruction, parse_instructions
from .script import INPUTS, PRELUDE
from .words import UnknownVariable, WordError, evaluate, parse_word, shell_word, split_words

if TYPE_CHECKING:
    from pathlib import Path

    from .words import Word

NO_EFFECT = frozenset({"CMD", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"})
SHELL = ("/bin/sh", "-c")
MODE = re.compile(r"[0-7]{1,4}|[ugoa]*[-+=][rwxXst]*(,[ugoa]*[-+=][rwxXst]*)*")
URL = re.compile(r"(https?|ftp|git|ssh)://|git@")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
SIZE_LIMIT_BYTES = 2**20


@dataclass(slots=True)
class Stage:
    number: int
    name: str
    base: str
    """The published image that it begins with, such as `ubuntu:24.04`; empty: another stage."""
    parent: Stage | None = None
    """The stage that it begins with."""
    lines: list[str] = field(default_factory=list)
    """Its instructions as calls of the functions of `PRELUDE`; empty: it is the base."""
    stages: dict[str, Stage] = field(default_factory=dict)
    """Stages that it copies from, by their names below `INPUTS`."""
    images: dict[str, str] = field(default_factory=dict)
    """Published images that it copies from, likewise."""
    directory: str = ""
    """Its last WORKDIR; empty: the base's, or one that only the build knows."""
    user: str = ""
    """Its last USER; empty likewise."""

    @property
    def script(self) -> str:
        """What builds it in the base; empty: it is the base."""
        return "\n".join([PRELUDE, *self.lines, "at 'the end'", "finish", ""]) if self.lines else ""


@dataclass(frozen=True, slots=True)
class Dockerfile:
    path: Path
    context: Context
    stages: tuple[Stage, ...]
    """Those that the last one needs, in order."""

    @property
    def last(self) -> Stage:
        """The stage that is the image."""
        return self.stages[-1]

    def images(self) -> list[str]:
        """Return the published images that it needs, each once."""
        named = [each for stage in self.stages for each in (stage.base, *stage.images.values()) if each]
        return list(dict.fromkeys(named))


def read_dockerfile(path: Path) -> Dockerfile:
    """Read a Dockerfile, which copies from its own folder.

    Raises:
        DockerfileError: an instruction is wrong, or cannot be built here.
        InvalidRecord: so is a pattern of `.dockerignore`.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(SIZE_LIMIT_BYTES + 1)
    if len(data) > SIZE_LIMIT_BYTES:
        raise DockerfileError(1, "FROM", f"the file is larger than {SIZE_LIMIT_BYTES} bytes")
    instructions, escape = parse_instructions(data.decode())
    context = Context(path.parent)
    stages = _Reader(context, escape).read(instructions)
    needed: set[int] = set()
    waiting = [stages[-1]]
    while waiting:
        stage = waiting.pop()
        needed.add(stage.number)
        waiting += [*stage.stages.values(), *([stage.parent] if stage.parent else [])]
    return Dockerfile(path, context, tuple(stage for stage in stages if stage.number in needed))


class _Reader:
    """Reads the instructions one after the other."""

    def __init__(self, context: Context, escape: str) -> None:
        self._context = context
        self._escape = escape
        self._stages: list[Stage] = []
        machine = ARCHITECTURES.get(platform.machine(), platform.machine())
        self._given = {
            f"{side}{name}": value
            for side in ("TARGET", "BUILD")
            for name, value in (("PLATFORM", f"linux/{machine}"), ("OS", "linux"), ("ARCH", machine), ("VARIANT", ""))
        }
        self._globals: dict[str, str | None] = {}
        self._known: dict[str, str | None] = {}
        self._arguments: set[str] = set()
        self._shell: tuple[str, ...] = SHELL
        self._lines: list[str] = []
        self._methods = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._env,
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
            "WORKDIR": self._workdir,
            "USER": self._user,
            "SHELL": self._set_shell,
            "ENTRYPOINT": self._entrypoint,
            "ONBUILD": self._onbuild,
        }

    def read(self, instructions: list[Instruction]) -> list[Stage]:
        for each in instructions:
            if each.keyword not in ("ARG", "FROM") and not self._stages:
                raise each.fail("a Dockerfile begins with FROM")
            try:
                self._add(each)
            except (WordError, UnknownVariable) as error:
                raise each.fail(str(error)) from error
        if not self._stages:
            raise DockerfileError(1, "FROM", "it is missing: a Dockerfile begins with FROM")
        return self._stages

    def _add(self, each: Instruction) -> None:
        if not each.text and each.keyword not in NO_EFFECT:
            raise each.fail("nothing follows it")
        if each.keyword in NO_EFFECT:
            return
        if each.keyword not in ("FROM", "ARG"):
            shown = " ".join(f"{each.keyword} {each.text}".split())[:80]
            self._lines.append(f"at {shlex.quote(f'line {each.line}: {shown}')}")
        self._methods[each.keyword](each)

    def _from(self, each: Instruction) -> None:
        words = [evaluate(parse_word(word, self._escape), self._globals) for word in each.text.split()]
        if len(words) not in (1, 3) or (words[2:] and words[1].lower() != "as") or not words[0]:
            raise each.fail("it takes IMAGE, or IMAGE AS NAME")
        for flag, value in each.flags:
            if flag != "platform":
                raise each.fail(f"it has no --{flag}")
            wanted = evaluate(parse_word(value, self._escape), self._given | self._globals)
            if wanted not in (self._given["TARGETPLATFORM"], "linux"):
                raise each.fail(f"--platform={wanted}: images are built for {self._given['TARGETPLATFORM']} here")
        if words[0].lower() == "scratch":
            raise each.fail("an empty image has no shell to build it with")
        parent = self._stage(words[0])
        name = words[2].lower() if words[2:] else ""
        stage = Stage(len(self._stages), name, "" if parent else words[0], parent)
        if parent is not None:
            stage.directory, stage.user = parent.directory, parent.user
        self._stages.append(stage)
        self._known = {"*": None}
        self._arguments = set()
        self._shell, self._lines = SHELL, stage.lines

    def _stage(self, name: str) -> Stage | None:
        """Return an earlier stage by its name."""
        return next((stage for stage in reversed(self._stages) if stage.name and stage.name == name.lower()), None)

    def _arg(self, each: Instruction) -> None:
        for word in split_words(each.text, self._escape):
            name, equals, text = word.partition("=")
            value = parse_word(text, self._escape)
            if not self._stages:
                self._globals[name] = evaluate(value, self._given | self._globals) if equals else ""
                continue
            if name in self._known and name not in self._arguments:
                continue  # ENV wins
            if equals:
                self._learn(name, value)
                shown = shell_word(value)
            else:
                given = self._globals.get(name) or self._given.get(name)
                if given is None:
                    continue
                self._known[name] = given
                shown = shlex.quote(given)
            if name in self._arguments:
                self._lines.append(f"export {name}={shown}")
            else:  # the base image may have a variable of this name
                self._lines.append(f'[ -n "${{{name}+set}}" ] || export {name}={shown}')
            self._arguments.add(name)

    def _env(self, each: Instruction) -> None:
        words = split_words(each.text, self._escape)
        pairs = [(found[1], found[2]) for word in words if (found := ASSIGNMENT.fullmatch(word))]
        if len(pairs) < len(words):
            name, _, text = each.text.partition(" ")
            if ASSIGNMENT.fullmatch(words[0]) or not text or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise each.fail("it takes NAME=VALUE …, or NAME VALUE")
            pairs = [(name, text.strip())]
        values = [(name, parse_word(text, self._escape)) for name, text in pairs]
        self._lines.append("export " + " ".join(f"{name}={shell_word(value)}" for name, value in values))
        self._lines.append(f'_variables="$_variables {" ".join(name for name, _ in values)}"')
        before = dict(self._known)
        for name, value in values:
            self._learn(name, value, before)
            self._arguments.discard(name)

    def _learn(self, name: str, value: Word, known: dict[str, str | None] | None = None) -> None:
        try:
            self._known[name] = evaluate(value, self._known if known is None else known)
        except UnknownVariable:
            self._known[name] = None

    def _run(self, each: Instruction) -> None:
        lent = []
        for flag, value in each.flags:
            if flag == "mount":
                lent += self._mount(each, value)
            elif (flag, value) not in (("network", "default"), ("network", "host")):
                raise each.fail(f"--{flag}{'=' * bool(value)}{value} cannot be obeyed")
        argv = _json_words(each.text)
        if argv is None and len(each.heredocs) == 1 and len(each.text.split()) == 1:
            content = each.heredocs[0].content
            if content.startswith("#!"):
                self._lines.append(f"write 0:0 700 /.prorl.script run {shlex.quote(content)}")
                self._lines += ["chmod 755 /.prorl.script", "run /.prorl.script", "rm /.prorl.script"]
                return
            argv = [*self._shell, content]
        if argv is None:
            argv = [*self._shell, each.text + (f"\n{each.bodies}" if each.heredocs else "")]
        self._lines.append(f"run {shlex.join(argv)}")
        self._lines += [f"take {target}" for target in lent]

    def _mount(self, each: Instruction, value: str) -> list[str]:
        """Make a mount's target; return it if it is to be removed after the command."""
        options = dict(option.partition("=")[::2] for option in value.split(","))
        kind = options.get("type", "bind")
        target = options.get("target") or options.get("dst") or options.get("destination")
        if kind not in ("bind", "cache", "tmpfs") or not target:
            raise each.fail(f"--mount={value}: only bind, cache and tmpfs with a target can be obeyed")
        word = shell_word(parse_word(target, self._escape))
        if kind != "bind":
            self._lines.append(f'folder "$(absolute {word})" ""')
            return []
        source = options.get("source") or options.get("src") or "."
        (shown,) = self._sources(each, [source], options.get("from", ""))
        self._lines.append(f"lend {shown} {word}")
        return [word]

    def _copy(self, each: Instruction) -> None:
        flags = dict(each.flags)
        for flag in flags.keys() - {"from", "chown", "chmod", "link"}:
            raise each.fail(f"--{flag} is not supported")
        mode = flags.get("chmod", "")
        if mode and not MODE.fullmatch(mode):
            raise each.fail(f"--chmod={mode} is not a mode such as 755")
        words = _json_words(each.text)
        *sources, target = words if words is not None else each.text.split() or [""]
        if not sources:
            raise each.fail("it takes SOURCE … TARGET")
        place = shell_word(parse_word(target, self._escape))
        owner = "kept" if "from" in flags else "0:0"
        if flags.get("chown"):
            owner = shell_word(parse_word(flags["chown"], self._escape))
        if each.heredocs:
            if len(sources) != len(each.heredocs):
                raise each.fail("files and heredocs in one instruction are not supported")
            for heredoc in each.heredocs:
                literal = heredoc.is_literal
                word = (heredoc.content,) if literal else parse_word(heredoc.content, self._escape, quotes="")
                self._lines.append(f'write {owner} "{mode}" {place} {heredoc.name} {shell_word(word)}')
            return
        if any(URL.match(source) for source in sources):
            raise each.fail("an address cannot be fetched: put the file into the folder, or fetch it with RUN")
        if each.keyword == "ADD":
            archives = [source for source in sources if self._is_archive(source)]
            self._lines += [f"unpack {place} {path}" for path in self._sources(each, archives, "")]
            sources = [source for source in sources if source not in archives]
        found = self._sources(each, sources, flags.get("from", ""))
        if len(found) > 1 and not target.endswith(("/", "/.")) and target != ".":
            raise each.fail(f"several files are copied to {target}, which must end with /")
        if found:
            several = '""' if len(found) < 2 else "1"
            self._lines.append(f'copy {owner} "{mode}" {place} {several} {" ".join(found)}')

    def _sources(self, each: Instruction, sources: list[str], origin: str) -> list[str]:
        """Return sources as words of the script; `origin` is a stage or an image, or empty: the build's folder."""
        if origin:
            top = self._origin(each, evaluate(parse_word(origin, self._escape), self._known))
            paths = [evaluate(parse_word(source, self._escape), self._known) for source in sources]
            return [_pattern(posixpath.join(top, path.lstrip("/"))) for path in paths]
        found = []
        for source in sources:
            name = evaluate(parse_word(source, self._escape), self._known)
            try:
                paths = self._context.find(name)
            except ValueError as error:
                raise each.fail(str(error)) from error
            if not paths:
                raise each.fail(f"there is no {name} in the folder of the Dockerfile")
            found += [shlex.quote(posixpath.normpath(f"{INPUTS}/context/{path}")) for path in paths]
        return found

    def _origin(self, each: Instruction, origin: str) -> str:
        current = self._stages[-1]
        stage = self._stage(origin)
        if stage is None and origin.isdecimal():
            stage = self._stages[int(origin)] if int(origin) < len(self._stages) else None
            if stage is None:
                raise each.fail(f"there is no stage {origin}")
        if stage is current:
            raise each.fail("a stage cannot copy from itself")
        if stage is not None:
            name = f"stage-{stage.number}"
            current.stages[name] = stage
        else:
            name = f"image-{len(current.images)}"
            name = next((key for key, image in current.images.items() if image == origin), name)
            current.images[name] = origin
        return f"{INPUTS}/{name}"

    def _is_archive(self, source: str) -> bool:
        name = evaluate(parse_word(source, self._escape), self._known)
        path = self._context.root / name.lstrip("/")
        if not path.resolve().is_relative_to(self._context.root.resolve()):
            return False
        return not GLOB.search(name) and ".." not in name.split("/") and path.is_file() and tarfile.is_tarfile(path)

    def _workdir(self, each: Instruction) -> None:
        word = parse_word(each.text, self._escape)
        self._lines.append(f"directory {shell_word(word)}")
        stage = self._stages[-1]
        try:
            path = posixpath.join(stage.directory, evaluate(word, self._known))
        except UnknownVariable:
            path = ""
        stage.directory = posixpath.normpath(path) if path.startswith("/") else ""

    def _user(self, each: Instruction) -> None:
        word = parse_word(each.text, self._escape)
        self._lines.append(f"_user={shell_word(word)}")
        try:
            self._stages[-1].user = evaluate(word, self._known)
        except UnknownVariable:
            self._stages[-1].user = ""

    def _set_shell(self, each: Instruction) -> None:
        words = _json_words(each.text)
        if not words:
            raise each.fail('it takes a list such as ["/bin/bash", "-c"]')
        self._shell = tuple(words)

    def _entrypoint(self, each: Instruction) -> None:
        if _json_words(each.text) != []:
            raise each.fail("sandboxes do not start an image's own program; without it, this task may not work")

    def _onbuild(self, each: Instruction) -> None:
        raise each.fail("it is for images that others build upon, and is not supported")


def _json_words(text: str) -> list[str] | None:
    """Return the words of the JSON form; None: it is not that form."""
    if not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except ValueError:
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _pattern(path: str) -> str:
    """Quote a path for the shell but for its wildcards."""
    parts = re.split(r"([*?]|\[[^\]]*\])", path)
    return "".join(part if number % 2 else shlex.quote(part) for number, part in enumerate(parts) if part)
