"""KV events: tells routers what the shared root holds, and what it no longer holds. EVENTS.md has the rules."""
