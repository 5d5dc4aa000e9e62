"""Adapters that behave, and adapters that do not; their interpreter has the standard library alone."""

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from decimal import Decimal
from fractions import Fraction


class Guess:
    """The guessing game of `adapter.py`'s docstring."""

    slots = 4

    def open(self, args, seed):
        self.number = random.Random(seed).randint(1, args.get("up_to", 10))
        return {"observations": {"main": "Guess my number."}}

    def step(self, player, text):
        right = text.strip() == str(self.number)
        return {"observations": {player: "No. Again."}, "rewards": {player: float(right)}, "done": right}

    def close(self):
        return {"info": {"number": self.number}}


class Duel:
    """Two players who act in turns, with a tool, coroutines, and rewards at the end."""

    async def open(self, args, seed):
        del args, seed
        self.said = []
        tool = {"name": "look", "description": "See what was said.", "parameters": {"type": "object", "properties": {}}}
        begin = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin."}]
        return {"observations": {"white": begin}, "tools": [tool]}

    async def call(self, player, name, arguments):
        del name, arguments
        return {"observations": {player: " ".join(self.said) or "nothing"}}

    async def step(self, player, text):
        self.said.append(text)
        if len(self.said) == 4:
            return {"rewards": {"white": 1, "black": -1}, "done": True, "info": {"length": 4, "end": "mate", "x": None}}
        return {"observations": {"black" if player == "white" else "white": text}}

    async def close(self):
        return None


class Both:
    """Two players who act at the same time; the environment breaks when its tool is called."""

    async def open(self, args, seed):
        del args, seed
        self.said = {}
        tool = {"name": "ring", "description": "Ring.", "parameters": {"type": "object", "properties": {}}}
        return {"observations": {name: f"You are {name}." for name in ("white", "black")}, "tools": [tool]}

    async def call(self, player, name, arguments):
        raise RuntimeError("the bell is broken")

    async def step(self, player, text):
        self.said[player] = text
        return {"observations": dict.fromkeys(self.said, "Again.") if len(self.said) == 2 else {}}

    async def close(self):
        return None


class Seeding:
    """Seeds and uses the global generator, as TextArena does."""

    def open(self, args, seed):
        del args
        random.seed(seed)
        return {"observations": {"main": str(random.random())}}

    def step(self, player, text):
        del text
        return {"observations": {player: str(random.random())}}

    def close(self):
        return None


class Strange:
    """Does what `args["does"]` names, in `open` or, with a dot before it, in `step`."""

    slots = 8
    limit_s = 1.0

    def open(self, args, seed):
        del seed
        self.does = args["does"]
        result = {"observations": {"main": "Begin."}}
        return result if self.does.startswith(".") else getattr(self, self.does)(result)

    def step(self, player, text):
        result = {"observations": {player: f"You said {text}."}, "rewards": {player: 0.5}}
        return getattr(self, self.does[1:])(result)

    def close(self):
        return None

    def nothing(self, result):
        return result

    def raises(self, result):
        raise RuntimeError("the board is gone")

    def raises_in_a_library(self, result):
        random.choice([])

    def exits(self, result):
        sys.exit(3)

    def dies(self, result):
        print("last words", flush=True)
        os._exit(7)

    def hangs(self, result):
        time.sleep(600)

    def prints(self, result):
        print("spam " * 10_000)
        os.write(1, b"\x05\x00\x00\x00wrong")
        return result

    def prints_without_end(self, result):
        while True:
            print("spam " * 1000)

    def forks(self, result):
        if os.fork() == 0:
            return {"observations": {"main": "I am the child."}}
        os.wait()
        return result

    def leaves_a_child(self, result):
        if (pid := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        return {**result, "info": {"pid": pid}}

    def leaves_a_daemon(self, result):
        """Start a process that leads a session of its own, twice, without waiting for it."""
        daemon = "import os, time; os.setsid() if os.fork() == 0 else os._exit(0); print(os.getpid(), flush=True); "
        argv = [sys.executable, "-I", "-c", daemon + "os.close(1); time.sleep(600)"]
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, start_new_session=True)
        return {**result, "info": {"pid": int(done.stdout)}}

    def huge(self, result):
        return {"observations": {"main": "x" * 50_000_000}}

    def surrogates(self, result):
        return {"observations": {"main": "a\ud800b"}}

    def raises_without_words(self, result):
        class Wordless(Exception):
            def __str__(self):
                raise RuntimeError

        raise Wordless

    def raises_half_a_pair(self, result):
        raise RuntimeError("a\ud800b")

    def raises_unheard(self, result):
        sys.stderr.close()
        raise RuntimeError("nobody listens")

    def huge_together(self, result):
        return {"observations": {str(player): "\U0001f600" * 999_999 for player in range(17)}}

    def says_nothing(self, result):
        return {"observations": {"main": []}}

    def names_a_tool_wrongly(self, result):
        return {**result, "tools": [{"name": "look <here>"}]}

    def names_tools_alike(self, result):
        tools = [{"name": "look", "players": [player]} for player in ("white", "black")]
        return {**result, "tools": [*tools, tools[0]]}

    def nests(self, result):
        schema = {}
        for _ in range(100_000):
            schema = {"items": schema}
        return {**result, "tools": [{"name": "look", "parameters": schema}]}

    def beyond_float32(self, result):
        return {"rewards": {"main": 10**400}}

    def many_kinds_of_numbers(self, result):
        return {"rewards": {"main": Decimal("0.5"), "other": True}, "info": {"huge": 10**400, "half": Fraction(1, 2)}}

    def writes_to_the_socket(self, result):
        """Write half a frame where the answers go, as a package does that writes to whatever descriptor is open."""
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(number)).send(b"\xff\xff")
        return result

    def answers_twice(self, result):
        frame = b'{"n": 3, "value": {"done": 7}}'  # the third call of the worker is this one
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(number)).send(len(frame).to_bytes(4, "little") + frame)
        return result

    def nan(self, result):
        return {"rewards": {"main": float("nan")}}

    def text_reward(self, result):
        return {"rewards": {"main": "much"}}

    def no_dict(self, result):
        return ("Begin.", {})

    def typo(self, result):
        return {**result, "terminated": True}

    def no_text(self, result):
        return {"observations": {"main": 5}}

    def is_silent(self, result):
        return {}

    def rewards_a_stranger(self, result):
        return {"rewards": {"player_0": 1.0}, "done": True}

    def says_a_lot(self, result):
        self.said = getattr(self, "said", 0) + 100
        numbers = range(self.said, self.said + 30)
        info = {f"{'n' * 200} {number}": number for number in numbers} | {f"text {number}": "t" for number in numbers}
        return {**result, "info": info, "done": self.said == 1000}

    def masks(self, result):
        return {"mask": "the judge was away"}


