"""The generated messages and stubs of the gRPC service, version 1."""
