"""Jobs in processes of their own, locally or on Ray."""
