"""A stand-in for ``vllm serve`` that the launching tests start: its routes, its child processes and its bad habits.

``--pids FILE``: one ``role pid`` a line, of every process that there is. ``--engine-core``: a child process, and below
it one in a separate session.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler
from multiprocessing.shared_memory import SharedMemory


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class TcpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            self.respond(503 if ARGS.sick_while and os.path.exists(ARGS.sick_while) else 200, {})
        elif self.headers.get("authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.respond(401, {"error": "Unauthorized"})
        else:
            self.respond(200, {"data": [{"id": name, "max_model_len": 2048, "root": "/secret"} for name in ARGS.served_model_name]})

    def respond(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def address_string(self) -> str:
        return "-"

    def log_message(self, *_: object) -> None:
        pass


def note(role: str, pid: int) -> None:
    if ARGS.pids:
        with open(ARGS.pids, "a") as file:
            file.write(f"{role} {pid}\n")


def engine_core() -> None:
    if os.fork() == 0:
        note("engine", os.getpid())
        note("stray", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        signal.pause()


def flood(size: int) -> None:
    line = b"x" * 1023 + b"\n"
    for _ in range(size // len(line)):
        os.write(1, line)


def main() -> None:
    if ARGS.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("loading", ARGS.model, flush=True)
    if ARGS.say:
        print(ARGS.say, flush=True)
    if ARGS.flood:
        flood(ARGS.flood)
    if ARGS.leave_socket:
        socket.socket(socket.AF_UNIX).bind(os.path.join(os.environ["VLLM_RPC_BASE_PATH"], str(uuid.uuid4())))
    if ARGS.shared_memory:
        SharedMemory(ARGS.shared_memory, create=True, size=4096)
    if ARGS.engine_core:
        engine_core()
    note("main", os.getpid())
    if ARGS.never_ready:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(600)
    server = UnixServer(ARGS.uds, Handler) if ARGS.uds else TcpServer((ARGS.host, ARGS.port), Handler)
    print("ready", flush=True)
    server.serve_forever()


parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--served-model-name", nargs="+")
parser.add_argument("--uds")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--pids")
parser.add_argument("--shared-memory")
parser.add_argument("--engine-core", action="store_true")
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--sick-while", help="while this file is there, /health is 503")
parser.add_argument("--say", help="a line of the log")
parser.add_argument("--flood", type=int, help="bytes to log before it is ready")
parser.add_argument("--leave-socket", action="store_true", help="as vLLM does between its processes")
parser.add_argument("--never-ready", action="store_true")
ARGS = parser.parse_args()
main()
