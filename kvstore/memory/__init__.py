"""What a bounded tier holds, and the shared memory that holds it.

Pure but for the arena: no locks, no clock, no I/O. ``MEMORY.md`` is the specification.
"""
