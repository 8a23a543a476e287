"""The worker's end of the bulk protocol: listens, knows its clients, serves Put and Get past gRPC."""
