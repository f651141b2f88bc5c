"""Training runs: configuration, loop, checkpoints, validation. Everything is said in events; nothing is printed."""
