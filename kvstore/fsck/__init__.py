"""Checking a root against its format, and repairing it, while a store uses it.

``fsck`` checks (and repairs), ``adopt`` restores the metadata of an empty etcd from the root.
"""

from kvstore.fsck.adopt import Adopted, adopt
from kvstore.fsck.check import Action, Finding, FindingKind, FsckReport, Options, fsck

__all__ = ["Action", "Adopted", "Finding", "FindingKind", "FsckReport", "Options", "adopt", "fsck"]
