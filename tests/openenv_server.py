"""A server of OpenEnv's contract (openenv-core 0.3): `/schema`, and sessions over the WebSocket `/ws`.

`tests/stages/environments/test_real_openenv.py` makes the same calls against the real package.
"""

import json

from aiohttp import web

GUESS = {
    "title": "Guess",
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "guess": {"type": "string"}},
    "required": ["guess"],
}
MOVE = {
    "title": "Move",
    "description": "Move to a place.",
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
CALL = {"title": "CallToolAction", "type": "object", "properties": {}, "required": ["tool_name"]}
ADD = {"name": "add", "description": "Add two numbers.", "input_schema": {"type": "object"}}


class OpenEnvServer:
    """Serves one environment to as many sessions as allowed.

    Args:
        action: the schema of its actions: `GUESS`, `MOVE` or `CALL`.
        sessions: the most sessions at a time; a further one is answered with an error and closed, as the package does.
    """

    def __init__(self, action: dict, sessions: int = 8) -> None:
        self._action, self._most = action, sessions
        self.resets: list[dict] = []
        self.refused = self._open = 0
        self._app = web.Application()
        self._app.router.add_get("/schema", self._schema)
        self._app.router.add_get("/ws", self._session)

    async def __aenter__(self):
        self._runner = web.AppRunner(self._app, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _schema(self, _request):
        return web.json_response({"action": self._action, "observation": {}, "state": {}})

    async def _session(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self._open >= self._most:
            self.refused += 1
            await socket.send_json(_error("CAPACITY_REACHED", "Server at capacity", active_sessions=self._open))
            await socket.close()
            return socket
        self._open += 1
        try:
            async for frame in socket:
                asked = json.loads(frame.data)
                if asked["type"] == "reset":
                    self.resets.append(asked["data"])
                    await socket.send_json(_seen({"text": "Begin."}))
                elif asked["data"].get("guess") == "vanish":
                    await socket.close()
                else:
                    await socket.send_json(self._stepped(asked["data"]))
        finally:
            self._open -= 1
        return socket

    def _stepped(self, action):
        if action.get("type") == "list_tools":
            return _seen({"tools": [ADD]})
        if action.get("type") == "call_tool":
            return _seen({"tool_name": "add", "result": {"data": sum(action["arguments"].values())}, "error": None})
        if "guess" in action:
            if action["guess"] == "crash":
                return _error("EXECUTION_ERROR", "the world broke")
            right = action["guess"] == "7"
            return _seen({"text": "Yes." if right else "No.", "tries": 1}, 1 if right else -0.5, done=right)
        if not isinstance(action.get("x"), int):
            wrong = [{"loc": ["x"], "msg": "Input should be a valid integer"}]
            return _error("VALIDATION_ERROR", "Invalid message", errors=wrong)
        return _seen({"text": "There."}, True, done=True)


def _seen(observation, reward=None, *, done=False):
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def _error(code, message, **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}
