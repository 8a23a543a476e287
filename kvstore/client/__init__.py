"""The client API: ``open`` and ``connect`` return a Store, and a Store returns one cache per namespace."""

from kvstore.client.cache import Cache, Hold, Pin
from kvstore.client.local import open
from kvstore.client.operation import Operation
from kvstore.client.store import Store, connect

__all__ = ["Cache", "Hold", "Operation", "Pin", "Store", "connect", "open"]
