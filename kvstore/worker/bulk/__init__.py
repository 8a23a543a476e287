"""The worker's end of the bulk protocol: listens, authenticates clients, serves Put and Get outside gRPC."""
