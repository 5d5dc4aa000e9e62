from __future__ import annotations

from pathlib import Path

import pytest

from prorl_zmq.config import StageSettings, Topology, load_topology, parse_topology
from prorl_zmq.errors import ConfigError, InvalidEndpoint
from prorl_zmq.system.run_places import default_run_dir
from prorl_zmq.wire.messages.jobs import Phase


def load(folder: Path, text: str | bytes) -> Topology:
    path = folder / "topology.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_topology(path)


def test_an_empty_file_is_a_working_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_RUN_DIR", "/tmp/run")
    for topology in (load(tmp_path, ""), load_topology(None), Topology()):
        assert [stage.role for stage in topology.stage] == [Phase.INIT, Phase.RUN, Phase.EVAL]
        assert len(topology.backends) == 1
        assert topology.sandbox.kind == "bubblewrap"
        assert not topology.service.insecure
        assert topology.endpoint(topology.rollout_broker.front_door) == "ipc:///tmp/run/front_door"
        assert topology.endpoint(topology.backend_broker.endpoint) == "ipc:///tmp/run/backend_broker"


def test_a_second_model_may_be_a_teacher_and_has_processes_that_wait_for_it(tmp_path: Path) -> None:
    models = '[[backends]]\n[[backends]]\nname = "sim"\n'
    topology = load(tmp_path, models)
    assert [(stage.role, stage.slots) for stage in topology.stage[3:]] == [(Phase.SCORE, 64)]
    assert load(tmp_path, f'{models}[[stage]]\nrole = "run"\n').stage == (StageSettings(Phase.RUN),)


