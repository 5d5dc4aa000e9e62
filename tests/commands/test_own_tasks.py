"""Tasks in a file of one's own: `prorl tasks try`, `prorl tasks show`, `--task-module`; and what is wrong with one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from documents import OWN_TASK_COMMANDS, PAGES, ROOT, blocks
from support.commands import complaint, prorl
from support.ports import free_port
from support.services import PROCESS, serving

from prorl_zmq import Harness, Job, Sampling
from prorl_zmq.config import ServiceSettings, Topology, load_topology
from prorl_zmq.errors import ConfigError
from prorl_zmq.service.child_plans import plan_children
from prorl_zmq.service.service_folder import ServiceFolder
from prorl_zmq.stages.handler import load_handlers
from prorl_zmq.stages.own_tasks import all_handlers, own_handlers
from prorl_zmq.testing.local_service import PARTS_LIMIT_S

from ..inference.http.saying_server import plain_server, server_that_says

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

    Write = Callable[..., Path]

HEAD = """
import asyncio, math, threading
import msgspec
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.handler import AgentHandler, Evaluation
from prorl_zmq import Role


BUSY = threading.Event()


class EchoInstance(msgspec.Struct, forbid_unknown_fields=True):
    word: str
    \"\"\"What the model must say.\"\"\"


"""
HANDLER = """
class EchoHandler(AgentHandler[EchoInstance]):
    task = "{task}"
    instance_type = EchoInstance

    async def run(self, phase):
        {run}
        episode = await phase.converse([ChatMessage(Role.USER, "Say the word.")], [])
        return {{"said": episode.last_text}}

    async def eval(self, phase):
        {evaluate}
        return Evaluation(float(phase.data["said"] == phase.instance.word), notes={{"said": phase.data["said"]}})
"""
ONE = """
class One(AgentHandler[EchoInstance]):
    instance_type = EchoInstance
    async def run(self, phase): ...
    async def eval(self, phase): ...
"""
SAY = ("--set", "word=be", "--sandbox", "process")
_numbers = iter(range(1000))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module whose name no other test has: a process imports each name once."""
    monkeypatch.setattr(sys, "path", sys.path[:])

    def write(code: str = HANDLER, *, run: str = "pass", evaluate: str = "pass", task: str = "echo") -> Path:
        text = code.format(run=run, evaluate=evaluate, task=task) if code is HANDLER else code
        path = tmp_path / f"echo_task_{next(_numbers)}.py"
        path.write_text(HEAD + text)
        return path

    return write


def tried(*arguments: object) -> CompletedProcess[str]:
    return prorl("tasks", "try", *arguments)


