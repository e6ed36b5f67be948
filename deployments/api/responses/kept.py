"""What one process's API has of responses: where they are kept, and those that run in the background."""

from __future__ import annotations

from deployments.api.errors import invalid
from deployments.api.responses.background import BackgroundResponses
from deployments.api.responses.directory_store import DirectoryStore
from deployments.api.responses.store import MemoryStore, ResponseStore
from deployments.config.settings import ResponseSettings


class KeptResponses:
    """The store and the background of one process."""

    def __init__(self, settings: ResponseSettings | None = None, store: ResponseStore | None = None) -> None:
        """Without a `store`, responses are kept where the settings say."""
        self.settings = settings or ResponseSettings()
        self.store: ResponseStore = store or _store_for(self.settings)
        self.background = BackgroundResponses(self.settings.max_background)

    def check_background(self) -> None:
        """Raise `ApiError` when no response can be generated in the background, or not now."""
        if not self.settings.max_bytes:
            raise invalid("background needs responses to be stored, and responses.max_bytes is 0.", "background")
        self.background.check_room()


def _store_for(settings: ResponseSettings) -> ResponseStore:
    if settings.directory is None:
        return MemoryStore(settings.max_bytes, settings.ttl_s)
    return DirectoryStore(settings.directory, settings.max_bytes, settings.ttl_s)
