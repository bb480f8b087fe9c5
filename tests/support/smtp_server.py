"""Run a mail server with the commands that a sender needs: EHLO, STARTTLS, AUTH PLAIN, MAIL, RCPT, DATA, QUIT (RFC 5321, 3207, 4954)."""

from __future__ import annotations

import base64
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path


@dataclass
class Mailbox:
    """The accepted mails. ``logins`` are the users and passwords that were sent, ``protected`` whether each mail came with TLS.

    ``refuses`` are the recipients that the server does not accept. ``offers_tls``: it offers STARTTLS.
    """

    mails: list[EmailMessage] = field(default_factory=list)
    logins: list[tuple[str, str]] = field(default_factory=list)
    protected: list[bool] = field(default_factory=list)
    refuses: frozenset[str] = frozenset()
    offers_tls: bool = True
    port: int = 0


@contextmanager
def smtp_server(pair: tuple[Path, Path] | None = None, *, always: bool = False, **more: object) -> Iterator[Mailbox]:
    """Run a server for the length of the block. ``pair``: certificate and key. ``always``: TLS from the first byte."""
    box = Mailbox(**more)  # type: ignore[arg-type]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if pair is not None:
        context.load_cert_chain(*pair)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                if always:
                    self._encrypt()
                self._talk()
            except (OSError, ValueError):
                return  # the client has closed the connection, or does not trust the certificate
            finally:
                self.connection.close()

        def _encrypt(self) -> None:
            self.connection = context.wrap_socket(self.request, server_side=True, do_handshake_on_connect=False)
            self.connection.do_handshake()
            self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)

        def _say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

        def _talk(self) -> None:
            self._say("220 ready")
            while line := self.rfile.readline():
                verb, _, rest = line.decode().strip().partition(" ")
                match verb.upper():
                    case "EHLO":
                        tls = box.offers_tls and not isinstance(self.connection, ssl.SSLSocket)
                        self._say("250-localhost\r\n" + ("250-STARTTLS\r\n" if tls else "") + "250 AUTH PLAIN")
                    case "STARTTLS":
                        self._say("220 go ahead")
                        self._encrypt()
                    case "AUTH":
                        _, user, password = base64.b64decode(rest.partition(" ")[2]).decode().split("\0")
                        box.logins.append((user, password))
                        self._say("235 ok" if password == "right" else "535 wrong password")
                    case "RCPT":
                        self._say("550 no such user" if rest[4:-1] in box.refuses else "250 ok")
                    case "DATA":
                        self._say("354 go ahead")
                        self._read_mail()
                        self._say("250 accepted")
                    case "QUIT":
                        self._say("221 bye")
                        return
                    case _:
                        self._say("250 ok")

        def _read_mail(self) -> None:
            lines: list[bytes] = []
            while (line := self.rfile.readline()) not in (b".\r\n", b""):
                lines.append(line.removeprefix(b".") if line.startswith(b"..") else line)
            box.protected.append(isinstance(self.connection, ssl.SSLSocket))
            box.mails.append(message_from_bytes(b"".join(lines), EmailMessage, policy=default))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        box.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield box
        finally:
            server.shutdown()
            thread.join()
