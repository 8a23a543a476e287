"""Replay of a trace of requests against a store; every byte is compared with what the trace determines."""

from kvstore.replay.generate import generate
from kvstore.replay.runner import Content, Expectation, ReplayPlan, ReplayReport, expect, replay, replay_layout
from kvstore.replay.trace import TraceRequest, load_trace

__all__ = [
    "Content",
    "Expectation",
    "ReplayPlan",
    "ReplayReport",
    "TraceRequest",
    "expect",
    "generate",
    "load_trace",
    "replay",
    "replay_layout",
]
