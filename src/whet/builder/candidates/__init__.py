"""Which ways there are to run each layer: tactics, formats, views, reformats, and the filter of those that are timed."""
