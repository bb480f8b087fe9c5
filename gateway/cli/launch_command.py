"""Print the commands of launches, to read them and to try them by hand.

They come from the functions that launch servers. The rule: they contain no secret, and values that each run creates (the internal key, the
private folder, a free port) are placeholders.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

from pydantic import SecretStr

from gateway import config as conf
from gateway.config import Config
from gateway.fleet.configured_servers import configured_servers, launches
from upstream.vllm.command_line import LaunchSettings, address_for, command_line, flag_of

MASK = "***"
_FOLDER = "/tmp/vllm-gateway-XXXXXXXX"  # noqa: S108  shown, not used
_SECRET_FLAGS = {"hf-token"}
_SECRET_NAMES = re.compile("TOKEN|SECRET|PASSWORD|KEY", re.IGNORECASE)


def shown_launches(config: Config, model: str) -> Iterator[str]:
    """Yield a text for each replica of a launched model: a comment with its name, the variables, and the command."""
    for number, spec in enumerate(launches(config)):
        server = next(each for each in configured_servers(config) if each.name == spec.name)
        if server.model.id == model and server.model.launch is not None:
            yield f"# {spec.name}\n{_shown(_masked(spec.settings, server.model.launch), f'{_FOLDER}/{number}.sock')}"


def _masked(settings: LaunchSettings, launch: conf.Launch) -> LaunchSettings:
    secret = {name for name, value in launch.env.items() if isinstance(value, SecretStr) or _SECRET_NAMES.search(name)}
    env = {name: MASK if name in secret else value for name, value in settings.env.items()}
    args = {key: MASK if flag_of(key) in _SECRET_FLAGS else value for key, value in settings.args.items()}
    return replace(settings, env=env, args=args)


def _shown(settings: LaunchSettings, socket: str) -> str:
    line = command_line(settings, address_for(settings, uds=socket, free_port=lambda: 0), MASK)
    return " \\\n".join([*(f"{name}={shlex.quote(value)}" for name, value in line.env.items()), shlex.join(line.argv)])
