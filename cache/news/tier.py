"""The memories in which a block's KV can lie, the fastest first."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """A memory. Its number is a bit's position in masks and stands in messages, so numbers never change."""

    DEVICE = 0
    HOST = 1
    FILE = 2
