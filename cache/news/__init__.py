"""News of the blocks that an engine's cache holds, for routers and other programs."""
