"""What is done to the sections of a chunk between a node and a file: compression, encryption, both, or nothing."""
