"""The address of the ledger's database from its URL: ``sqlite:///usage.db``, ``postgresql://user@host:5432/name``.

PostgreSQL's own form with several hosts, ``postgresql://a:5432,b:5432/name?target_session_attrs=read-write``, is accepted too. The rule:
no message repeats a part of the URL, because it may contain a password.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

_SEVERAL_HOSTS = re.compile(r"(?P<start>postgresql://(?:[^/?#]*@)?)(?P<hosts>[^/?#@]*,[^/?#@]*)(?P<rest>.*)", re.DOTALL)


def database_url(url: str) -> URL:
    """Return SQLAlchemy's form of a URL. Raises ValueError with a message for the operator."""
    from sqlalchemy.engine import make_url  # loaded only where a ledger is configured
    from sqlalchemy.exc import ArgumentError

    several = _SEVERAL_HOSTS.fullmatch(url)
    try:
        if several is None:
            return make_url(url)
        made = make_url(several["start"] + several["rest"])
    except (ArgumentError, ValueError):
        raise ValueError("expected a URL such as postgresql://user@host:5432/name") from None
    hosts = several["hosts"].split(",")
    if not all(re.fullmatch(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?", host) for host in hosts):
        raise ValueError("expected hosts such as postgresql://user@a:5432,b:5432/name")
    return made.update_query_dict({"host": hosts})
