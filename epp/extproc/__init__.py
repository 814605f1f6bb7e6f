"""How the proxy ASKS: a state machine without I/O, and the codec between protobuf and its records."""