def test_the_run_dir_is_one_per_user_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PRORL_RUN_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp")
    monkeypatch.setattr("os.getuid", lambda: 1234)
    assert default_run_dir() == Path("/tmp/prorl-1234")
    monkeypatch.setenv("PRORL_RUN_DIR", "/run/prorl")
    assert default_run_dir() == Path("/run/prorl")
    monkeypatch.setenv("HOME", "/home/me")
    topology = load(tmp_path, 'service.run_dir = "~/run"')
    assert topology.endpoint("ipc://{run_dir}/x") == "ipc:///home/me/run/x"


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    topology = load(
        tmp_path,
        """
        [service]
        node = "gpu-1"
        insecure = true
        [rollout_broker]
        front_door = "tcp://0.0.0.0:5555"
        max_jobs = 10
        lease_s = 5
        [backend_broker]
        endpoint = "tcp://127.0.0.1:5557"
        [[stage]]
        role = "run"
        processes = 2
        slots = 16
        [[backends]]
        kind = "embedded"
        model = "policy.npz"
        [[backends]]
        kind = "vllm"
        model = "qwen"
        count = 2
        gpus = [0, 1, 2, 3]
        arguments = ["--max-model-len", "1024"]
        [sandbox]
        kind = "process"
        """,
    )
    assert (topology.service.node, topology.service.insecure) == ("gpu-1", True)
    assert (topology.rollout_broker.max_jobs, topology.rollout_broker.lease_s) == (10, 5.0)
    ((stage,), (embedded, vllm)) = topology.stage, topology.backends
    assert (stage.role, stage.processes, stage.slots, embedded.model) == (Phase.RUN, 2, 16, "policy.npz")
    assert [(one.count, one.gpus) for one in vllm.each()] == [(1, (0, 1)), (1, (2, 3))]
    assert topology.sandbox.kind == "process"


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("colour = 1", "colour", "unknown field `colour`; `prorl init` writes a file with all keys"),
        ("[service]\ncolour = 1", "service.colour", "unknown field `colour` in service"),
        ("[[stage]]\nrole = 'run'\ncolour = 1", "stage[0].colour", "unknown field `colour` in stage[0]"),
        ("[[backend]]", "backend", "unknown field `backend`; did you mean `backends`?"),
        (
            "[[backends]]\nchat_template_kwargs = {}",
            "backends[0].chat_template_kwargs",
            "in backends[0]; did you mean `template_arguments`?",
        ),
        ("[backends]\ntool_calls = 'qwen3coder'", "backends[0].tool_calls", "; allowed are apertus, apriel, command_r"),
        ("[[stage]]\nslots = 1", "stage[0].role", "missing required field `role` in stage[0]"),
        ("[[stage]]\nrole = 'walk'", "stage[0].role", "Invalid enum value 'walk' in stage[0].role"),
        ("[gateway]\nbind = '8080'", "gateway.bind", "'8080' is not HOST:PORT"),
        ("[dashboard]\nbind = '127.0.0.1:0'", "dashboard.bind", "'127.0.0.1:0' is not HOST:PORT"),
        ("[metrics]\nbind = '127.0.0.1:99999'", "metrics.bind", "(ports: 1 to 65535)"),
        ("[[stage]]\nrole = 'run'\nslots = 0", "stage[0].slots", "Expected `int` >= 1"),
        ("[[backends]]\nkind = 'steam'", "backends[0].kind", "'steam' is not a kind of engine"),
        ("[backends]\nkind = 'vllm'", "backends[0].model", "needs model: a directory"),
        ("[backends]\nkind = 'http'", "backends[0].urls", "needs urls: the server's address"),
        ("[backends]\nurls = ['http://a:1']", "backends[0].urls", "takes no urls; http would"),
        (
            "[backends]\ntokenizer = 'here'",
            "backends[0].tokenizer",
            "takes no tokenizer; http, transformers and vllm would",
        ),
        ("[backends]\noptions = {depth = 3}", "backends[0].depth", "takes no depth; it takes model"),
        (
            "[backends]\noptions = {kv_events = true}",
            "backends[0].kv_events",
            "kind embedded takes no kv_events; vllm would",
        ),
        ("[backends]\nkind = 'http'\nurls = ['gpu-7']", "backends[0].urls", "gpu-7 is not of the form http://"),
        ("[backends]\nkind = 'http'\nurls = ['http://a:1']\ncount = 2", "backends[0].count", "each of `urls`"),
        ("[backends]\ncount = 2\ncores = [0, 1, 2]", "backends[0].cores", "cannot be dealt out evenly to 2 engines"),
        ("[backends]\ncores = [1, 1]", "backends[0].cores", "named twice"),
        (
            "[[backends]]\nkind = 'http'\nparser_url = 'cpu-1:8100'",
            "backends[0].parser_url",
            "matching regex '^(https?://",
        ),
        ("[[backends]]\nparser_url = 'http://cpu-1'", "backends[0].parser_url", "kind embedded takes no parser_url"),
        (
            "[[backends]]\ntemplate_arguments = {enable_thinking = false}",
            "backends[0].template_arguments",
            "kind embedded takes no template_arguments; http, transformers and vllm would",
        ),
        ("[backends]\ngpus = [-1]", "backends[0].gpus[0]", "Expected `int` >= 0"),
        ("[backend_broker]\naffinity = 'prompt'", "backend_broker.affinity", "Invalid enum value 'prompt'"),
        ("[sandbox]\nkind = 'no such'", "sandbox.kind", "Expected `str` matching regex"),
        ("service = 1", "service", "Expected `object`, got `int` in service"),
        ("[stage]\nrole = 'run'", "stage", "Expected `array`, got `object`"),
        ("[service]\ninsecure = 'yes'", "service.insecure", "Expected `bool`, got `str`"),
        ("[service]\nnode = 'a b'", "service.node", "in service.node"),
        ("[rollout_broker]\nmax_jobs = 1.5", "rollout_broker.max_jobs", "Expected `int`"),
        ("[rollout_broker]\nmax_jobs = true", "rollout_broker.max_jobs", "Expected `int`, got `bool`"),
        ("[rollout_broker]\nlease_s = 0", "rollout_broker.lease_s", "Expected `float` > 0"),
        ("[rollout_broker]\nlease_s = nan", "rollout_broker.lease_s", "Expected `float`"),
        ("[backend_broker]\nlease_s = inf", "backend_broker.lease_s", "Expected `float` <="),
        (
            "[rollout_broker]\nsession_weights = { student = 1, 'teacher-*' = 0 }",
            "rollout_broker.session_weights.teacher-*",
            "Expected `float` > 0.0, not 0, in rollout_broker.session_weights.teacher-*",
        ),
        (
            "[rollout_broker.session_weights]\n'*' = 2e6",
            "rollout_broker.session_weights.*",
            "Expected `float` <= 1000000.0, not 2000000.0, in",
        ),
        ("[rollout_broker]\nsession_weights = { a = '2' }", "rollout_broker.session_weights.a", "`str`, not '2', in"),
        (
            "[rollout_broker]\nsession_weights = { 'my run' = 2 }",
            "rollout_broker.session_weights.my run",
            "{1,128}\\\\Z', not 'my run', in rollout_broker.session_weights.my run",
        ),
        ("[rollout_broker]\nsession_weights = { '' = 2 }", "rollout_broker.session_weights.", ", not '', in"),
        ("[rollout_broker]\nsession_weights = [1]", "rollout_broker.session_weights", "Expected `object`, got `array`"),
        (
            "[rollout_broker]\nsession_priorities = { eval = 1.5 }",
            "rollout_broker.session_priorities.eval",
            "Expected `int`, got `float`, not 1.5, in rollout_broker.session_priorities.eval",
        ),
        (
            "[rollout_broker]\nsession_priorities = { eval = 1001 }",
            "rollout_broker.session_priorities.eval",
            "Expected `int` <= 1000, not 1001, in",
        ),
        (
            "[rollout_broker]\nsession_priorities = { 'a,b' = 1 }",
            "rollout_broker.session_priorities.a,b",
            "not 'a,b', in rollout_broker.session_priorities.a,b",
        ),
        (
            "[rollout_broker]\nsession_priority = { eval = 1 }",
            "rollout_broker.session_priority",
            "did you mean `session_priorities`?",
        ),
        ("[rollout_broker]\nmax_session_share = 0", "rollout_broker.max_session_share", "Expected `float` > 0.0"),
        ("[rollout_broker]\nmax_session_share = 1.5", "rollout_broker.max_session_share", "Expected `float` <= 1.0"),
        ("[rollout_broker]\njob_limit_bytes = 1", "rollout_broker.job_limit_bytes", ">= 1024"),
        ("[rollout_broker]\nfront_door = 5555", "rollout_broker.front_door", "Expected `str`, got `int`"),
        (
            "[rollout_broker]\nfront_door = 'tcp://host'",
            "rollout_broker.front_door",
            "'tcp://host' is not ipc://PATH or tcp://HOST:PORT",
        ),
        ("[rollout_broker]\nstage_events = ''", "rollout_broker.stage_events", "is not ipc://PATH"),
        ("[backend_broker]\nendpoint = 'inproc://x'", "backend_broker.endpoint", "is not ipc://PATH"),
        (f"[service]\nrun_dir = '/tmp/{'x' * 100}'", "rollout_broker.front_door", "the system allows 107"),
        ("[service]\nrun_dir = '~no-such-user-here/x'", "service.run_dir", "home directory"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(tmp_path: Path, text: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert caught.value.key == key
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'topology.toml'}: ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["[service", "a = ", "a = 1\na = 2", b"\xff\xfe"])
def test_what_is_not_toml_is_said_in_one_line(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(ConfigError, match="is not TOML") as caught:
        load(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "missing.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=reason) as caught:
            load_topology(path)
        assert str(path) in str(caught.value)


def test_an_endpoint_is_checked_with_the_run_dir_in_place() -> None:
    topology = parse_topology({"service": {"run_dir": "/tmp/run"}}, "here")
    with pytest.raises(InvalidEndpoint):
        topology.endpoint("ipc://{run_dir}/" + "x" * 100)


def test_mcp_servers_have_addresses_and_keys_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = load(tmp_path, '[[mcp]]\nurl = "http://a/mcp"\n[[mcp]]\nurl = "https://b"\nkey_variable = "B_KEY"')
    first, second = topology.mcp
    assert first.key() == ""
    monkeypatch.setenv("B_KEY", " of-b-alone\n")
    assert second.key() == "of-b-alone"
    for value in ("", "two\nlines", "schl\u00fcssel"):
        monkeypatch.setenv("B_KEY", value)
        with pytest.raises(ConfigError, match="set B_KEY to the key of https://b: plain ASCII"):
            second.key()
    with pytest.raises(ConfigError, match=r"mcp\[0\]\.url"):
        load(tmp_path, '[[mcp]]\nurl = "ftp://a"')
