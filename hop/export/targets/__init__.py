"""Programs for other runtimes."""