class WhichProcess:
    """Says in which process it plays, and which one imported it."""

    slots = 1
    imported_in = os.getpid()

    def open(self, args, seed):
        del args, seed
        return {"observations": {"main": f"{os.getpid()} {self.imported_in}"}}

    def step(self, player, text): ...

    def close(self): ...


class Waiting:
    """Coroutines that wait, and one that ignores its cancellation."""

    limit_s = 1.0

    async def open(self, args, seed):
        del args, seed
        return {"observations": {"main": "Begin."}}

    async def step(self, player, text):
        if text == "deaf":
            for _ in range(100):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(600)
        elif text == "long":
            await asyncio.sleep(600)
        return {"observations": {player: "Done."}}

    async def close(self):
        return None


class Program:
    """Calls the model itself; here it only says what it was given."""

    def run(self, url, key, models, args, seed):
        if args.get("error"):
            return {"error": args["error"]}
        print(url, key)
        return {"reward": -2, "turn_rewards": [-2.5, 0.5], "metrics": {"models": len(models), "seed": seed}}


class Hasty(Guess):
    limit_s = 0


class Halves:
    """Lacks `close`."""

    def open(self, args, seed): ...

    def step(self, player, text): ...


def asked(url, key, model, messages):
    request = urllib.request.Request(f"{url}/chat/completions")
    request.add_header("Authorization", f"Bearer {key}")
    request.add_header("Content-Type", "application/json")
    request.data = json.dumps({"model": model, "messages": messages}).encode()
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["choices"][0]["message"]


class Players:
    """Two players that say the same, each at an address with its name."""

    def run(self, url, key, models, args, seed):
        del seed
        heard = {"white": [{"role": "user", "content": "Your move."}], "black": [{"role": "user", "content": "Go."}]}
        for _ in range(2):
            for player, messages in heard.items():
                answer = asked(f"{url}/c/{player}", key, models[0], messages)
                messages += [answer, {"role": "user", "content": "And now?"}]
        return {"reward": 1.0, "rewards": args.get("rewards", {"white": 1.0, "black": -1.0})}


class Caller:
    """Calls the model twice over HTTP."""

    def run(self, url, key, models, args, seed):
        del seed
        messages, said = [{"role": "user", "content": "Say one."}], ""
        while len(messages) < 5 and not args.get("silent"):
            answer = asked(url, key, models[0], messages)
            said += answer["content"]
            messages += [answer, {"role": "user", "content": "Say more."}]
        rewards = dict.fromkeys(args.get("rewards", ()), -2.5)
        return {"reward": -2.5, "turn_rewards": rewards, "metrics": {"said": len(said)}}
