"""What every kernel needs: compiling, caching, launching, replaying a captured graph. Knows no kernel by name."""
