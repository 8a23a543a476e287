"""What both ends of the gRPC service share: messages, frames of data, errors as statuses, limits of the channel."""
