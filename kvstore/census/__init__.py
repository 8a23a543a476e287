"""The chunks on a root, counted by namespace, by writer, by prefix.

A node knows a chunk only by its address, and a collector asks which may go. A census tells what is there.
"""
