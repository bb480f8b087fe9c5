"""Where the audit log of a configuration is: in a file, or in the store's table with a spool on disk.

The rule: the gateway and the command ``audit`` find the log by the same functions.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from gateway.audit.log import Where
from gateway.config import Config
from gateway.config.models import AuditSettings


def key_of(secret: str) -> bytes:
    """Return the key of the HMACs, which is used for nothing else."""
    return hmac.digest(secret.encode(), b"vllm-gateway audit log", "sha256")


def where_of(settings: AuditSettings, config: Config, path: Path, state: Path) -> Where:
    """Return where the log is. ``path`` is the file of ``config``, and ``state`` the folder for what is stored between runs.

    The caller closes the table.
    """
    if settings.file is not None:
        return Where(settings.file, _folder(state, settings.file))
    from gateway.audit.table import AuditTable  # it loads SQLAlchemy
    from gateway.ledger.store import database_url

    assert config.database_url is not None, "checked with the configuration"
    absolute = Path(os.path.abspath(path))
    folder = _folder(state, absolute)
    return Where(folder / "spool.jsonl", folder, AuditTable(database_url(config.database_url, absolute.parent)))


def _folder(state: Path, file: Path) -> Path:
    """Return the folder of the checkpoint, by the absolute path of the file that stands for the log."""
    return state / "audit" / hashlib.sha256(str(file).encode()).hexdigest()[:16]
