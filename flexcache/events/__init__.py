"""KV events: publish to routers what the tiers hold, over ZMQ in vLLM's format, and read it."""
