"""The stores of records: a folder, or a bucket of S3 or a compatible server. ``writer`` deletes the expired records in them.

The rule: a store reads and writes whole files by the names of ``names``, and every failure is a ``StoreError``. A file is complete or
absent, and in a folder only this user can read it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from gateway.recording.names import day_of
from gateway.snapshot.snapshot import Recording

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_TIMEOUT = timedelta(seconds=10)
_MOST_RETRIES = 2
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_DELETED_TOGETHER = 1000  # objects: the most that S3 deletes in one request


class StoreError(Exception):
    """A store cannot be used. ``str()`` says why, without a secret."""


class Store(Protocol):
    """A store of files. Every method raises StoreError."""

    def put(self, name: str, data: bytes) -> None:
        """Store a file."""

    def get(self, name: str) -> bytes | None:
        """Return a file; None if it does not exist."""

    def days(self) -> Iterable[date]:
        """Return the days that have records."""

    def delete(self, day: date) -> None:
        """Delete the records of a day."""


class FolderStore:
    """Records in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, data: bytes) -> None:
        """Store a file."""
        target = self._folder / name
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        with _on_disk():
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                target.parent.mkdir(mode=0o700, exist_ok=True)
                descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                with open(descriptor, "wb") as file:
                    file.write(data)
                os.replace(partial, target)
            except OSError:
                with suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise

    def get(self, name: str) -> bytes | None:
        """Return a file; None if it does not exist."""
        with _on_disk(), suppress(FileNotFoundError):
            return (self._folder / name).read_bytes()
        return None

    def days(self) -> Iterator[date]:
        """Return the days that have records."""
        found: list[os.DirEntry[str]] = []
        with _on_disk(), suppress(FileNotFoundError):
            found = list(os.scandir(self._folder))
        for entry in found:
            if entry.is_dir(follow_symlinks=False) and (day := day_of(entry.name)) is not None:
                yield day

    def delete(self, day: date) -> None:
        """Delete the records of a day."""
        with _on_disk(), suppress(FileNotFoundError):
            shutil.rmtree(self._folder / day.isoformat())


class S3Store:
    """Records in a bucket, below a prefix."""

    def __init__(self, url: str, access_key_id: str, secret_access_key: str, region: str) -> None:
        from obstore.store import S3Store as Bucket  # the extra record-s3

        parts = urlsplit(url)
        bucket, _, prefix = parts.path.strip("/").partition("/")
        client: ClientConfig = {"allow_http": True, "timeout": _TIMEOUT, "connect_timeout": _TIMEOUT}
        retries: RetryConfig = {"max_retries": _MOST_RETRIES, "retry_timeout": _TIMEOUT}
        self._bucket = Bucket(
            bucket,
            prefix=prefix or None,
            endpoint=f"{parts.scheme}://{parts.netloc}",
            region=region,
            access_key_id=access_key_id,
            secret_access_key=secret_access_key,
            virtual_hosted_style_request=False,
            client_options=client,
            retry_config=retries,
        )

    def put(self, name: str, data: bytes) -> None:
        """Store a file."""
        with _reported():
            self._bucket.put(name, data)

    def get(self, name: str) -> bytes | None:
        """Return a file; None if it does not exist."""
        with _reported():
            try:
                return bytes(self._bucket.get(name).bytes())
            except FileNotFoundError:
                return None

    def days(self) -> Iterator[date]:
        """Return the days that have records."""
        with _reported():
            prefixes = self._bucket.list_with_delimiter()["common_prefixes"]
        for prefix in prefixes:
            if (day := day_of(prefix.rstrip("/").rpartition("/")[2])) is not None:
                yield day

    def delete(self, day: date) -> None:
        """Delete the records of a day."""
        with _reported():
            for objects in self._bucket.list(day.isoformat(), chunk_size=_DELETED_TOGETHER):
                self._bucket.delete([each["path"] for each in objects])


@contextmanager
def _on_disk() -> Iterator[None]:
    """Raise the failures of the file system as StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{error.filename or 'the folder'}: {error.strerror or type(error).__name__}") from error


@contextmanager
def _reported() -> Iterator[None]:
    """Raise the failures of the library as StoreError. Its text may repeat the request, so only a code is taken from it."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        code = _CODE.search(str(error))
        raise StoreError(f"the bucket: {type(error).__name__ if code is None else code[1]}") from error


def open_store(settings: Recording) -> Store:
    """Return the store of the settings."""
    if settings.credentials is None:
        return FolderStore(Path(settings.store))
    return S3Store(settings.store, *settings.credentials, settings.region)
