"""A resources server of NeMo Gym's contract: a counter with tools, and a game of the Gymnasium form.

The contract is that of nemo-gym 0.4 to 0.7; `tests/stages/environments/test_real_worlds.py` makes the same calls
against the real package.
"""

from itertools import count

from aiohttp import web


class GymServer:
    """Keeps the requests, and answers as the package does; sessions are cookies."""

    def __init__(self, *, is_gymnasium: bool = False) -> None:
        self.requests: list[tuple[str, str, dict]] = []
        """The path, the session, and the body of each request."""
        self.verdict: dict = {}
        """What `verify` adds to its answer."""
        self._counts: dict[str, int] = {}
        self._sessions = count()
        paths = {"reset": self._reset, "step": self._step}
        if not is_gymnasium:
            paths = {"seed_session": self._seed, "increment_counter": self._increment, "verify": self._verify}
        self._app = web.Application()
        for path, answer in paths.items():
            self._app.router.add_post(f"/{path}", self._kept(answer))

    async def __aenter__(self):
        self._runner = web.AppRunner(self._app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    def _kept(self, answer):
        async def kept(request):
            session = request.cookies.get("session") or str(next(self._sessions))
            body = await request.json()
            self.requests.append((request.path, session, body))
            response = answer(session, body)
            if isinstance(response, dict):
                response = web.json_response(response)
            response.set_cookie("session", session)
            return response

        return kept

    def _seed(self, session, body):
        self._counts[session] = body["initial_count"]
        return {}

    def _increment(self, session, body):
        if not isinstance(body.get("count"), int):
            return web.json_response({"detail": [{"loc": ["body", "count"], "msg": "not an integer"}]}, status=422)
        self._counts[session] += body["count"]
        return {"success": True}

    def _verify(self, session, body):
        reward = float(self._counts[session] == body["expected_count"])
        return {**body, "reward": reward, "mask_sample": False, "failure_kind": None, **self.verdict}

    def _reset(self, session, body):
        self._counts[session] = body["lives"]
        return {"observation": "Hit or stand?", "info": {}}

    def _step(self, session, body):
        (said,) = body["response"]["output"]
        if said["type"] == "function_call":
            results = [{"call_id": said["call_id"], "output": f"{said['name']} says 17"}]
            return _stepped(None, 0.0, info={"tool_outputs": results})
        self._counts[session] -= 1
        text = said["content"][0]["text"]
        if "stand" in text or not self._counts[session]:
            return _stepped(None, 1.0 if "stand" in text else -1.0, terminated=True, info={"hands": 1})
        return _stepped("Again?", -0.5)


def _stepped(observation, reward, *, terminated=False, info=None):
    flags = {"terminated": terminated, "truncated": False}
    return {"observation": observation, "reward": reward, **flags, "info": info or {}}
