"""The contents of a bounded tier, and the shared memory that holds them.

Pure except for the arena: no locks, no clock, no I/O. ``MEMORY.md`` is the specification.
"""
