"""How the service is watched from outside: metrics gathered from every node, the log as JSON. Knows no Ray and no models."""
