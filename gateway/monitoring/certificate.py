"""Follow the dates of the ports' certificates, because nothing else notices that they expire.

The rule: a file is read when it changes. With a file that is not a certificate the last dates stay, because its port then uses the last
certificate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from gateway.config import Config
from gateway.config.models import Tls
from gateway.system.certificate_dates import Validity, validity
from gateway.system.file_stat import FileStat, file_stat
from gateway.telemetry.dependencies import Observation
from gateway.telemetry.metrics import Series

_log = logging.getLogger("vllm_gateway.certificate")


class CertificateDates:
    """The dates of the certificates of the data port and of the admin port."""

    def __init__(self) -> None:
        self._ports = (
            _Dates("server.tls", lambda config: config.server.tls),
            _Dates("server.admin.tls", lambda config: config.server.admin.tls),
        )

    def dependencies(self, config: Config) -> Iterator[Observation]:
        """Yield whether clients accept the certificates, and log each change."""
        for port in self._ports:
            yield from port.dependencies(config)

    def series(self, config: Config) -> Iterator[tuple[Series, float]]:
        """Yield when the certificates expire."""
        for port in self._ports:
            if (found := port.read(config)) is not None:
                yield Series("certificate_expires_timestamp_seconds", (port.setting,)), found.expires


class _Dates:
    """The dates of the certificate of a port. ``files`` returns its setting."""

    def __init__(self, setting: str, files: Callable[[Config], Tls | None]) -> None:
        self.setting = setting
        self._files = files
        self._stamp: tuple[Path, FileStat] | None = None
        self._validity: Validity | None = None
        self._logged: str | None = None

    def read(self, config: Config) -> Validity | None:
        if (tls := self._files(config)) is None:
            return None
        stamp = tls.cert, file_stat(tls.cert)
        if stamp != self._stamp:
            self._stamp = stamp
            with suppress(OSError):  # it is being replaced, or the port reports it
                self._validity = validity(tls.cert.read_bytes()) or self._validity
        return self._validity

    def dependencies(self, config: Config) -> Iterator[Observation]:
        found, now = self.read(config), time.time()
        if found is None:
            return
        problem, warning = found.problem(now), found.warning(now)
        if (text := problem or warning) != self._logged:
            if text is not None:
                _log.log(logging.ERROR if problem else logging.WARNING, "the certificate of %s %s", self.setting, text)
            self._logged = text
        yield Observation("certificate", self.setting, problem, warning)
