"""A plain form of tool calls, for models that were trained on none: a fenced block of JSON.

    ```tool_call
    {"name": "bash", "arguments": {"command": "ls"}}
    ```

The fences stand at the beginnings of lines.
"""

from __future__ import annotations

import re

from .marked_json import MarkedJsonFormat


class FencedFormat(MarkedJsonFormat, name="fenced", opens=["\n```tool_call\n"], closes="\n```"):
    """Of no model."""

    begins = re.compile(r"(?:\A|\n)```tool_call\b")

    only_calls = False
