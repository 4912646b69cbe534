"""Jobs in child processes, locally or on Ray."""