def rows(folder: Path, *lines: object) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the docs' commands name."""
    folder = tmp_path_factory.mktemp("documented")
    for name, handler in (
        ("my_task.py", "class CountHandler"),
        ("guess_task.py", "class GuessHandler"),
        ("support_task.py", "class Support("),
        ("essay_task.py", "class EssayHandler"),
    ):
        (code,) = [block for block in blocks("python") if handler in block]
        (folder / name).write_text(code)
    rows(folder, {"text": "to be or not to be", "word": "be"})
    return folder


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param(line, said, marks=[pytest.mark.proof] if line.startswith("prorl eval") else [])
        for line, said in zip(
            OWN_TASK_COMMANDS,
            (
                "completed, reward 1",
                "word +│ text",
                r"count +│ count +│ +1",
                "pass@1",
                r"completed, reward 0\.9",
                "conversation user, not trained",
                "completed, reward 0.8",
            ),
            strict=True,
        )
    ],
)
def test_the_commands_of_the_docs(line: str, said: str, documented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    done = prorl(*shlex.split(line)[1:], cwd=documented)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(said, done.stdout), done.stdout


def test_each_phase_is_shown(documented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    file = documented / "both.jsonl"
    file.write_text('{"text": "a", "word": "a"}\n{"document": "to be or not to be", "term": "be"}\n')
    turns = ("--say", 'bash {"command": "grep -ow be text.txt | wc -l"}', "--say", 'finish {"message": "2"}')
    done = tried(documented / "my_task.py", file, "--row", "2", "--sandbox", "process", *turns)
    assert done.returncode == 0, done.stderr
    heads = re.findall(r"^(INIT|RUN|EVAL) [0-9.]+ s  (.*)$", done.stdout, re.MULTILINE)
    assert heads == [
        ("INIT", "returned {'sessions': {'bash': 1}}"),
        ("RUN", "returned {'answer': '2'}"),
        ("EVAL", "reward 1.0"),
    ]
    assert '→ bash({"command": "grep -ow be text.txt | wc -l"})' in done.stdout
    assert "completed, reward 1" in done.stdout
    assert "line 2: {'text': 'to be or not to be', 'word': 'be'}" in done.stderr


@pytest.mark.parametrize(("turn", "reward"), [("be", "1"), ("or", "0")])
def test_a_task_without_a_data_file_is_tried(write: Write, turn: str, reward: str) -> None:
    done = tried(write(), *SAY, "--say", turn)
    assert done.returncode == 0, done.stderr
    assert f"completed, reward {reward}" in done.stdout


def test_an_installed_task_is_tried() -> None:
    done = tried("math", "--set", "problem=1 + 1", "--set", "ground_truth='2'", "--say", r"\boxed{3}")
    assert "completed, reward 0" in done.stdout, done.stderr


def test_a_real_engine_answers(write: Write) -> None:
    done = tried(write(), *SAY)
    assert done.returncode == 0, done.stderr
    assert "stopped by" in done.stdout
    assert " generated, mean log-prob" in done.stdout


@pytest.mark.xdist_group("transformers")
def test_a_server_answers(write: Write, tmp_path: Path) -> None:
    """Its address, its key and its tokenizer are used, and the reward is of what it said."""
    module = write()
    environment = {**os.environ, "PRORL_API_KEY": "sesame"}
    with server_that_says("be", tmp_path / "model") as server:
        done = prorl("tasks", "try", module, *SAY, "--url", server.url, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed, reward 1" in done.stdout
    assert "RUN" in done.stdout
    assert "returned {'said': 'be'}" in done.stdout
    turns = [one for one in server.asked("/inference/v1/generate") if one["sampling_params"]["max_tokens"] > 4]
    assert len(turns) == 1, "the task's turn; the others are the probe's"
    assert set(server.keys) == {"Bearer sesame"}


def test_a_server_that_lacks_what_is_needed_is_named(write: Write) -> None:
    """It answers, but not as a server of a model does."""
    with plain_server() as url:
        done = tried(write(), *SAY, "--url", url, "--start-limit", 5)
    assert done.returncode == 1
    assert f"{url} answers, but gives no token ids in a way that we know" in done.stderr


def test_a_server_that_does_not_answer_is_named(write: Write) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    done = tried(write(), *SAY, "--url", url, "--start-limit", 1)
    assert time.monotonic() - began < PARTS_LIMIT_S  # what waits for the server is not waited for
    assert done.returncode == 2
    assert f"waiting for {url}, at most 1 s" in done.stderr
    assert f"{url} did not answer within 1 s; is the server up?" in done.stderr


def test_a_row_that_does_not_fit_names_line_field_and_the_fields_there(write: Write, tmp_path: Path) -> None:
    file = rows(tmp_path, {"wrod": "be"}, {"word": 3}, {"word": "be", "hint": "x"}, {"task": "math", "instance": {}})
    module = write()
    there = "a echo instance has the fields word"
    for row, said in (
        (1, "needs word (is that wrod?) too"),
        (2, "got `int` - at `$.word`"),
        (3, "unknown field `hint`"),
    ):
        line = complaint(tried(module, file, "--row", row, "--say", "x"))
        assert f"data.jsonl, line {row}: " in line
        assert said in line
        assert there in line
    assert "it is a job of task math, not of echo" in complaint(tried(module, file, "--row", "4", "--say", "x"))
    assert "--row 5: " in complaint(tried(module, file, "--row", "5", "--say", "x"))
    assert there in complaint(tried(module, "--say", "x"))


def test_what_a_handler_raises_is_shown_with_its_line(write: Write) -> None:
    module = write(evaluate='raise KeyError("rubric")')
    done = tried(module, *SAY, "--say", "be")
    line = module.read_text().splitlines().index('        raise KeyError("rubric")') + 1
    assert done.returncode == 1
    assert "EVAL" in done.stdout
    assert f'File "{module}", line {line}, in eval' in done.stdout
    assert "phase_runner" not in done.stdout
    assert "failed, " in done.stdout
    assert "reward" not in done.stdout


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ('await phase.converse("Say it.", [])', "messages must be a list, such as [ChatMessage(Role.USER, …)]"),
        ('await phase.converse(["Say it."], [])', "a message must be a ChatMessage(Role.USER, …), and not 'Say it.'"),
        ('await phase.converse([ChatMessage("user", "a")], [])', "a message's role must be a prorl_zmq.Role"),
        ("await phase.converse([ChatMessage(Role.USER, 5)], [])", "a message's content must be a text, and not 5"),
        (
            "await phase.converse([], [ThinkTool])",
            "a tool must be an object of a class derived from Tool, and",
        ),
    ],
)
def test_what_is_wrong_with_a_conversation_is_named(write: Write, run: str, said: str) -> None:
    imported = "from prorl_zmq.tools.think_and_finish import ThinkTool; "
    done = tried(write(run=imported + run), *SAY, "--say", "be")
    assert done.returncode == 1
    assert "in run" in done.stdout
    assert said in done.stdout


def test_a_reward_that_is_no_number_is_an_infrastructure_error(write: Write) -> None:
    done = tried(write(evaluate="return Evaluation(math.nan)"), *SAY, "--say", "be")
    assert done.returncode == 1
    assert "infrastructure error" in done.stdout
    assert "EVAL gave the reward nan; it must be a finite number" in done.stdout


def test_a_phase_that_hangs_ends_at_its_limit(write: Write) -> None:
    module = write(evaluate="await asyncio.sleep(600)")
    line = module.read_text().splitlines().index("        await asyncio.sleep(600)") + 1
    done = tried(module, *SAY, "--say", "be", "--limit", "1")
    assert done.returncode == 1
    assert f'File "{module}", line {line}, in eval' in done.stdout
    assert "eval took longer than its limit of 1 s" in done.stdout


@pytest.mark.proof
@pytest.mark.parametrize(
    ("limit_s", "said"),
    [("1", "a phase is still running 5 s after its limit"), ("60", "a phase blocks the event loop: ")],
)
def test_a_handler_that_blocks_is_named_with_its_line(write: Write, limit_s: str, said: str) -> None:
    """Where the service gave the job up before the limit, a traceback of the command was all."""
    module = write(evaluate="BUSY.wait(100)")
    line = module.read_text().splitlines().index("        BUSY.wait(100)") + 1
    done = tried(module, *SAY, "--say", "be", "--limit", limit_s)
    assert done.returncode == 1
    sys.modules[module.stem].BUSY.set()
    last = done.stderr.splitlines()[-1]
    assert said in last
    assert f"{module}:{line}" in last
    assert f"the event loop is blocked at {module}:{line}: " in done.stderr or limit_s == "1"


@pytest.mark.parametrize(
    "turn",
    ['bash {"command": "ls"', "bash {command: ls}", "bash {'command': 'ls'}", 'bash {"a": 1} {"b": 2}', 'bash {"'],
)
def test_a_call_that_is_not_json_is_refused(write: Write, turn: str) -> None:
    """One without its last brace was a text of the model's."""
    done = tried(write(), *SAY, "--say", turn)
    assert done.returncode == 2
    assert f"--say {turn}: the arguments of the call are not a JSON object: " in done.stderr


def test_a_script_that_is_too_short_says_so(documented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    said = ("--sandbox", "process", "--say", 'bash {"command": "ls"}')
    done = tried(documented / "my_task.py", documented / "data.jsonl", *said)
    assert done.returncode == 1
    assert "asks for turn 2, and the script has 1" in done.stdout
    assert "another turn after 1: add a --say" in done.stderr


def test_a_model_without_a_script_is_named_at_once(documented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    common = (documented / "support_task.py", "--set", "persona=shy", "--sandbox", "process", "--say", "Hello.")
    done = tried(*common)
    assert "no backend of the model user took job try; start one with" in done.stdout
    assert "asyncio/" not in done.stdout
    assert done.stderr.splitlines()[-1].startswith("prorl tasks: --say-as NAME=TURN scripts another model")
    done = tried(*common, "--say-as", "user=Hi.")
    assert (
        done.stderr.splitlines()[-1]
        == "prorl tasks: user needs another turn after its script: add a --say-as user=TURN"
    )
    assert "--say-as user: write NAME=TURN" in tried(*common, "--say-as", "user").stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def broken(:\n", "cannot be imported: line 17: "),
        ("import a_module_that_no_one_has\n", "line 17: ModuleNotFoundError: No module named"),
        ("from .helpers import helped\n", "import the file next to it by its name, or put an __init__.py"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("x = 1\n", "has no handler: no class in it is a subclass of AgentHandler"),
        ("class Half(AgentHandler[EchoInstance]):\n    task = 'half'\n", "has no handler: Half has no eval and no run"),
        (
            ONE,
            'One names no task; write task = "…" in it',
        ),
        (
            f"{ONE}    task = 'x'\n    instance_type = dict\n",
            "instance_type must be a msgspec.Struct class, and not <class 'dict'>",
        ),
        (
            f"{ONE}    task = 'x'\n    def run(self, phase): ...\n",
            "run must be a coroutine; write `async def run`",
        ),
        (
            f"{ONE}    task = 'x'\n\n\nclass Two(One):\n    pass\n",
            "the task x has two handlers",
        ),
        (f"{ONE}    task = 'my task'\n", "One) cannot be used: Expected `str` matching regex"),
        ("x = 1\0\n", "cannot be imported: source code"),
    ],
)
def test_a_module_that_cannot_be_used_is_refused(write: Write, code: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        own_handlers([write(code)])


def test_a_file_that_is_no_module_is_refused(tmp_path: Path) -> None:
    for name, said in (
        ("gone.py", "is not there"),
        ("data.txt", "not a .py file"),
        ("my-task.py", "not a name of a module"),
    ):
        if name != "gone.py":
            (tmp_path / name).write_text("")
        with pytest.raises(ConfigError, match=said):
            own_handlers([tmp_path / name])
    (tmp_path / "json.py").write_text("")
    with pytest.raises(ConfigError, match="has the name of another module, json"):
        own_handlers([tmp_path / "json.py"])


def test_files_next_to_a_module_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    body = HEAD + HANDLER.format(task="beside", run="pass", evaluate="pass")
    (tmp_path / "helping_words.py").write_text("WORD = 'be'\n")
    (tmp_path / "helped_task.py").write_text(f"from helping_words import WORD\n{body}")
    package = tmp_path / "echo_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("WORD = 'be'\n")
    (package / "task.py").write_text(f"from .words import WORD\n{body.replace('beside', 'packed')}")
    found = own_handlers([tmp_path / "helped_task.py", package / "task.py"])
    assert {task: kind.__module__ for task, kind in found.items()} == {
        "beside": "helped_task",
        "packed": "echo_package.task",
    }
    assert sys.path[-1] == str(tmp_path)


def test_threads_that_an_import_starts_end_with_the_process(write: Write) -> None:
    module = write(
        "THREAD = threading.Thread(target=BUSY.wait)\nTHREAD.start()\n"
        + HANDLER.format(task="threaded", run="pass", evaluate="pass")
    )
    (kind,) = own_handlers([module]).values()
    started = sys.modules[kind.__module__]
    assert started.THREAD.is_alive()
    assert started.THREAD.daemon
    started.BUSY.set()


def test_a_file_takes_the_place_of_an_installed_task(write: Write) -> None:
    handlers = all_handlers([write(task="math")])
    assert type(handlers["math"]).__name__ == "EchoHandler"
    assert {"shell", "code"} <= handlers.keys()
    assert all_handlers([write(task="other")], ["math"]).keys() == {"math"}


def test_stage_processes_of_a_service_serve_modules() -> None:
    topology = Topology(service=ServiceSettings(task_modules=("/tasks/one.py", "/tasks/two.py")))
    stages = [plan for plan in plan_children(topology) if plan.stage_role]
    assert [plan.topology.service.task_modules for plan in stages] == [("/tasks/one.py", "/tasks/two.py")] * 3


def test_a_task_of_a_file_grades_what_a_harness_did(write: Write) -> None:
    """Its grader is found where the stage process found it; one that is nowhere is named."""
    module = write(task="quarter", run="pass", evaluate="return Evaluation(0.25 * len(phase.instance.word))")
    agent = (ROOT / "tests" / "stages" / "harness" / "small_agent.py").read_text()
    harness = Harness("command", arguments=(sys.executable, "-c", agent, "{url}", "{key}"))

    def job(task: str, **fields: str) -> Job:
        return Job(
            task="harness",
            job_id=task,
            harness=harness,
            instance={"prompt": "Say the word.", "grader": {"task": task, "instance": fields}},
            sampling=Sampling(max_tokens=8),
            max_attempts=1,
        )

    with serving(f'[service]\ntask_modules = ["{module}"]\n{PROCESS}') as service, service.client() as client:
        client.submit([job("quarter", word="be"), job("half", word="be")])
        ended = {one.job_id: one for one in client.stream(timeout_s=60)}
    graded, unknown = ended["quarter"], ended["half"]
    assert (graded.outcome, graded.reward) == ("completed", 0.5), graded.error
    assert unknown.error is not None
    assert (unknown.error.code, unknown.error.fields["field"]) == ("invalid_job", "grader.task")
    assert "offers task half" in unknown.error.message
    assert "of files (--task-module): quarter" in unknown.error.message


def test_a_services_folder_has_the_modules_that_its_topology_names(tmp_path: Path) -> None:
    """With what they import from where they are, so that all nodes have them; absolute paths stay as they are."""
    home = tmp_path / "home"
    package = home / "tasks" / "packed"
    package.mkdir(parents=True)
    body = HEAD + HANDLER.format(task="copied", run="pass", evaluate="pass")
    (home / "tasks" / "copied_words.py").write_text("import copied_more\nWORD = 'be'\n")
    (home / "tasks" / "copied_more.py").write_text("")
    (home / "tasks" / "unrelated.py").write_text("")
    (home / "tasks" / "copied_task.py").write_text(f"from copied_words import WORD\n{body}")
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("")
    (package / "task.py").write_text(f"from . import words\n{body}")
    (home / "topology.toml").write_text(
        '[service]\ntask_modules = ["tasks/copied_task.py", "tasks/packed/task.py", "/shared/task.py"]\n'
    )
    folder = ServiceFolder.create(tmp_path / "service", home / "topology.toml")
    there = folder.path / "tasks"
    copied = {str(each.relative_to(there)) for each in there.rglob("*.py")}
    assert copied == {f"tasks/{name}.py" for name in ("copied_task", "copied_words", "copied_more")} | {
        f"tasks/packed/{name}.py" for name in ("__init__", "words", "task")
    }
    named = (str(there / "tasks/copied_task.py"), str(there / "tasks/packed/task.py"), "/shared/task.py")
    assert folder.topology().service.task_modules == named
    alone = load_topology(home / "topology.toml").service.task_modules
    assert alone[0] == str(home / "tasks/copied_task.py")
    code = "import sys; from prorl_zmq.stages.own_tasks import own_handlers; print(*own_handlers(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, named[0]], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout == "copied\n", done.stderr


@pytest.mark.parametrize(
    ("name", "said"), [("../task.py", "name it by its whole path"), ("gone.py", "is not there; name a Python file")]
)
def test_a_module_that_cannot_be_copied_is_refused(tmp_path: Path, name: str, said: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "task.py").write_text("")
    (home / "topology.toml").write_text(f'[service]\ntask_modules = ["{name}"]\n')
    with pytest.raises(ConfigError, match=said):
        ServiceFolder.create(tmp_path / "service", home / "topology.toml")
    assert not ServiceFolder.is_made(tmp_path / "service")


def test_pods_get_modules_with_their_image(tmp_path: Path) -> None:
    config = tmp_path / "topology.toml"
    config.write_text('[service]\ntask_modules = ["tasks/my_task.py"]\n')
    render = ("k8s", "render", "--image", "prorl:0.1", "--config", config)
    said = complaint(prorl(*render))
    assert "`COPY tasks/my_task.py /opt/tasks/`" in said
    config.write_text('[service]\ntask_modules = ["/opt/tasks/my_task.py"]\n')
    assert "/opt/tasks/my_task.py" in prorl(*render).stdout


def test_fields_are_shown(write: Write) -> None:
    done = prorl("tasks", "show", "shell")
    assert re.search(r"instruction +│ text +│ required │ What the agent is asked to do", done.stdout)
    assert re.search(r"files +│ map of names to text +│ \{\}", done.stdout)
    assert re.search(r"word +│ text +│ required │ What the model must say", prorl("tasks", "show", write()).stdout)
    assert re.search(r"tests\[\]\.input +│ text +│ required", prorl("tasks", "show", "code").stdout)
    assert "offered: " in complaint(prorl("tasks", "show", "nonsense"))


def test_the_fields_of_each_task_are_in_the_docs() -> None:
    page = PAGES[ROOT / "docs" / "tasks.md"]
    kinds = [handler.instance_type for handler in load_handlers().values()]
    ours = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__.startswith("prorl_zmq.")]
    assert len(ours) >= 6
    assert [kind for kind in ours if f"::: {kind}\n" not in page] == []


def test_rows_are_validated_with_a_module(write: Write, tmp_path: Path) -> None:
    file = rows(tmp_path, {"word": "be"}, {"wrod": "be"})
    done = prorl("tasks", "validate", file, "--task-module", write())
    assert done.returncode == 1
    assert "line 2: " in done.stdout
    assert re.search(r"echo +│ echo +│ +1", done.stdout)


def test_an_evaluation_without_the_module_says_how_to_name_it(tmp_path: Path) -> None:
    hint = "; --task-module FILE.py names the file of a task of your own"

    def said(file: Path) -> str:
        done = prorl("eval", file, "--sandbox", "process")
        assert done.returncode == 2
        return done.stderr.splitlines()[-1]

    unrecognised = said(rows(tmp_path, {"word": "be"}))
    assert "no known row format" in unrecognised
    assert unrecognised.endswith(hint)
    unknown = said(rows(tmp_path, {"task": "echo", "instance": {"word": "be"}}))
    assert f"line 1: no installed package has the task echo{hint}" in unknown
    assert "--task-module" not in said(tmp_path / "none.jsonl")


@pytest.mark.proof
def test_an_evaluation_names_the_line_that_blocks_a_stage_process(write: Write, tmp_path: Path) -> None:
    module = write(run="BUSY.wait(8)")
    line = module.read_text().splitlines().index("        BUSY.wait(8)") + 1
    arguments = ("--task-module", module, "--out", tmp_path / "run", "--sandbox", "process", "--max-tokens", "4")
    done = prorl("eval", rows(tmp_path, {"word": "be"}), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"prorl eval: run does nothing else until {module}:{line} ends, which blocks its event loop"
    assert done.stderr.splitlines().count(said) == 1


@pytest.mark.proof
def test_an_evaluation_uses_a_module(write: Write, tmp_path: Path) -> None:
    module, out = write(), tmp_path / "run"
    arguments = ("eval", rows(tmp_path, {"word": "a"}, {"word": "be"}), "--out", out, "--sandbox", "process")
    done = prorl(*arguments, "--task-module", module, "--max-tokens", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {(each["result"]["task"], each["result"]["outcome"]) for each in results} == {("echo", "completed")}
    assert "said" in results[0]["result"]["notes"]
    module.write_text(module.read_text() + "\n# another version\n")
    changed = prorl(*arguments, "--task-module", module, "--max-tokens", "4")
    assert changed.returncode == 2
    assert "--task-module was" in changed.stderr
    assert "[service] task_modules" in complaint(
        prorl("eval", tmp_path / "data.jsonl", "--task-module", module, "--connect", "ipc:///x")
    )
    assert "name them with --task-module" in complaint(prorl("regrade", out))
