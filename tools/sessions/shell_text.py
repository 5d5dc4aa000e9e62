r"""The text that `shell_process` gives to bash; no files and no processes.

`__prorl_next` takes the command of its action from the command file, and none where the file is incomplete or another
action's; the action's number then has a minus. `__prorl_prompt` reports the status: at the end of the action's line,
and, where an error or an interrupt ended that line early, as PROMPT_COMMAND; `__prorl_mend` does so after a command has
closed its output. Their calls stand in groups whose output is covered, so neither `set -x` nor a DEBUG trap shows them;
only `eval` stands alone.

The functions are readonly, so no later alias changes them, and call bash's own through `builtin`, past the agent's
functions. The prompt removes aliases of reserved words and functions called `builtin` or `exec`, and restores what
`enable -n` disabled.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NEEDED = "enable eval exec jobs mapfile printf read return trap unalias unset"
"""The builtins that the plumbing uses."""
_OPENING = (
    # Bash moves what a redirection covers to descriptor 10, to be closed at exec, and its copies are closed then, too.
    "{{ exec {f.control}>&10; }} {f.control_end}>&-; {{ exec {f.command}<&10; }} {f.command_end}<&-; "
    "{{ exec {f.terminal}>&10; }} 0<&-; exec {f.control_end}>&- {f.command_end}<&-; "
    "{{ unset HISTFILE MAILCHECK; set +o history; __prorl_action=0 __prorl_status=0 __prorl_code=0 __prorl_said=; "
    "__prorl_next() {{ __prorl_said= __prorl_code=0 __prorl_action=$1; exec 0<&{f.terminal}; "
    # Jobs that ended since the prompt: bash would tell of them when the next foreground program ends.
    "[[ $3 ]] || {{ builtin jobs -nr; builtin jobs -ns >&{f.terminal}; builtin jobs -n; }}; "
    # What an interrupted `read` had left in its buffer would come first; `mapfile` empties that.
    "builtin mapfile -n 1 -u {f.command} __prorl_command && "
    "IFS= builtin read -r -d '' -u {f.command} __prorl_command && "
    "IFS= builtin read -r -d '' -u {f.command} __prorl_action && "
    '[[ $__prorl_action == "$1" ]] || __prorl_action=-$1 __prorl_command= __prorl_code=$2; '
    'builtin return "$__prorl_status"; }}; '
    "__prorl_prompt() {{ if [[ $__prorl_said ]]; then __prorl_said=; else "
    "unset -f builtin exec; builtin enable {needed} || enable builtin {needed}; builtin unalias '{{' '}}'; "
    "__prorl_status=$__prorl_last; [[ $__prorl_status != 0 ]] || __prorl_status=$__prorl_code; "
    "PS0= PS1= PS2=; builtin unset -v __prorl_command; __prorl_command=; "
    # An interrupt between the two would leave bash without a way to say a status, so only where the agent changed it.
    "[[ ${{PROMPT_COMMAND[*]-}} == '{prompt_command}' ]] || "
    "{{ builtin unset -v PROMPT_COMMAND; PROMPT_COMMAND='{prompt_command}'; }}; exec 0<&{f.control}; "
    # Bash would report ended jobs when it reads its next line: in another command's output. `-n` marks them reported;
    # the agent sees only those that have stopped, since they wait for it.
    "builtin jobs -nr; builtin jobs -ns >&11; builtin jobs -n; "
    'builtin eval \'\\builtin printf "\\0%s %s %s %s\\0" '
    '"$__prorl_action" "$__prorl_status" "$-" "${{PWD-}}" >&{f.control}\'; '
    "__prorl_said=${{1-}}; fi; }}; "
    "__prorl_mend() {{ exec >&{f.terminal} 2>&{f.terminal}; {{ __prorl_prompt; }} {covered}; }}; "
    "readonly -f __prorl_next __prorl_prompt __prorl_mend; "
    "IFS= read -r -d '' -u {f.command} __prorl_command; cd -- \"$__prorl_command\"; "
    "PROMPT_COMMAND='{prompt_command}'; }} 2>/dev/null\n"
)
_LINE = (
    " {{ \\__prorl_next {number} {code} {asks_of_jobs}; }} >/dev/null 2>&1 && {{ [[ 1 ]]; }} >/dev/null 2>&1; "
    '\\builtin eval "$__prorl_command"; '
    "{noted}; {{ \\__prorl_prompt 1; }} {covered} || \\__prorl_mend\n"
)
"""Under `set -e` only what is left of `&&` may fail, as the restored `$?` may. An interrupt while bash waits for the
line can cost the first character, so that is a space."""
_PROMPT_COMMAND = "{noted}; {{ \\__prorl_prompt; }} {covered} || \\__prorl_mend"
_NOTED = "{{ __prorl_last=$?; \\builtin trap -p ERR >&{f.control} || [[ 1 ]]; }} >/dev/null 2>&1"
"""In a function there is no ERR trap."""
_COVERED = "10>&1 11>&2 >/dev/null 2>&1"
"""Fails where one of the two is closed. The numbers are below any usable limit."""
_STATUS_KEPT = b"\n{ __prorl_code=$?; } >/dev/null 2>&1"
_ASKS_OF_JOBS = re.compile(rb"\b(?:jobs|wait|fg|bg|disown)\b|%")
"""What may need reports of ended jobs: bash drops a job once it has reported its end."""
_MINDS_STATUS = re.compile(rb"\bset\s+-|errexit|\bERR\b")
"""What may enable `errexit` or an ERR trap in the command itself."""
_GOES_ON = re.compile(
    rb"(?:\\|[|&(]|\(\s*\)|\bfunction\s+\S+|\b(?:for|select)\s+\w+(?:\s+in\b[^;\n]*)?;?)\s*(?:#[^\n]*\s*)*\Z"
)
"""The end of a command that would absorb text after it."""
_HERE = re.compile(rb"(?<!<)<<(?!<)")
_HERE_DOCUMENT = re.compile(rb"(?<!<)<<(?!<)-?[ \t]*(['\"\\]?)([\w.]+)\1")


class PrivateFiles(NamedTuple):
    """Bash's private descriptors: the two that it inherits, and the numbers of those it makes."""

    control_end: int
    command_end: int
    control: int
    command: int
    terminal: int


