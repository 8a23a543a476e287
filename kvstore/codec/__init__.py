"""Encodings of a chunk's sections between a node and a file: compression, encryption, both, or none."""
