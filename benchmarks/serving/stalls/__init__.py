"""What the slowest requests of a service wait for."""
