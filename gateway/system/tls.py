"""The certificate of a port, which follows its files.

The rule: the presented certificate and key always belong together. A new pair is checked before it is used, from the same bytes that were
read. If a new pair is invalid, the old pair stays in use. Open connections are not affected.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.system.file_stat import FileStat, file_stat

_log = logging.getLogger("vllm_gateway.certificate")


@dataclass(frozen=True, slots=True)
class Tls:
    """The files of a certificate chain and its key, PEM."""

    cert: str
    key: str


class CertificateError(Exception):
    """The files are not a certificate with its key. The message is for the operator and contains no part of the files."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate chain and its key, as PEM."""

    cert: bytes
    key: bytes

    @classmethod
    def read(cls, files: Tls) -> Pair:
        """Read the files. Raises CertificateError."""
        try:
            return cls(Path(files.cert).read_bytes(), Path(files.key).read_bytes())
        except OSError as error:
            raise CertificateError(f"{error.filename} cannot be read: {error.strerror}") from error

    def load_into(self, context: ssl.SSLContext) -> None:
        """Present this pair from the next handshake on. Raises CertificateError, after which ``context`` cannot be used."""
        with ExitStack() as stack:
            cert, key = (stack.enter_context(_as_file(data)) for data in (self.cert, self.key))
            try:
                context.load_cert_chain(cert, key, password=_no_password)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise CertificateError(_reason(error)) from error

    def check(self) -> None:
        """Check that the certificate and the key belong together. Raises CertificateError."""
        self.load_into(_context())


class Certificate:
    """The TLS context of a process. Raises CertificateError if the first pair is invalid."""

    def __init__(self, files: Tls) -> None:
        self.context = _context()
        self._stamp = _stamp(files)
        self._pair = Pair.read(files)
        self._pair.load_into(self.context)

    def reload(self, files: Tls) -> None:
        """Use the files if they have changed. Called about once a second."""
        stamp = _stamp(files)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            pair = Pair.read(files)
            if pair != self._pair:
                pair.check()
                pair.load_into(self.context)
                self._pair = pair
                _log.warning("the certificate was renewed")
        except CertificateError as error:
            _log.error("the new certificate is not used, the old one stays: %s", error)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _stamp(files: Tls) -> tuple[FileStat, ...]:
    """Return a value that changes when a file does."""
    return tuple(map(file_stat, (files.cert, files.key)))


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Yield the path of a file in memory: ``ssl`` reads files only, and the files on disk may change meanwhile."""
    fd = os.memfd_create("pem")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _no_password() -> str:
    """Prevent OpenSSL from prompting on the terminal."""
    raise ValueError("the key is locked with a password; give one without")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    if isinstance(error, ssl.SSLError):
        return "one of the files is not PEM"
    return str(error)
