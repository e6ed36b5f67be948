"""Reads server-sent events from lines, across the connections of a client that reconnects."""

from __future__ import annotations


class EventLines:
    """The events of one stream. Each counts once its empty line has come: a connection may break off before."""

    def __init__(self) -> None:
        self.last_id = ""
        """The id of the last event; "" if they have none."""
        self._fields: dict[str, str] = {}  # of the event that is being read

    @property
    def headers(self) -> dict[str, str]:
        """The headers with which a client asks for the events after `last_id`."""
        return {"last-event-id": self.last_id} if self.last_id else {}

    def begin(self) -> None:
        """Begin to read from a new connection: what the last one sent of an incomplete event does not count."""
        self._fields.clear()

    def take(self, line: str) -> dict[str, str]:
        """Take a line. Return the fields of the event that it completes, which are none for most lines."""
        if line:
            name, _, value = line.partition(": ")
            self._fields[name] = value
            return {}
        fields, self._fields = self._fields, {}
        self.last_id = fields.get("id", self.last_id)
        return fields
