"""Peers: other nodes whose memory may have a chunk, what they say that it holds, and reading it from them."""
