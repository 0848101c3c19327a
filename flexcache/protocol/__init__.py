"""What server and clients agree on: messages, names, endpoints, shared memory."""
