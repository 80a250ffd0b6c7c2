"""Many requests in, batches to the lanes, each request's own scores out. Knows no Ray, no HTTP and no models."""
