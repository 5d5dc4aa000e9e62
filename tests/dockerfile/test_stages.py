"""Dockerfiles as stages: what is read, and what is rejected with its line."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.dockerfile.context import Context
from prorl_zmq.dockerfile.instructions import DockerfileError, parse_instructions
from prorl_zmq.dockerfile.stages import read_dockerfile
from prorl_zmq.dockerfile.words import UnknownVariable, WordError, evaluate, parse_word, shell_word, split_words
from prorl_zmq.errors import InvalidRecord

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.dockerfile.stages import Dockerfile


def dockerfile(folder: Path, text: str, *files: str) -> Dockerfile:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "Dockerfile").write_text(text)
    return read_dockerfile(folder / "Dockerfile")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "begins with FROM"),
        ("RUN true\n", 1, "RUN: a Dockerfile begins with FROM"),
        ("FROM a\n\n# note\nRAN true\n", 4, "RAN: it is not an instruction"),
        ("FROM scratch\n", 1, "FROM: an empty image has no shell"),
        ("FROM a b\n", 1, "IMAGE AS NAME"),
        ("FROM --platform=windows/amd64 a\n", 1, "images are built for linux"),
        ("FROM a\nRUN\n", 2, "RUN: nothing follows"),
        ("FROM a\nRUN x \\\n  # note\n\n  y\nCOPY nothing /\n", 6, "COPY: there is no nothing in the folder"),
        ("FROM a\nCOPY ../secret /\n", 2, "COPY: ../secret leads out of the folder"),
        ("FROM a\nCOPY here/../../x /\n", 2, "leads out of the folder"),
        ("FROM a\nCOPY *.py /\n", 2, r"there is no \*\.py"),
        ("FROM a\nCOPY here here2 /x\n", 2, "must end with /"),
        ("FROM a\nCOPY here\n", 2, "SOURCE"),
        ("FROM a\nCOPY --parents here /\n", 2, "--parents is not supported"),
        ("FROM a\nCOPY --chmod=rw here /\n", 2, "--chmod=rw is not a mode"),
        ("FROM a\nCOPY --from=3 here /\n", 2, "there is no stage 3"),
        ("FROM a AS b\nCOPY --from=b here /\n", 2, "cannot copy from itself"),
        ("FROM a\nCOPY $BASE/x /\n", 2, "known only to the base image"),
        ("FROM a\nADD https://example.com/x /\n", 2, "ADD: an address cannot be fetched"),
        ("FROM a\nRUN --mount=type=secret,id=x cat\n", 2, "RUN: --mount=type=secret,id=x: only bind"),
        ("FROM a\nRUN --network=none true\n", 2, "--network=none cannot be obeyed"),
        ("FROM a\nRUN <<EOF\ntrue\n", 2, "heredoc EOF has no end"),
        ("FROM a\nENV A=1 B\n", 2, "NAME=VALUE"),
        (
            "FROM a\nARG A0=xxxx\n" + "".join(f"ARG A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 40)),
            18,
            "has more than",
        ),
        ("FROM a\nENV A='1\n", 2, "has no end"),
        ("FROM a\nENV A=${B/x/y}\n", 2, "only :-, -, :. and . may follow"),
        ("FROM a\nSHELL bash\n", 2, "takes a list"),
        ('FROM a\nENTRYPOINT ["/start"]\n', 2, "do not start an image's own program"),
        ("FROM a\nONBUILD RUN true\n", 2, "not supported"),
    ],
)
def test_what_cannot_be_built_is_named_with_its_line(text: str, line: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(DockerfileError, match=words) as caught:
        dockerfile(tmp_path, text, "here", "here2")
    assert caught.value.fields["line"] == line
    assert caught.value.message.startswith(f"line {line}: ")


@pytest.mark.parametrize("source", ["out", "out/secret", "here/up/secret", "here/*/secret", "o*"])
def test_a_link_that_leads_out_of_the_folder_is_rejected(source: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    context = tmp_path / "context"
    (context / "here").mkdir(parents=True)
    (context / "out").symlink_to("..")
    (context / "here" / "up").symlink_to(tmp_path)
    with pytest.raises(DockerfileError, match=r"line 2: COPY: .* leads out of the folder .* through a link"):
        dockerfile(context, f"FROM a\nCOPY {source} /\n")


def test_a_link_that_stays_in_the_folder_is_copied(tmp_path: Path) -> None:
    (tmp_path / "near").symlink_to("here/a.txt")
    assert "context/near" in dockerfile(tmp_path, "FROM a\nCOPY near /\n", "here/a.txt").last.script


def test_only_stages_that_the_last_one_needs_are_built(tmp_path: Path) -> None:
    read = dockerfile(
        tmp_path,
        "ARG V=3.12\nFROM python:$V AS Build\nRUN true\nFROM other AS unused\nRUN false\n"
        "FROM build AS middle\nWORKDIR /a\nWORKDIR b\nUSER me\nFROM middle\n"
        "COPY --from=build /x /\nCOPY --from=ghcr.io/uv:1 /uv /bin/\nENV D=$UNKNOWN\nWORKDIR ${E:-c}\n",
    )
    assert [stage.number for stage in read.stages] == [0, 2, 3]
    assert read.images() == ["python:3.12", "ghcr.io/uv:1"]
    assert (read.stages[1].directory, read.last.directory, read.last.user) == ("/a/b", "", "me")


def test_instructions_without_effect_on_files_are_left_out(tmp_path: Path) -> None:
    text = 'FROM a\nCMD ["x"]\nEXPOSE 80\nLABEL a=b\nENTRYPOINT []\nHEALTHCHECK --interval=5s CMD x\nVOLUME /v\n'
    assert dockerfile(tmp_path, text).last.script.count("\nat 'line") == 1  # of the empty ENTRYPOINT


def test_scripts_are_for_every_shell(tmp_path: Path) -> None:
    text = r"""# escape=`
