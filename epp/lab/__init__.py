"""The lab: engines and fleets to learn from. The same engine runs in virtual time and behind real sockets."""
