"""The adapter of tau2: who sees what, who may call what, and which ends have which reward."""

import importlib
import sys

import pytest
import tau2_contract

ADAPTER = "prorl_zmq.stages.environments.adapters.tau2"
GREETING = "Hi! How can I help you today?"
GOLD = {"user_id": "user_1", "title": "Important Meeting"}


@pytest.fixture
def tau2(monkeypatch):
    for name, module in tau2_contract.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    yield importlib.import_module(ADAPTER)
    sys.modules.pop(ADAPTER, None)


def _opened(tau2, **args):
    world = tau2.Tau2()
    return world, world.open({"domain": "mock", "task": "create_task_1", **args}, None)


def test_a_conversation_of_two(tau2):
    world, opened = _opened(tau2)
    persona, greeting = opened["observations"]["user"]
    assert persona["role"] == "system"
    assert "Create a task" in persona["content"]
    assert greeting == {"role": "user", "content": GREETING}
    assert [(tool["name"], tool["players"]) for tool in opened["tools"]] == [
        ("create_task", ["agent"]),
        ("check_notifications", ["user"]),
    ]
    (policy, greeted, asked) = world.step("user", "Create the task, please.")["observations"]["agent"]
    assert policy["role"] == "system"
    assert "existing users" in policy["content"]
    assert greeted == {"role": "assistant", "content": GREETING}
    assert asked == {"role": "user", "content": "Create the task, please."}
    called = world.call("agent", "create_task", GOLD)
    assert "Important Meeting" in called["observations"]["agent"]
    assert not called["done"]
    assert world.step("agent", "Done.") == {"observations": {"user": "Done."}}
    assert world.call("user", "check_notifications", {})["observations"] == {"user": "{}"}
    assert world.step("user", "And now?")["observations"] == {"agent": [{"role": "user", "content": "And now?"}]}
    assert world.step("agent", "Nothing more.") == {"observations": {"user": "Nothing more."}}
    assert world.step("user", "Thanks. ###STOP###") == {"done": True}
    closed = world.close()
    assert closed["rewards"] == {"agent": 1.0}
    assert closed["info"] == {"DB": 1.0, "COMMUNICATE": 1.0, "ended": "user_stop"}


def test_a_wrong_database_earns_nothing(tau2):
    world, _ = _opened(tau2)
    world.step("user", "Create the task, please.")
    world.call("agent", "create_task", {**GOLD, "title": "Lunch"})
    world.step("agent", "Done.")
    world.step("user", "###STOP###")
    assert world.close()["rewards"] == {"agent": 0.0}


def test_a_limit_earns_nothing(tau2):
    world, _ = _opened(tau2)
    world.step("user", "Create the task, please.")
    world.call("agent", "create_task", GOLD)
    closed = world.close()
    assert (closed["rewards"], closed["info"]) == ({"agent": 0.0}, {"ended": "max_steps"})


def test_an_agent_that_says_nothing_has_failed(tau2):
    world, _ = _opened(tau2)
    world.step("user", "Create the task, please.")
    assert world.step("agent", " ") == {"done": True}
    assert world.close()["info"] == {"ended": "agent_error"}


def test_a_user_that_says_nothing_is_not_the_agents_fault(tau2):
    world, _ = _opened(tau2)
    assert world.step("user", "") == {"mask": "the user's model said nothing"}


def test_the_players_cannot_call_each_others_tools(tau2):
    world, _ = _opened(tau2)
    world.step("user", "Create the task, please.")
    answers = [world.call("agent", "check_notifications", {}) for _ in range(tau2.MAX_ERRORS)]
    assert "not found" in answers[0]["observations"]["agent"]
    assert [answer["done"] for answer in answers] == [False] * (tau2.MAX_ERRORS - 1) + [True]
    assert world.close()["info"] == {"ended": "too_many_errors"}


def test_most_steps(tau2):
    world, _ = _opened(tau2, max_steps=2)
    assert not world.step("user", "Hello.").get("done")
    assert world.step("agent", "Hello.") == {"done": True}


def test_a_judge_must_be_ignored(tau2):
    with pytest.raises(ValueError, match=r"create_task_1_nl_eval, unless args\.ignore has NL_ASSERTION"):
        _opened(tau2, task="create_task_1_nl_eval")
    world, _ = _opened(tau2, task="create_task_1_nl_eval", ignore=["NL_ASSERTION"])
    world.step("user", "Create the task, please.")
    world.call("agent", "create_task", GOLD)
    world.step("agent", "Done.")
    world.step("user", "###STOP###")
    assert world.close()["rewards"] == {"agent": 1.0}


def test_tasks_that_cannot_be_played_are_named(tau2):
    with pytest.raises(ValueError, match="update_task_with_message_history begins in the middle"):
        _opened(tau2, task="update_task_with_message_history")
    with pytest.raises(LookupError, match="mock has no task '7'"):
        _opened(tau2, task=7)
    with pytest.raises(KeyError, match="space"):
        _opened(tau2, domain="space")
