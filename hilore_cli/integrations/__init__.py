"""One file for each trainer: what its users add to run a plan inside it."""
