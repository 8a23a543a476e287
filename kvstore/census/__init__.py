"""What is on a root, counted and told apart: by namespace, by who wrote it, by prefix.

Apart from nodes, which know a chunk only by its address, and from collectors, which ask what may go.
"""
