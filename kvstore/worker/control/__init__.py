"""The control service (proto/kvstore/v1/control.proto): places, long-running operations, drain, limits, health."""
