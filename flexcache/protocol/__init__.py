"""The contract between server and clients: messages, names, endpoints, shared memory."""
