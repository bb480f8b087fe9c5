"""Choose the folder of a gateway's spool, and take over the rows that wait for the same database in other folders.

A folder is named for the ledger's database, so that a configuration file may be renamed or moved. The rules: rows are taken over only from
a folder that no gateway uses, and only if they belong to this database. Other rows that wait are reported with their database.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from sqlalchemy.engine import URL, make_url

from gateway.config.database_url import database_url as parsed_url
from gateway.ledger import upgrade
from gateway.ledger.errors import SpoolLockedError
from gateway.ledger.spool import Spool, locked, spool, waiting_files
from gateway.ledger.store import database_url

_OWNER = "owner.json"
_IDENTIFYING = frozenset({"host", "hostaddr", "port", "dbname", "service", "options"})  # of libpq: these select the database
_log = logging.getLogger("vllm_gateway.ledger")


class Owner(msgspec.Struct, frozen=True):
    """The ledger to which a folder's rows belong.

    ``database``: the URL without secrets. ``written``: the same as in the configuration file, whose path is ``configuration``.
    """

    database: str
    written: str
    configuration: str

    @property
    def folder_name(self) -> str:
        digest = hashlib.sha256(self.database.encode()).hexdigest()[:16]
        return f"{make_url(self.database).get_backend_name()}-{digest}"

    def owns(self, folder: Path, other: Owner | None) -> bool:
        """Return whether the rows in a folder, which ``other`` left there, belong to this owner's database."""
        if other is None:
            return folder.name.startswith(self.folder_name)
        return self.database == other.database or (self.written == other.written and other.has_moved)

    @property
    def has_moved(self) -> bool:
        """Whether neither the configuration file nor its SQLite file exists where it was."""
        url = make_url(self.database)
        return url.get_backend_name() == "sqlite" and not (Path(str(url.database)).exists() or Path(self.configuration).exists())


def owner_of(url: str, config: Path) -> Owner:
    """Return the owner for a configuration file with this ``ledger.url``."""
    config = Path(os.path.abspath(config))
    return Owner(_without_secrets(database_url(url, config.parent)), _without_secrets(parsed_url(url)), str(config))


def _without_secrets(url: URL) -> str:
    identifying = {name: value for name, value in url.query.items() if name in _IDENTIFYING}
    return URL.create(url.get_backend_name(), url.username, None, url.host, url.port, url.database, identifying).render_as_string()


@contextmanager
def spool_of(owner: Owner, folders: Path) -> Iterator[Spool]:
    """Yield the spool of an owner, with the rows that other folders had for it. Gateways with the same database have separate folders.

    Raises OSError.
    """
    for number in itertools.count(1):
        folder = folders / (owner.folder_name if number == 1 else f"{owner.folder_name}-{number}")
        try:
            with spool(folder) as spooled:
                if _read_owner(folder) != owner:
                    with suppress(OSError):  # on a full disk the gateway serves, and rows go directly to the database
                        (folder / _OWNER).write_bytes(msgspec.json.encode(owner))
                _take_over(spooled, owner)
                yield spooled
                return
        except SpoolLockedError:
            continue


def _take_over(spooled: Spool, owner: Owner) -> None:
    for folder in sorted(spooled.folder.parent.iterdir()):
        if folder == spooled.folder:
            continue
        try:
            if waiting_files(folder):
                _take_over_folder(spooled, owner, folder)
        except SpoolLockedError:
            pass  # its gateway is running
        except OSError as error:
            _log.error("rows in %s cannot be read, and may be missing in the ledger: %s", folder, error.strerror or error)


def _take_over_folder(spooled: Spool, owner: Owner, folder: Path) -> None:
    """Take over a folder's rows or report them. Raises SpoolLockedError and OSError."""
    with locked(folder):
        other = _read_owner(folder)
        is_upgraded = other is None and folder.name == upgrade.folder_name(owner.configuration)
        if is_upgraded:
            upgrade.upgrade_files(waiting_files(folder))
        if is_upgraded or owner.owns(folder, other):
            _log.warning("%d waiting rows of the ledger were taken over from %s", spooled.take_over(folder), folder)
            return
    belongs = "an unknown ledger" if other is None else f"the ledger {other.database} of {other.configuration}"
    _log.warning(
        "rows of %s wait in %s: they are stored when a gateway with that ledger starts. If they belong to this ledger, stop this gateway,"
        " move the files *.rows to %s, and start it again",
        belongs,
        folder,
        spooled.folder,
    )


def _read_owner(folder: Path) -> Owner | None:
    with suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode((folder / _OWNER).read_bytes(), type=Owner)
    return None
