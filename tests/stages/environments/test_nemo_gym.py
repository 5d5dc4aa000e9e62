"""The adapter of NeMo Gym, against servers of both forms."""

import json

import pytest
from gym_server import GymServer
from support.loops import on_a_loop

from prorl_zmq.stages.environments.adapters.nemo_gym import VARIABLE, NemoGym

TOOL = {"type": "function", "name": "increment_counter", "description": "", "parameters": {"type": "object"}}
COUNTER = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Add 3."}],
        "tools": [{**TOOL, "strict": True}],
    },
    "initial_count": 3,
    "expected_count": 6,
}
GAME = {"responses_create_params": {"input": "Deal me in.", "instructions": "You play."}, "lives": 2}


@pytest.fixture
def named(monkeypatch):
    def name(**servers):
        monkeypatch.setenv(VARIABLE, " ".join(f"{name}={server.url}" for name, server in servers.items()))

    return name


@on_a_loop
async def test_tools_then_verify(named):
    async with GymServer() as server:
        named(counter=server)
        world = NemoGym()
        opened = await world.open({"row": COUNTER}, None)
        assert opened["observations"]["main"] == [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Add 3."},
        ]
        assert opened["tools"] == [{key: TOOL[key] for key in ("name", "description", "parameters")}]
        wrong = await world.call("main", "increment_counter", {"count": "x"})
        assert "not an integer" in wrong["observations"]["main"]
        called = await world.call("main", "increment_counter", {"count": 3})
        assert json.loads(called["observations"]["main"]) == {"success": True}
        assert await world.step("main", "The count is 6.") == {"done": True}
        closed = await world.close()
    assert closed["rewards"] == {"main": 1.0}
    assert len({session for _, session, _ in server.requests}) == 1
    path, _, body = server.requests[-1]
    assert path == "/verify"
    assert {key: body[key] for key in COUNTER} == COUNTER
    kinds = [item["type"] for item in body["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 2 + ["message"]
    assert body["response"]["output"][-1]["content"][0]["text"] == "The count is 6."


@on_a_loop
async def test_sessions_are_apart(named):
    async with GymServer() as server:
        named(counter=server)
        worlds = [NemoGym(), NemoGym()]
        for world in worlds:
            await world.open({"row": COUNTER}, None)
        await worlds[0].call("main", "increment_counter", {"count": 3})
        assert [(await world.close())["rewards"] for world in worlds] == [{"main": 1.0}, {"main": 0.0}]


@on_a_loop
async def test_a_masked_sample_has_no_reward(named):
    async with GymServer() as server:
        server.verdict = {"mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "the judge is away"}
        named(counter=server)
        world = NemoGym()
        await world.open({"row": COUNTER}, None)
        assert await world.close() == {"mask": "the judge is away"}


@on_a_loop
async def test_parts_of_the_reward_are_metrics(named):
    async with GymServer() as server:
        server.verdict = {"accuracy": 0.25, "reward_components": {"style": -2.0}}
        named(counter=server)
        world = NemoGym()
        await world.open({"row": COUNTER}, None)
        info = (await world.close())["info"]
    assert (info["accuracy"], info["style"]) == (0.25, -2.0)
    assert not info.keys() & {"initial_count", "response", "responses_create_params", "reward"}


@on_a_loop
async def test_gymnasium_form(named):
    async with GymServer(is_gymnasium=True) as server:
        named(game=server)
        world = NemoGym()
        opened = await world.open({"row": GAME}, 5)
        assert [message["content"] for message in opened["observations"]["main"]] == [
            "You play.",
            "Deal me in.",
            "Hit or stand?",
        ]
        assert server.requests[-1][2]["seed"] == 5
        stepped = await world.step("main", "hit")
        assert (stepped["observations"], stepped["rewards"], stepped["done"]) == (
            {"main": "Again?"},
            {"main": -0.5},
            False,
        )
        called = await world.call("main", "count", {})
        assert called["observations"] == {"main": "count says 17"}
        stepped = await world.step("main", "stand")
        assert (stepped["rewards"], stepped["done"], stepped["info"]) == ({"main": 1.0}, True, {"hands": 1})
        assert await world.close() is None
    assert len({session for path, session, _ in server.requests if path != "/seed_session"}) == 1


@on_a_loop
async def test_the_row_names_its_server(named):
    async with GymServer() as counter, GymServer(is_gymnasium=True) as game:
        named(counter=counter, game=game)
        world = NemoGym()
        await world.open({"row": {**GAME, "agent_ref": {"name": "game"}}}, None)
        await world.close()
        assert game.requests
        with pytest.raises(LookupError, match=f"no server 'shop': {VARIABLE} .* names counter, game"):
            await NemoGym().open({"row": GAME, "server": "shop"}, None)
        with pytest.raises(LookupError, match="no server ''"):
            await NemoGym().open({"row": GAME}, None)


@on_a_loop
async def test_an_unusable_row_is_the_servers_words(named):
    async with GymServer() as server:
        named(counter=server)
        with pytest.raises(RuntimeError, match="answered with 500"):
            await NemoGym().open({"row": {"responses_create_params": {"input": "Hello."}}}, None)
