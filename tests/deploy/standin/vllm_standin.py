"""The stand-in for vLLM in an image: a command of the base's interpreter, which prints how it was started and becomes the simulator."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys


def main() -> None:
    """``vllm serve MODEL …``: the first line of the log says what it has found."""
    found = {
        "prefix": sys.prefix,
        "path": sys.path,
        "gateway": importlib.util.find_spec("gateway") is not None,
        "python3": shutil.which("python3"),
        "environment": sorted(os.environ),
    }
    print(json.dumps(found), flush=True)
    os.execvp("vllm-gateway", ["vllm-gateway", "simulate", *sys.argv[2:]])
