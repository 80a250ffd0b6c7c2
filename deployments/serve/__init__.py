"""The deployment on Ray Serve: HTTP app, replicas, launcher, cluster, autoscaling. The only room for Ray beside `offline`."""
