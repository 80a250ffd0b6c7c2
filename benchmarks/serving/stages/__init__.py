"""Where the CPU time of a request goes, stage by stage."""
