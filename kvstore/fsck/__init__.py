"""Checking a root against its format, and repairing it, while a store uses it.

``fsck`` looks (and repairs), ``adopt`` tells an empty etcd what the root knows.
"""

from kvstore.fsck.adopt import Adopted, adopt
from kvstore.fsck.check import Action, Finding, Kind, Options, Report, fsck

__all__ = ["Action", "Adopted", "Finding", "Kind", "Options", "Report", "adopt", "fsck"]
