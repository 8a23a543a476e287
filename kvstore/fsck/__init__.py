"""Checking a root against its format, and repairing it, beside a store that goes on working.

``fsck`` looks (and repairs), ``adopt`` tells an empty etcd what the root knows.
"""

from kvstore.fsck.adopt import Adopted, adopt
from kvstore.fsck.check import Options, fsck
from kvstore.fsck.report import Action, Finding, Kind, Progress, Report

__all__ = ["Action", "Adopted", "Finding", "Kind", "Options", "Progress", "Report", "adopt", "fsck"]
