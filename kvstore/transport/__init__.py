"""Shared by both ends of the gRPC service: messages, frames of data, errors as statuses, limits of the channel."""
