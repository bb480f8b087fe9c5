"""The dates of certificates are those that another library has written, and each time has its explanation."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.system.certificate_dates import SOON, Validity, validity
from tests.support.certificates import certificate, dated
from tests.support.examples import examples

_TIMES = st.datetimes(datetime(1950, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC)).map(lambda each: each.replace(microsecond=0))
_DATES = st.tuples(_TIMES, _TIMES).map(sorted).filter(lambda dates: dates[0] < dates[1])


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(_DATES, min_size=1, max_size=3))
def test_a_chain_is_valid_while_all_of_its_certificates_are(chain: list[list[datetime]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (begins, expires), *more = chain
        cert, _ = dated(Path(folder), begins, expires, *((first, last) for first, last in more))
        latest, earliest = max(each[0] for each in chain), min(each[1] for each in chain)
        assert validity(cert.read_bytes()) == (latest.timestamp(), earliest.timestamp())


def test_a_certificate_of_openssl(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    found = validity(cert.read_bytes())
    assert found is not None and found.expires - found.begins == timedelta(days=90).total_seconds()
    assert validity(key.read_bytes()) is None


@given(st.binary())
def test_what_is_no_certificate_has_no_dates(data: bytes) -> None:
    assert validity(data) is None
    assert validity(b"-----BEGIN CERTIFICATE-----" + data + b"-----END CERTIFICATE-----") is None


@pytest.mark.parametrize(
    ("now", "problem", "warning"),
    [
        (-1.0, "is not valid before 1970-01-01 00:00 UTC, so clients reject it; is the clock of this machine right?", None),
        (0.0, None, None),
        (30 * 86400 - SOON - 1, None, None),
        (30 * 86400 - SOON, None, "expires on 1970-01-31 00:00 UTC"),
        (30 * 86400.0, "has expired on 1970-01-31 00:00 UTC, so clients reject it", None),
    ],
)
def test_each_time_has_its_explanation(now: float, problem: str | None, warning: str | None) -> None:
    dates = Validity(0.0, 30 * 86400.0)
    assert (dates.problem(now), dates.warning(now)) == (problem, warning)
