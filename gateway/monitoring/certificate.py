"""Follow the dates of the data port's certificate, because nothing else notices that it expires.

The rule: the file is read when it changes. With a file that is not a certificate the last dates stay, because the workers then use the last
certificate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gateway.config import Config
from gateway.system.certificate_dates import Validity, validity
from gateway.system.file_stat import FileStat, file_stat
from gateway.telemetry.dependencies import Observation
from gateway.telemetry.metrics import Series

_SETTING = "server.tls"
_log = logging.getLogger("vllm_gateway.certificate")


class CertificateDates:
    """The dates of the certificate."""

    def __init__(self) -> None:
        self._stamp: tuple[Path, FileStat] | None = None
        self._validity: Validity | None = None
        self._logged: str | None = None

    def _read(self, config: Config) -> Validity | None:
        tls = config.server.tls
        if tls is None:
            return None
        stamp = tls.cert, file_stat(tls.cert)
        if stamp != self._stamp:
            self._stamp = stamp
            with suppress(OSError):  # it is being replaced, or the workers report it
                self._validity = validity(tls.cert.read_bytes()) or self._validity
        return self._validity

    def dependencies(self, config: Config) -> Iterator[Observation]:
        """Yield whether clients accept the certificate, and log each change."""
        found, now = self._read(config), time.time()
        if found is None:
            return
        problem, warning = found.problem(now), found.warning(now)
        if (text := problem or warning) != self._logged:
            if text is not None:
                _log.log(logging.ERROR if problem else logging.WARNING, "the certificate of %s %s", _SETTING, text)
            self._logged = text
        yield Observation("certificate", _SETTING, problem, warning)

    def series(self, config: Config) -> Iterator[tuple[Series, float]]:
        """Yield when the certificate expires."""
        found = self._read(config)
        if found is not None:
            yield Series("certificate_expires_timestamp_seconds", (_SETTING,)), found.expires
