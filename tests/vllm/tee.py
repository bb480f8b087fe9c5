"""Proxy the socket of a launched vLLM and record every byte, so that a test can compare with the bytes that the server sent.

``python tee.py FOLDER COMMAND… --uds PATH …`` becomes COMMAND with `FOLDER/server.sock` in PATH's place, so that vLLM is its launcher's
own child, and leaves a child behind that listens on PATH and passes bytes on to it. For each connection the folder gets `PID-N.in` (what
the client sent) and `PID-N.out` (what the server sent). The rule: a byte is written down before it is passed on, and neither side is
read faster than the other one takes it. Standard library only.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from pathlib import Path
from typing import BinaryIO

INNER = "server.sock"


def main(folder: str, *command: str) -> None:
    """Fork the tee, then execute the command."""
    path = command.index("--uds") + 1
    inner = Path(folder) / INNER
    inner.unlink(missing_ok=True)  # vLLM does not remove its socket, and the next vLLM would fail
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(command[path])
    listener.listen(128)
    if os.fork() == 0:
        asyncio.run(Tee(Path(folder)).serve(listener))
    arguments = [*command[:path], str(inner), *command[path + 1 :]]
    os.execvp(arguments[0], arguments)


class Tee:
    """The traffic between one listener and the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until the launcher kills the process group."""
        async with await asyncio.start_unix_server(self._connected, sock=listener) as server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = f"{os.getpid()}-{next(self._numbers)}"
        try:
            there_reader, there_writer = await asyncio.open_unix_connection(str(self._folder / INNER))
        except OSError:  # the server does not listen yet, or has closed its socket
            writer.transport.abort()
            return
        with self._record(f"{name}.in") as requested, self._record(f"{name}.out") as text:
            ways = [asyncio.create_task(_pass(reader, there_writer, requested)), asyncio.create_task(_pass(there_reader, writer, text))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)  # if one side closes, close the other side
            ways[0].cancel()
            for end in (there_writer, writer):
                end.close()  # bytes already written are sent first
            await asyncio.wait(ways)

    def _record(self, name: str) -> BinaryIO:
        return open(self._folder / name, "wb", buffering=0)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: BinaryIO) -> None:
    try:
        while data := await reader.read(65536):
            record.write(data)
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
