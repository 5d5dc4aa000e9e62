"""A real resources server of nemo-gym, alone: python gym_worlds.py MODULE CLASS PORT. Runs in the environment `gym`."""

import importlib
import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.server_utils import ServerClient

if __name__ == "__main__":
    module, name, port = sys.argv[1:]
    kind = getattr(importlib.import_module(module), name)
    about = {"host": "127.0.0.1", "port": int(port), "entrypoint": "", "name": name}
    config = kind.model_fields["config"].annotation(**about) if "config" in kind.model_fields else None
    server = kind(
        config=config or BaseResourcesServerConfig(**about),
        server_client=MagicMock(spec=ServerClient),  # other servers of Gym's, which these two never call
    )
    uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=int(port), log_level="warning")
