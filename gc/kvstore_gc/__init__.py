"""Garbage collection of a kvstore root: a service of its own, beside any number of nodes.

``gc/PROTOCOL.md`` is the protocol it follows; ``python -m kvstore_gc`` runs it.
"""
