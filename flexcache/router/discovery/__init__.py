"""Where the router learns its workers from: options, a file, DNS, Kubernetes."""
