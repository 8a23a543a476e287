"""Shared parts of the benchmarks, and the throughput benchmark itself."""
