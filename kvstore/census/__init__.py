"""The chunks on a root, counted by namespace, by writer, by prefix.

A node knows a chunk only by its address, and a collector decides which chunks to delete. A census reports what exists.
"""
