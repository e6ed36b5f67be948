"""What an engine's cache holds, block by block, for routers and other programs."""
