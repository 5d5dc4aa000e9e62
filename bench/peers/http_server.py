"""A trajectory over HTTP as JSON lists: `python http_server.py PORT TOKENS`.

`/dict` returns a plain dict from a handler without annotations, as the ProRL Agent server's `/process` does: FastAPI
then walks through every element in Python. The other two routes avoid that.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from trajectories import make_trajectory


def app(tokens: int) -> FastAPI:
    """Serve one trajectory, with its lists made ready beforehand."""
    arrays = make_trajectory(0, tokens).arrays
    lists: dict[str, Any] = {name: array.tolist() for name, array in arrays._asdict().items()}
    server = FastAPI()

    @server.get("/dict")
    async def plain_dict():  # type: ignore[no-untyped-def]
        return lists

    @server.get("/annotated")
    async def annotated() -> dict[str, Any]:
        return lists

    @server.get("/json_response")
    async def json_response() -> JSONResponse:
        return JSONResponse(lists)

    return server


if __name__ == "__main__":
    uvicorn.run(app(int(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
