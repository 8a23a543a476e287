"""The bulk protocol: bytes of chunks past gRPC, through shared memory or a separate socket. Rules: BULK.md."""
