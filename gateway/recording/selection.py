"""Select the requests that are recorded.

The rule: the decision follows from the key, the model and the ID of a request, so all workers decide in the same way. Clients cannot choose
the ID.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from gateway.snapshot.snapshot import Key, Model, Recording
from gateway.telemetry.request_ids import RequestSample


class Selection:
    """Selects requests by the settings."""

    def __init__(self, settings: Recording) -> None:
        self._keys = settings.keys
        self._models = settings.models
        self._sample = RequestSample(settings.share)
        self._by_key: dict[str, bool] = {}

    def includes_model(self, model: Model) -> bool:
        """Return whether requests for a model may be recorded."""
        return model.is_in(self._models)

    def includes(self, key: Key, request_id: str) -> bool:
        """Return whether a request is recorded. A token counts as the key of its entry."""
        if not self._sample.includes(request_id):
            return False
        identity = key.entry or key.id
        if (found := self._by_key.get(identity)) is None:
            found = self._by_key[identity] = any(fnmatchcase(identity, pattern) for pattern in self._keys)
        return found
