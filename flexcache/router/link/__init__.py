"""The link between proxy processes and the deciding one: messages over a private socket."""
