"""What the commands do that make tables smaller and say where their rows go."""
