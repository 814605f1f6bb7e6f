"""When a request may go: saturation of the pool, priorities, admission."""
