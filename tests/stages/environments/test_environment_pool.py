"""Workers under adapters that behave and adapters that do not."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from support.waiting import until, until_async

from prorl_zmq.errors import EnvironmentFailed
from prorl_zmq.stages.environments.environment_pool import EnvironmentPool, Message
from prorl_zmq.stages.environments.environment_store import EnvironmentStore
from prorl_zmq.stages.environments.environment_template import EnvironmentPlace

sys.path.append(str(Path(__file__).parent))
from offered import offer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

WORLDS = Path(__file__).with_name("strange_worlds.py")


def place(name: str, python: str = sys.executable) -> EnvironmentPlace:
    return EnvironmentPlace(name.lower(), python, f"{WORLDS}:{name}")


def pooled(use: Callable[[EnvironmentPool], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        pool = EnvironmentPool(**options)
        try:
            return await use(pool)
        finally:
            pids = [worker.pid for worker in pool.workers]
            await pool.close()
            assert not any(map(psutil.pid_exists, pids))

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_a_world_is_opened_stepped_and_closed() -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place("Guess"), "a") as world:
            opening = await world.open({"up_to": 3}, 7)
            assert opening.observations == {"main": "Guess my number."}
            steps = [await world.step("main", f" {guess}\n") for guess in (1, 2, 3)]
            assert [step.rewards["main"] for step in steps].count(1.0) == 1
            assert [step.done for step in steps] == [step.rewards["main"] == 1.0 for step in steps]
            assert (await world.close()).info["number"] in {1.0, 2.0, 3.0}

    pooled(use)


def test_players_tools_and_what_info_keeps() -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place("Duel"), "a") as world:
            opening = await world.open({}, None)
            assert opening.observations == {"white": [Message("system", "Be brief."), Message("user", "Begin.")]}
            assert [tool["name"] for tool in opening.tools] == ["look"]
            assert (await world.call("white", "look", {})).observations == {"white": "nothing"}
            assert (await world.step("white", "e4")).observations == {"black": "e4"}
            assert (await world.call("black", "look", {})).observations == {"black": "e4"}
            await world.step("black", "e5")
            await world.step("white", "Bc4")
            last = await world.step("black", "a6")
            assert (last.done, last.rewards) == (True, {"white": 1.0, "black": -1.0})
            assert last.info == {"length": 4.0, "end": "mate"}

    pooled(use)


def test_each_rollout_has_global_generators_of_its_own() -> None:
    """Games that take turns in one process see the numbers that each sees alone."""

    async def play(pool: EnvironmentPool, seed: int, turn: asyncio.Semaphore) -> list[str]:
        async with pool.rollout(place("Seeding"), f"seed {seed}") as world:
            seen = [(await world.open({}, seed)).observations["main"]]
            for _ in range(3):
                async with turn:
                    seen.append((await world.step("main", "")).observations["main"])
                await asyncio.sleep(0)
            return seen

    async def use(pool: EnvironmentPool) -> None:
        turn = asyncio.Semaphore(3)
        alone = [await play(pool, seed, turn) for seed in range(3)]
        assert await asyncio.gather(*(play(pool, seed, turn) for seed in range(3))) == alone
        assert len(pool.workers) == 1

    pooled(use)


def test_a_further_worker_starts_when_slots_are_taken_and_the_least_busy_one_plays() -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with asyncio.TaskGroup() as group:
            leave = asyncio.Event()

            async def play(name: str) -> None:
                async with pool.rollout(place("Guess"), name) as world:
                    await world.open({}, 1)
                    await leave.wait()

            tasks = [group.create_task(play(str(number))) for number in range(10)]
            await until_async(_holding(pool, [4, 4]), "both workers' slots")
            assert not any(task.done() for task in tasks)  # two wait for a slot
            leave.set()
        await until_async(_holding(pool, [0, 0]), "free slots")
        async with pool.rollout(place("Guess"), "x"), pool.rollout(place("Guess"), "y"):
            assert [len(worker.rollouts) for worker in pool.workers] == [1, 1]

    pooled(use, processes=2)


def _holding(pool: EnvironmentPool, rollouts: list[int]) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return [len(worker.rollouts) for worker in pool.workers] == rollouts

    return holds


def test_an_idle_worker_ends() -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place("Guess"), "a") as world:
            await world.open({}, 1)
        pid = pool.workers[0].pid

        async def ended() -> bool:
            return not pool.workers and not psutil.pid_exists(pid)

        await until_async(ended, "the idle worker's end")

    pooled(use, idle_s=0.2)


async def play_strangely(pool: EnvironmentPool, name: str, does: str) -> None:
    async with pool.rollout(place("Strange"), name) as world:
        await world.open({"does": does}, None)
        await world.step("main", "x")


def failing(does: str) -> EnvironmentFailed:
    """Return the error of a rollout that does something, while another one plays on the same worker."""

    async def use(pool: EnvironmentPool) -> EnvironmentFailed:
        async with pool.rollout(place("Strange"), "another") as other:
            await other.open({"does": ".nothing"}, None)
            with pytest.raises(EnvironmentFailed) as caught:
                await play_strangely(pool, "strange", does)
            if caught.value.fields["reason"] in {"raised", "masked"}:
                assert (await other.step("main", "a")).observations == {"main": "You said a."}
            else:
                with pytest.raises(EnvironmentFailed, match="its worker"):
                    await other.step("main", "a")
        return caught.value

    error: EnvironmentFailed = pooled(use)
    return error


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("raises", r"open raised RuntimeError: the board is gone \(.*strange_worlds\.py:\d+\)"),
        (".raises", r"step raised RuntimeError: the board is gone \(.*strange_worlds\.py:\d+\)"),
        (".raises_in_a_library", r"step raised IndexError: Cannot choose .* \(.*strange_worlds\.py:\d+\)"),
        (".exits", "step raised SystemExit: 3"),
        ("huge", "open returned an observation of 50,000,000 characters for player main; at most 1,000,000"),
        (".nan", "step returned nan as the reward of main; a finite number is allowed"),
        (".text_reward", "step returned 'much' as the reward of main; a finite number is allowed"),
        ("no_dict", r"open returned \('Begin.', {}\); what it returned must be a dict"),
        (".typo", "step returned the unknown entry 'terminated'; known are observations, rewards, done"),
        ("no_text", "open returned 5 as what main sees; a text or a list of messages is allowed"),
        ("unheard_of", "open raised AttributeError"),
        (".raises_without_words", r"step raised Wordless: its text raised RuntimeError \("),
        (".raises_half_a_pair", r"step raised RuntimeError: a\?b \("),
        (".raises_unheard", r"step raised RuntimeError: nobody listens \("),
        ("huge_together", "an answer of 68,.* bytes; at most 67,108,864 are allowed"),
        ("says_nothing", r"open returned \[\] as what main sees; a text or a list of messages is allowed"),
        ("names_a_tool_wrongly", "open returned the tool {'name': 'look <here>'}; it needs a name of letters, digits"),
        ("names_tools_alike", "open returned two tools named look for white"),
        ("nests", "open returned tools that JSON cannot carry: maximum recursion depth"),
        (".answers_twice", "the answer to step is none: Expected `bool`, got `int`"),
        (".beyond_float32", "step returned 10* as the reward of main; a finite number is allowed"),
    ],
)
def test_what_is_not_allowed_ends_its_rollout_alone(does: str, said: str) -> None:
    error = failing(does)
    assert error.fields == {"environment": "strange", "reason": "raised"}
    with pytest.raises(EnvironmentFailed, match=f"^the environment strange: {said}"):
        raise error


def test_an_environment_asks_for_another_try() -> None:
    assert failing(".masks").fields["reason"] == "masked"


@pytest.mark.parametrize(
    ("does", "reason", "said"),
    [
        (".dies", "died", "its worker ended with exit code 7; the end of its output: last words"),
        (".hangs", "hung", "its worker did not answer for 1 s"),
        pytest.param(
            ".prints_without_end",
            "hung",
            "did not answer for 1 s; the end of its output: .*spam",
            marks=pytest.mark.proof(quick=True),
        ),
        pytest.param(".writes_to_the_socket", "hung", "did not answer for 1 s", marks=pytest.mark.proof(quick=True)),
    ],
)
def test_a_worker_that_dies_or_hangs_costs_its_rollouts_the_attempt(does: str, reason: str, said: str) -> None:
    error = failing(does)
    assert error.fields["reason"] == reason
    with pytest.raises(EnvironmentFailed, match=rf"(?s)^the environment strange: .*{said}"):
        raise error


def test_prints_forks_and_children_do_not_touch_the_frames() -> None:
    async def use(pool: EnvironmentPool) -> int:
        for does in (".prints", ".forks", ".leaves_a_child", ".surrogates"):
            async with pool.rollout(place("Strange"), does) as world:
                await world.open({"does": does}, None)
                step = await world.step("main", "a")
                assert step.observations == {"main": "a?b" if does == ".surrogates" else "You said a."}
                if does == ".leaves_a_child":
                    child = int(step.info["pid"])
        assert len(pool.workers) == 1
        return child

    child = pooled(use)
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, "its end")


def test_numbers_of_any_type_are_rewards_and_what_is_too_large_is_no_info() -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place("Strange"), "a") as world:
            await world.open({"does": ".many_kinds_of_numbers"}, None)
            step = await world.step("main", "a")
            assert (step.rewards, step.info) == ({"main": 0.5, "other": 1.0}, {"half": 0.5})

    pooled(use)


def test_an_environment_that_is_installed_anew_is_played_by_new_workers(tmp_path: Path) -> None:
    async def use(pool: EnvironmentPool) -> None:
        for game in ("chess", "go"):
            world = tmp_path / "world.py"
            world.write_text(WORLDS.read_text().replace("Guess my number", game))
            shutil.rmtree(tmp_path / "guess", ignore_errors=True)
            offer(tmp_path, "guess", f"{world}:Guess")
            async with pool.rollout(EnvironmentStore(tmp_path).place("guess"), "a") as playing:
                assert (await playing.open({}, 1)).observations == {"main": f"{game}."}

    pooled(use)


def test_who_killed_its_worker_has_one_of_its_own_next() -> None:
    async def use(pool: EnvironmentPool) -> None:
        with pytest.raises(EnvironmentFailed):
            await play_strangely(pool, "killer", ".dies")
        async with pool.rollout(place("Strange"), "another") as other:
            await other.open({"does": ".nothing"}, None)
            for _ in range(2):
                with pytest.raises(EnvironmentFailed, match="exit code 7"):
                    await play_strangely(pool, "killer", ".dies")
            assert (await other.step("main", "a")).observations == {"main": "You said a."}

    pooled(use)


def test_a_killed_worker_is_replaced() -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place("Guess"), "a") as world:
            await world.open({}, 1)
            os.kill(pool.workers[0].pid, signal.SIGKILL)
            with pytest.raises(EnvironmentFailed, match="its worker was ended by signal 9"):
                await world.step("main", "0")
        async with pool.rollout(place("Guess"), "b") as world:
            assert (await world.open({}, 1)).observations == {"main": "Guess my number."}

    pooled(use)


def test_a_stopped_worker_counts_as_hung() -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place("Strange"), "a") as world:
            await world.open({"does": ".nothing"}, 1)
            os.kill(pool.workers[0].pid, signal.SIGSTOP)
            with pytest.raises(EnvironmentFailed, match="did not answer for 1 s"):
                await world.step("main", "a")

    pooled(use)


@pytest.mark.few(1)
@pytest.mark.parametrize("repetition", range(3))
def test_a_pause_of_this_process_is_no_silence_of_its_workers(repetition: int) -> None:
    """As if the stage process was stopped for longer than a call may take, with a call under way."""

    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place("Strange"), "a") as world:
            await world.open({"does": ".nothing"}, None)
            stepping = asyncio.create_task(world.step("main", "a"))
            await asyncio.sleep(0)
            time.sleep(2)  # noqa: ASYNC251 - twice the limit
            assert (await stepping).observations == {"main": "You said a."}

    pooled(use)


def test_a_coroutine_beyond_its_limit_ends_its_rollout_alone() -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place("Waiting"), "a") as other, pool.rollout(place("Waiting"), "b") as world:
            await other.open({}, None)
            await world.open({}, None)
            with pytest.raises(EnvironmentFailed, match="step took longer than its limit of 1 s"):
                await world.step("main", "long")
            assert (await other.step("main", "short")).observations == {"main": "Done."}

    pooled(use)


@pytest.mark.parametrize("text", ["long", "deaf"])
def test_a_cancelled_rollout_frees_its_slot(text: str) -> None:
    """A coroutine that ignores its cancellation costs its worker, once the other rollouts have ended."""

    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place("Waiting"), "other") as other:
            await other.open({}, None)
            began = asyncio.Event()

            async def play() -> None:
                async with pool.rollout(place("Waiting"), "cancelled") as world:
                    await world.open({}, None)
                    began.set()
                    await world.step("main", text)

            playing = asyncio.create_task(play())
            await began.wait()
            await other.step("main", "short")  # the other call has begun when this one is answered
            playing.cancel()
            worker = pool.workers[0]
            await until_async(_holding(pool, [1]), "the slot of the cancelled rollout")
            assert worker.retiring == (text == "deaf")
            assert (await other.step("main", "short")).observations == {"main": "Done."}
            await other.close()

        async def kept_or_ended() -> bool:
            return psutil.pid_exists(worker.pid) == (text == "long")

        await until_async(kept_or_ended, "the worker's end")

    pooled(use)


def test_a_program_gets_its_model_and_gives_rewards_by_turn() -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with pool.rollout(place("Program"), "a") as world:
            assert world.is_program
            outcome = await world.run("http://127.0.0.1:1/v1", "key", ["policy", "user"], {}, 7)
            assert (outcome.reward, outcome.turn_rewards) == (-2.0, [(0, -2.5), (1, 0.5)])
            assert outcome.metrics == {"models": 2.0, "seed": 7.0}
        with pytest.raises(EnvironmentFailed, match="the environment program: no network"):
            async with pool.rollout(place("Program"), "b") as world:
                await world.run("", "", [], {"error": "no network"}, None)

    pooled(use)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (place("Guess", "/nowhere/python"), "cannot be started: /nowhere/python: No such file"),
        (place("Hasty"), r"limit_s is 0\.0; a number of seconds is allowed"),
        (place("Halves"), "has no method close: an adapter has open, step and close, or run"),
        (place("Nothing"), "the import raised AttributeError: .*Nothing"),
        (EnvironmentPlace("x", sys.executable, "no_such_module:World"), "the import raised ModuleNotFoundError"),
        (EnvironmentPlace("x", "/bin/false", "x:X"), "its worker ended with exit code 1"),
    ],
)
def test_a_worker_that_cannot_start(where: EnvironmentPlace, said: str) -> None:
    async def use(pool: EnvironmentPool) -> None:
        async def play() -> None:
            async with pool.rollout(where, "a") as world:
                await world.open({}, None)

        errors = await asyncio.gather(*(play() for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in errors] == [EnvironmentFailed] * 3
        with pytest.raises(EnvironmentFailed, match=said):
            raise errors[0]  # type: ignore[misc]
        assert pool.workers == []

    pooled(use)


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("ends", ["worker", "its guard", "template", "guard of all", "pool"])
def test_nothing_that_a_world_started_outlives_its_worker(ends: str) -> None:
    """Also not a process with a session of its own whose parent has ended, whichever process is killed."""

    async def use(pool: EnvironmentPool) -> int:
        async with pool.rollout(place("Strange"), "a") as world:
            await world.open({"does": ".leaves_a_daemon"}, None)
            daemon = int((await world.step("main", "a")).info["pid"])
            worker = pool.workers[0].pid
            template = psutil.Process(worker).parent().parent()
            above = {"worker": worker, "its guard": psutil.Process(worker).ppid(), "template": template.pid}
            assert os.getsid(daemon) == daemon
            assert psutil.Process(daemon).ppid() == above["its guard"]
            if ends != "pool":
                os.kill(above.get(ends, template.ppid()), signal.SIGKILL)
                await until_async(_ended(daemon, worker), "the daemon's and the worker's end")
                with pytest.raises(EnvironmentFailed, match="its worker was"):
                    await world.step("main", "a")
                async with pool.rollout(place("Guess"), "b") as next_one:
                    await next_one.open({}, 1)
        return daemon

    daemon = pooled(use)
    until(lambda: has_ended(daemon), "the daemon's end")


def _ended(*pids: int) -> Callable[[], Awaitable[bool]]:
    async def ended() -> bool:
        return all(map(has_ended, pids))

    return ended


async def processes_of_rollouts(pool: EnvironmentPool, where: EnvironmentPlace) -> list[list[str]]:
    """Return the words that two rollouts at once see, in a worker each."""
    async with pool.rollout(where, "a") as one, pool.rollout(where, "b") as other:
        openings = [await one.open({}, None), await other.open({}, None)]
    return [str(opening.observations["main"]).split() for opening in openings]


def test_workers_are_forks_of_one_import_unless_it_starts_threads() -> None:
    threaded = EnvironmentPlace("threaded", sys.executable, f"{WORLDS.with_name('threaded_world.py')}:WhichProcess")

    async def use(pool: EnvironmentPool) -> None:
        (one, first), (other, second) = await processes_of_rollouts(pool, place("WhichProcess"))
        assert one != other
        assert first == second != one
        (one, first), (other, second) = await processes_of_rollouts(pool, threaded)
        assert one != other
        assert (first, second) == (one, other)

    pooled(use, processes=2)


def test_the_generators_that_threads_share_differ_between_workers(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text("""
import random, numpy
class Drawing:
    slots, own_thread = 1, True
    def open(self, args, seed):
        return {"observations": {"main": f"{random.random()} {numpy.random.random()}"}}
    def step(self, player, text): ...
    def close(self): ...
""")

    async def use(pool: EnvironmentPool) -> None:
        one, other = await processes_of_rollouts(
            pool, EnvironmentPlace("drawing", sys.executable, f"{tmp_path}/drawing.py:Drawing")
        )
        assert not set(one) & set(other)

    pooled(use, processes=2)


def test_an_environment_that_was_installed_again_gets_new_workers() -> None:
    async def use(pool: EnvironmentPool) -> None:
        old, new = place("WhichProcess"), place("WhichProcess")._replace(stamp=2)
        async with pool.rollout(old, "a") as one:
            first = (await one.open({}, None)).observations["main"]
            async with pool.rollout(new, "b") as other:
                second = (await other.open({}, None)).observations["main"]
        assert str(first).split()[1] != str(second).split()[1]

    pooled(use)
