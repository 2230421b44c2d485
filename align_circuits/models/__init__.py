"""Models: what can be loaded, and what is built by hand."""
