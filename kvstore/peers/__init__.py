"""Peers: other nodes whose memory may have a chunk, their reports of what it holds, and reads from them."""
