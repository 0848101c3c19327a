"""Protocol of server and clients: messages, names, endpoints, shared memory."""
