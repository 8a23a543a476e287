"""The client's end of the bulk protocol: chunks outside gRPC, through shared memory or a socket."""
