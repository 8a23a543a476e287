"""The client's end of the bulk protocol: chunks past gRPC, through shared memory or a socket of their own."""
