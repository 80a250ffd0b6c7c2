"""What can be found wrong before a service starts. Starts nothing, and knows no Ray."""