def opening_line(files: PrivateFiles) -> bytes:
    """Return what a new bash is typed: it sets up the plumbing and enters the directory in the command file."""
    prompt_command = _PROMPT_COMMAND.format(noted=_NOTED.format(f=files), covered=_COVERED)
    return _OPENING.format(f=files, needed=_NEEDED, covered=_COVERED, prompt_command=prompt_command).encode()


def action_line(files: PrivateFiles, number: int, code: int, command: bytes) -> bytes:
    """Return the line that makes bash, at its prompt, run the command that the command file holds for an action."""
    asks_of_jobs = 1 if _ASKS_OF_JOBS.search(command) else "''"
    return _LINE.format(
        number=number, code=code, asks_of_jobs=asks_of_jobs, noted=_NOTED.format(f=files), covered=_COVERED
    ).encode()


def command_file(command: bytes, number: int) -> bytes:
    """Return the command file's content for an action.

    `mapfile` takes the empty line; the number is at the end, so that content read in part belongs to no action.
    """
    return b"\n%b\0%d\0" % (command, number)


def evaluated(command: bytes, *, minds_status: bool) -> bytes:
    """Return the text to `eval` for a command.

    A last status other than 0 is that of `eval`, too: it trips `set -e` where the command alone does not (`false &&
    true`), and an ERR trap twice. The text then stores the status and ends with 0, unless the command might absorb
    that.
    """
    if not minds_status and not _MINDS_STATUS.search(command):
        return command
    if _GOES_ON.search(command) or not _here_documents_end(command):
        return command
    return command + _STATUS_KEPT


def _here_documents_end(command: bytes) -> bool:
    words = [word for _, word in _HERE_DOCUMENT.findall(command)]
    lines = {line.strip(b"\t") for line in command.split(b"\n")} if words else set()
    return len(words) == len(_HERE.findall(command)) and lines.issuperset(words)
