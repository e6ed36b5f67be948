"""A deployment handle of the hub, in this process."""

from __future__ import annotations

import asyncio
from typing import Any


class HubHandle:
    """Its calls go to the present hub. They fail while there is none, and do not end while it hangs."""

    def __init__(self, hub: Any) -> None:
        self.hub, self.hangs = hub, False

    def __getattr__(self, method: str) -> Any:
        async def remote(*args: Any) -> Any:
            if self.hangs:
                await asyncio.sleep(10**6)
            if self.hub is None:
                raise ConnectionError("no replica")
            return await getattr(self.hub, method)(*args)

        return type("Method", (), {"remote": staticmethod(remote)})
