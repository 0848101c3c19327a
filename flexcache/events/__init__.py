"""KV events: what the tiers hold, told to routers over ZMQ in vLLM's format; and its readers."""
