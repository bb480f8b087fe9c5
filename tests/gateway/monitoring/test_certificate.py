"""An expired, an expiring and a renewed certificate of a port are reported by check, log, status, readiness and metrics."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.config import load
from gateway.monitoring.certificate import CertificateDates
from tests.support.certificates import dated
from tests.support.process import Gateway, configuration, gateway, launched, wait_for, write

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)
EXPIRED, SOON, FINE, FUTURE = (
    (NOW - 9 * DAY, NOW - DAY),
    (NOW - DAY, NOW + 2 * DAY),
    (NOW - DAY, NOW + 90 * DAY),
    (NOW + DAY, NOW + 9 * DAY),
)


def with_tls(folder: Path, dates: tuple[datetime, datetime]) -> dict[str, Any]:
    dated(folder, *dates)
    return configuration(launched(), tls={"cert": "cert.pem", "key": "key.pem"})


def entry(one: Gateway) -> dict[str, Any]:
    return next(each for each in one.get("/status").json()["dependencies"] if each["name"] == "certificate")


def test_an_expired_certificate_is_reported_until_it_is_renewed(tmp_path: Path) -> None:
    config = with_tls(tmp_path, EXPIRED)
    text = f"has expired on {EXPIRED[1]:%Y-%m-%d %H:%M} UTC, so clients reject it"
    with gateway(tmp_path, config) as one:
        assert one.get("/readyz").json() == {"status": "degraded", "reasons": ["certificate is down"]}
        assert (entry(one)["state"], entry(one)["last_error"]) == ("down", text)
        wait_for(lambda: f"the certificate of server.tls {text}" in one.output)
        assert "certificate (server.tls) is down for" in one.command("status").stdout
        series = 'vllm_gateway_certificate_expires_timestamp_seconds{setting="server.tls"}'
        assert one.metric(series) == EXPIRED[1].timestamp()
        dated(tmp_path, *SOON)
        wait_for(lambda: entry(one)["state"] == "degraded")
        assert one.get("/readyz").json() == {"status": "ready", "reasons": []}
        assert f"certificate (server.tls) expires on {SOON[1]:%Y-%m-%d %H:%M} UTC" in one.command("status").stdout
        dated(tmp_path, *FINE)
        wait_for(lambda: entry(one)["state"] == "up")
        assert one.metric(series) == FINE[1].timestamp()
        assert one.output.count("has expired") == 1


@pytest.mark.parametrize(
    ("dates", "text"), [(EXPIRED, "has expired on"), (SOON, "expires on"), (FUTURE, "is not valid before"), (FINE, "")]
)
def test_each_change_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, dates: tuple[datetime, datetime], text: str) -> None:
    write(tmp_path / "gateway.yaml", with_tls(tmp_path, dates))
    config, watched = load(tmp_path / "gateway.yaml"), CertificateDates()
    for _ in range(3):
        (observed,) = watched.dependencies(config)
    assert [text in record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == [True] * bool(text)
    assert text in (observed.error or observed.warning or "")
    (tmp_path / "cert.pem").write_text("half of a file")
    assert list(watched.dependencies(config)) == [observed], "the workers still use the last certificate"


def test_the_admin_port_has_its_own_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = with_tls(tmp_path, FINE)
    (tmp_path / "admin").mkdir()
    dated(tmp_path / "admin", *SOON)
    own["server"]["admin"]["tls"] = {"cert": "admin/cert.pem", "key": "admin/key.pem"}
    write(tmp_path / "gateway.yaml", own)
    config, watched = load(tmp_path / "gateway.yaml"), CertificateDates()
    expires = {series.labels: value for series, value in watched.series(config)}
    assert expires == {("server.tls",): FINE[1].timestamp(), ("server.admin.tls",): SOON[1].timestamp()}
    assert [(each.subject, each.state) for each in watched.dependencies(config)] == [("server.tls", "up"), ("server.admin.tls", "degraded")]
    assert "the certificate of server.admin.tls expires on" in caplog.text