FROM a
RUN echo "it's" `
    && echo \n
RUN <<-EOF
	echo "$HOME" 'it''s'
	EOF
COPY ["a b", "c[1]", "/d e/"]
ADD --chown=1:2 --chmod=u+x here /
ENV A="x ${B:-its }}" C=`"q
RUN --mount=type=cache,target=/c --mount=type=bind,source=here,target=/h true
"""
    script = dockerfile(tmp_path, text, "a b", "c1", "here").last.script
    for shell in filter(shutil.which, ("dash", "bash")):
        checked = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")
    assert "run /bin/sh -c 'echo \"it'\"'\"'s\"     && echo \\n'" in script
    assert 'copy 0:0 "" "/d e/" 1 \'/.prorl/context/a b\' /.prorl/context/c1' in script


def test_heredocs_end_where_they_say() -> None:
    text = "FROM a\nRUN cat <<A <<'B' > x\n# a\nA\n$b\nB\nRUN echo '<<C' \"<<D\" $((1<<E))\n"
    instructions, _ = parse_instructions(text)
    assert [(each.line, each.keyword) for each in instructions] == [(1, "FROM"), (2, "RUN"), (7, "RUN")]
    assert [(each.name, each.content, each.is_literal) for each in instructions[1].heredocs] == [
        ("A", "# a\n", False),
        ("B", "$b\n", True),
    ]
    assert instructions[2].heredocs == ()


WORDS = (
    *("$A", "${A}x", "a$A/$B", "${N:-d}", "${N-d}", "${E:-d}", "${E-d}", "${A:+y}", "${E:+y}", "${E+y}", "${N:-${A}}"),
    *("'$A'", '"$A b"', r"\$A", r"'it'\''s'", "a\\\\b", "$", "cost$ 5", "${N:-`x`}", '"a\'b"'),
)


def test_words_have_one_value_here_and_in_the_shell() -> None:
    known: dict[str, str | None] = {"A": "one", "B": "", "E": ""}
    words = [parse_word(text, "\\") for text in WORDS]
    command = f"A=one B= E=; unset N; printf '%s\\n' {' '.join(map(shell_word, words))}"
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert [evaluate(word, known) for word in words] == shown.stdout.splitlines()


def test_words_that_are_wrong() -> None:
    for text in ("${A", "${A#x}", "'a", "${}"):
        with pytest.raises(WordError):
            parse_word(text, "\\")
    with pytest.raises(UnknownVariable):
        evaluate(parse_word("$A", "\\"), {"*": None})
    assert split_words(r"""A=1 B="x y" C=a\ b""", "\\") == ["A=1", 'B="x y"', r"C=a\ b"]


@pytest.mark.parametrize("pattern", ["[z-a]", "!data/[]", "[^]"])
def test_an_invalid_pattern_of_dockerignore_is_named_with_its_line(pattern: str, tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text(f"# these\n*.pyc\n{pattern}\n")
    with pytest.raises(
        InvalidRecord, match=rf"^\.dockerignore, line 3: '{re.escape(pattern)}' is not a pattern"
    ) as caught:
        dockerfile(tmp_path, "FROM a\n")
    assert caught.value.fields["line"] == 3


def test_dockerignore(tmp_path: Path) -> None:
    for name in ("a.log", "keep.log", "deep/b.log", "node_modules/x/y", "node_modules/kept/z", "src/a.pyc", "c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    rules = ["# these", "*.log", "!keep.log", "node_modules", "!node_modules/kept", "**/*.pyc"]
    (tmp_path / ".dockerignore").write_text("\n".join(rules))
    context = Context(tmp_path)
    assert context.find("*.log") == ["keep.log"]
    assert context.find("src/a.pyc") == []
    context.copy_to(tmp_path.parent / "copy")
    copied = {str(each.relative_to(tmp_path.parent / "copy")) for each in (tmp_path.parent / "copy").rglob("*")}
    assert copied - {".dockerignore"} == {
        *("keep.log", "deep", "deep/b.log", "node_modules", "node_modules/kept", "node_modules/kept/z", "src", "c"),
    }
