"""What is measured: ours, its peers, and the workload that all of them get."""
