"""Garbage collection of a kvstore root: a separate service, alongside any number of nodes.

``gc/PROTOCOL.md`` is the protocol it follows; ``python -m kvstore_gc`` runs it.
"""
