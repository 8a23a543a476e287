"""The bulk protocol: bytes of chunks past gRPC, through shared memory or a socket of their own. Rules: BULK.md."""
