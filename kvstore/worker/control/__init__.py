"""The control service (proto/kvstore/v1/control.proto): where things lie, long acts, drain, limits, health."""
