"""The adapter of OpenEnv, against a server of its contract."""

import asyncio

import pytest
from openenv_server import ADD, CALL, GUESS, MOVE, OpenEnvServer
from support.loops import on_a_loop
from support.waiting import until_async

from prorl_zmq.stages.environments.adapters import openenv
from prorl_zmq.stages.environments.adapters.openenv import VARIABLE, OpenEnv
from prorl_zmq.stages.environments.named_servers import named_server


@pytest.fixture
def named(monkeypatch):
    def name(**servers):
        monkeypatch.setenv(VARIABLE, " ".join(f"{name}={server.url}" for name, server in servers.items()))

    return name


@on_a_loop
async def test_text_is_the_only_required_field(named):
    async with OpenEnvServer(GUESS) as server:
        named(guess=server)
        world = OpenEnv()
        opened = await world.open({"reset": {"up_to": 9}, "show": "text"}, 3)
        assert opened == {"observations": {"main": "Begin."}, "tools": []}
        assert server.resets == [{"up_to": 9, "seed": 3}]
        stepped = await world.step("main", "5")
        assert stepped == {"observations": {"main": "No."}, "rewards": {"main": -0.5}, "done": False}
        stepped = await world.step("main", "7")
        assert (stepped["rewards"], stepped["done"]) == ({"main": 1.0}, True)
        await world.close()


@on_a_loop
async def test_a_field_that_the_observation_lacks_is_named(named):
    async with OpenEnvServer(GUESS) as server:
        named(guess=server)
        world = OpenEnv()
        with pytest.raises(LookupError, match="no field 'txt' is in the observation; it has text"):
            await world.open({"show": "txt"}, 3)
        await world.close()


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        ("127.0.0.1:8000", "PRORL_OPENENV has '127.0.0.1:8000'; write NAME=http://HOST:PORT"),
        ("", "names none; write NAME=http://HOST:PORT"),
        ("a=http://x b=http://y", "no server '': PRORL_OPENENV in the environment of the RUN processes names a, b"),
    ],
)
def test_what_is_wrong_with_the_servers_is_said(servers, said, monkeypatch):
    monkeypatch.setenv(VARIABLE, servers)
    with pytest.raises(LookupError) as wrong:
        named_server(VARIABLE, "")
    assert said in str(wrong.value)


@on_a_loop
async def test_an_observation_of_several_fields_is_json(named):
    async with OpenEnvServer(GUESS) as server:
        named(guess=server)
        world = OpenEnv()
        await world.open({}, None)
        assert server.resets == [{}]
        assert (await world.step("main", "5"))["observations"] == {"main": '{"text": "No.", "tries": 1}'}
        await world.close()


@on_a_loop
async def test_an_action_of_several_fields_is_a_function(named):
    async with OpenEnvServer(MOVE) as server:
        named(grid=server)
        world = OpenEnv()
        (tool,) = (await world.open({}, None))["tools"]
        assert (tool["name"], tool["description"]) == ("act", "Move to a place.")
        assert tool["parameters"]["properties"].keys() == {"x", "y"}
        wrong = await world.call("main", "act", {"x": "east"})
        assert "not a valid action: x: Input should be a valid integer" in wrong["observations"]["main"]
        assert not wrong.get("done")
        assert await world.call("main", "act", {"x": 2, "y": 1}) == {
            "observations": {"main": "There."},
            "rewards": {"main": 1.0},
            "done": True,
        }
        await world.close()


@on_a_loop
async def test_tools_of_the_environment(named):
    async with OpenEnvServer(CALL) as server:
        named(sums=server)
        world = OpenEnv()
        (tool,) = (await world.open({}, None))["tools"]
        assert tool == {**ADD, "parameters": {"type": "object"}}
        assert (await world.call("main", "add", {"a": 2, "b": 3}))["observations"] == {"main": "5"}
        assert await world.step("main", "It is 5.") == {"done": True}
        await world.close()


@on_a_loop
async def test_a_full_server_is_waited_for(named, monkeypatch):
    monkeypatch.setattr(openenv, "WAIT_S", 0.01)
    async with OpenEnvServer(GUESS, sessions=1) as server:
        named(guess=server)
        first, second = OpenEnv(), OpenEnv()
        await first.open({}, None)
        waiting = asyncio.create_task(second.open({}, None))

        async def refused_twice():
            return server.refused > 1

        await until_async(refused_twice, "two refusals")
        assert not waiting.done()
        await first.close()
        await waiting
        await second.close()


@on_a_loop
async def test_a_world_that_fails_raises(named):
    async with OpenEnvServer(GUESS) as server:
        named(guess=server)
        world = OpenEnv()
        await world.open({}, None)
        with pytest.raises(RuntimeError, match="EXECUTION_ERROR: the world broke"):
            await world.step("main", "crash")
        with pytest.raises(ConnectionError, match="ended the session"):
            await world.step("main", "vanish")
        await world.close()


@on_a_loop
async def test_an_unknown_server_is_named(named):
    async with OpenEnvServer(GUESS) as server:
        named(guess=server, other=server)
        with pytest.raises(LookupError, match=f"no server 'shop': {VARIABLE} .* names guess, other"):
            await OpenEnv().open({"server": "shop"}, None)
        with pytest.raises(LookupError, match="no server ''"):
            await OpenEnv().open({}, None)
