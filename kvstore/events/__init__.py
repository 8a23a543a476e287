"""KV events: publishes which chunks the shared root holds, and which it no longer holds. EVENTS.md has the rules."""
